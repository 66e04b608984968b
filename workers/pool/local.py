"""The pool in this process: one engine loop per worker. For tests, for laptops, and wherever Ray would be too much.

The engines share this process's fate and its interpreter lock; otherwise everything is as in a Ray pool. A thread
cannot be killed: a worker that hangs is left behind when it is replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import EngineFactory, PoolStartError, WorkerLost
from workers.pool.environment import new_incarnation
from workers.pool.loop import EngineLoop

STOP_TIMEOUT_S = 10.0
"""How long a thread has to finish what it is doing before it is left behind."""


@dataclass(frozen=True, slots=True)
class _Life:
    """One incarnation of a worker."""

    info: WorkerInfo
    loop: EngineLoop
    events: asyncio.Queue[Sequence[SampleEvent] | None]
    """A decode step's events each; None at the end."""


class LocalPool:
    """Implements `workers.contract.protocols.Pool` over engine factories, by worker id."""

    def __init__(self, factories: Mapping[str, EngineFactory], *, num_slots: int = 16, device: str = "cpu") -> None:
        """`num_slots` and `device` are what the factories' engines have; the pool only tells them on."""
        self._factories = dict(factories)
        self._num_slots = num_slots
        self._device = device
        self._lives: dict[str, _Life] = {}

    async def start(self) -> None:
        """Make every engine. Raises PoolStartError."""
        begun = await asyncio.gather(*(self._begin(worker_id) for worker_id in self._factories), return_exceptions=True)
        failures = zip(self._factories, begun, strict=True)
        for worker_id, error in failures:
            if isinstance(error, BaseException):
                await self.stop()
                if isinstance(error, Exception):
                    raise PoolStartError(f"worker {worker_id} cannot start: {error}") from error
                raise error

    async def stop(self) -> None:
        """End every engine's thread."""
        lives, self._lives = list(self._lives.values()), {}
        for life in lives:
            await asyncio.to_thread(life.loop.stop, STOP_TIMEOUT_S)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers, in the order of the factories."""
        return tuple(self._lives[worker_id].info for worker_id in self._factories if worker_id in self._lives)

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch. Raises WorkerLost."""
        return await asyncio.wrap_future(self._life(worker_id).loop.submit(batch))

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request. Raises WorkerLost."""
        self._life(worker_id).loop.start_sample(request)

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Stop a sample request. Raises WorkerLost."""
        self._life(worker_id).loop.cancel_sample(op_id)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """The stream of the present life's sample events. Raises WorkerLost at its end."""
        life = self._life(worker_id)
        while (events := await life.events.get()) is not None:
            for event in events:
                yield event
        raise WorkerLost(f"{life.info.incarnation} has ended")

    async def ping(self, worker_id: str) -> None:
        """Whether the engine's thread is alive; not whether it hangs. Raises WorkerLost."""
        self._life(worker_id).loop.check()

    async def replace(self, worker_id: str) -> WorkerInfo:
        """End a worker's thread and start its next life, empty. Raises WorkerLost."""
        await asyncio.to_thread(self._life(worker_id).loop.stop, STOP_TIMEOUT_S)
        try:
            return await self._begin(worker_id)
        except Exception as error:
            raise WorkerLost(f"{worker_id} does not start again: {error}") from error

    async def _begin(self, worker_id: str) -> WorkerInfo:
        incarnation = new_incarnation(worker_id)
        events: asyncio.Queue[Sequence[SampleEvent] | None] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def put(item: Sequence[SampleEvent] | None) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(events.put_nowait, item)

        loop = EngineLoop(self._factories[worker_id], incarnation, put)
        loop.ended.add_done_callback(lambda _: put(None))
        engine = await asyncio.wrap_future(loop.ready)
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=incarnation,
            model=engine.info,
            pid=os.getpid(),
            node=socket.gethostname(),
            num_slots=self._num_slots,
            device=self._device,
        )
        self._lives[worker_id] = _Life(info, loop, events)
        return info

    def _life(self, worker_id: str) -> _Life:
        life = self._lives.get(worker_id)
        if life is None:
            raise WorkerLost(f"{worker_id} is not running")
        return life

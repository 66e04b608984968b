"""The pool in this process: one engine loop per worker. For tests, for laptops, and wherever Ray would be one part too
many.

The engine shares this process's fate and its interpreter lock; otherwise everything is as in a Ray pool.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from workers.loop import EngineLoop
from workers.messages import Batch, BatchResult, SampleEvent, SampleRequest, WorkerInfo
from workers.pool import Engine, EngineFactory, WorkerLost


@dataclass(slots=True)
class _Life:
    """One incarnation of a worker."""

    info: WorkerInfo
    loop: EngineLoop
    events: asyncio.Queue[SampleEvent | None] = field(default_factory=asyncio.Queue)


class LocalPool:
    """Implements `workers.pool.Pool` over engine factories, by worker id."""

    def __init__(self, factories: Mapping[str, EngineFactory], *, num_slots: int = 16, device: str = "cpu") -> None:
        self._factories = dict(factories)
        self._num_slots = num_slots
        self._device = device
        self._lives: dict[str, _Life] = {}
        self._num_lives = 0

    async def start(self) -> None:
        """Make every engine. Raises what a factory raises."""
        await asyncio.gather(*(self._begin(worker_id) for worker_id in self._factories))

    async def stop(self) -> None:
        """End every engine's thread."""
        lives, self._lives = list(self._lives.values()), {}
        for life in lives:
            await asyncio.to_thread(life.loop.stop)
            life.events.put_nowait(None)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The workers, by id."""
        return tuple(self._lives[worker_id].info for worker_id in self._factories if worker_id in self._lives)

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch."""
        return await asyncio.wrap_future(self._life(worker_id).loop.submit(batch))

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request."""
        self._life(worker_id).loop.start_sample(request)

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Stop a sample request."""
        self._life(worker_id).loop.cancel_sample(op_id)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """The stream of one life's sample events."""
        life = self._life(worker_id)
        while (event := await life.events.get()) is not None:
            yield event
        raise WorkerLost(f"{worker_id} {life.info.incarnation} has ended")

    async def ping(self, worker_id: str) -> None:
        """Whether the engine's thread is alive."""
        if self._life(worker_id).loop.failed.done():
            raise WorkerLost(f"the engine of {worker_id} has failed")

    async def replace(self, worker_id: str) -> WorkerInfo:
        """End a worker's thread and start its next life, empty."""
        life = self._life(worker_id)
        await asyncio.to_thread(life.loop.stop)
        life.events.put_nowait(None)
        try:
            return await self._begin(worker_id)
        except Exception as error:
            raise WorkerLost(f"{worker_id} does not start again: {error}") from error

    async def _begin(self, worker_id: str) -> WorkerInfo:
        self._num_lives += 1
        incarnation = f"{worker_id}-{self._num_lives}"
        events: asyncio.Queue[SampleEvent | None] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()

        def on_event(event: SampleEvent) -> None:
            event_loop.call_soon_threadsafe(events.put_nowait, event)

        loop = EngineLoop(self._factories[worker_id], incarnation, on_event)
        engine: Engine = await asyncio.wrap_future(loop.ready)
        loop.failed.add_done_callback(lambda _: event_loop.call_soon_threadsafe(events.put_nowait, None))
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

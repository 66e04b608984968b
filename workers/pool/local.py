"""The pool in this process: one engine loop per worker. For tests, and for laptops without Ray.

The engines share this process and its interpreter lock; otherwise everything is as in a Ray pool. A thread cannot be
killed: when a hung worker is replaced, its thread stays behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass

from tinkerpool.serving import STAGES
from workers.contract.messages import Batch, BatchResult, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import EngineFactory, Owner, PoolStartError, WorkerLost
from workers.pool.environment import new_incarnation
from workers.pool.loop import EngineLoop

STOP_TIMEOUT_S = 10.0
"""Seconds that a thread has to finish its batch or step before it is left behind."""
MAKE_TIMEOUT_S = 60.0
"""Seconds that a thread has to finish its engine, if the start is cancelled, before it is left behind."""


class _EventQueue:
    """Sample events, put in by an engine's thread and taken out by the event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Sequence[SampleEvent] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, events: Sequence[SampleEvent] | None, /) -> None:
        """See `EventSink`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, events)

    async def get(self) -> Sequence[SampleEvent] | None:
        """Return the events of the next decode step; None at the end."""
        return await self._queue.get()


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """One incarnation of a worker."""

    info: WorkerInfo
    loop: EngineLoop
    events: _EventQueue


class LocalPool:
    """Implements `workers.contract.protocols.Pool` over engine factories, by worker id."""

    def __init__(
        self,
        factories: Mapping[str, EngineFactory],
        *,
        base_models: Mapping[str, str] | None = None,
        num_slots: int = 16,
        device: str = "cpu",
    ) -> None:
        """The other values are those of the factories' engines; the pool only announces them.

        `base_models`: of each worker; only workers whose base models are announced stay drained over a restart.
        """
        self._factories = dict(factories)
        self._base_models = dict(base_models or {})
        self._num_slots = num_slots
        self._device = device
        self._incarnations: dict[str, _Incarnation] = {}
        self._prepared: dict[str, asyncio.Task[_Incarnation]] = {}

    def base_models(self) -> Mapping[str, str]:
        """Return the base model of each worker, as announced."""
        return self._base_models

    async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
        """Make the engines of all workers but the drained ones. Raises PoolStartError."""
        starting = [worker_id for worker_id in self._factories if worker_id not in drained]
        STAGES.info("loading the base models of %s", ", ".join(starting))
        begun = await asyncio.gather(*(self._begin(worker_id) for worker_id in starting), return_exceptions=True)
        for worker_id, error in zip(starting, begun, strict=True):
            if isinstance(error, BaseException):
                await self.stop()
                if isinstance(error, Exception):
                    raise PoolStartError(f"worker {worker_id} cannot start: {error}") from error
                raise error

    async def stop(self, *, is_final: bool = False) -> None:
        """End every engine's thread."""
        for worker_id in [*self._incarnations, *self._prepared]:
            await self.remove(worker_id)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers, in the order of the factories."""
        running = self._incarnations
        return tuple(running[worker_id].info for worker_id in self._factories if worker_id in running)

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        """Run a batch. Raises WorkerLost."""
        return await asyncio.wrap_future(self._incarnation(worker_id).loop.submit(batch))

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        """Hand over a sample request. Raises WorkerLost."""
        self._incarnation(worker_id).loop.start_sample(request)

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        """Stop a sample request. Raises WorkerLost."""
        self._incarnation(worker_id).loop.cancel_sample(op_id)

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        """Yield the sample events of the current incarnation. Raises WorkerLost at its end."""
        incarnation = self._incarnation(worker_id)
        while (events := await incarnation.events.get()) is not None:
            for event in events:
                yield event
        incarnation.loop.check()  # raises the reason
        raise WorkerLost(f"{incarnation.info.incarnation} has ended")

    async def ping(self, worker_id: str) -> None:
        """Raise WorkerLost if the engine's thread has ended. A hung thread is not noticed."""
        self._incarnation(worker_id).loop.check()

    async def add(self, base_model: str) -> WorkerInfo:
        """Start another worker of a base model. Raises WorkerLost."""
        worker_id = f"w{len(self._factories)}"
        factories = (self._factories[each.worker_id] for each in self.workers() if each.model.name == base_model)
        self._factories[worker_id], self._base_models[worker_id] = next(factories), base_model
        try:
            return await self._begin(worker_id)
        except Exception as error:
            raise WorkerLost(f"{worker_id} does not start: {error}") from error

    async def remove(self, worker_id: str) -> None:
        """End a worker's thread, and that of a prepared incarnation."""
        if (present := self._incarnations.pop(worker_id, None)) is not None:
            await asyncio.to_thread(present.loop.stop, STOP_TIMEOUT_S)
        if (preparing := self._prepared.pop(worker_id, None)) is not None:
            [prepared] = await asyncio.gather(preparing, return_exceptions=True)
            if isinstance(prepared, _Incarnation):
                await asyncio.to_thread(prepared.loop.stop, STOP_TIMEOUT_S)

    async def prepare(self, worker_id: str) -> None:
        """Start a worker's next incarnation beside the present one. Raises WorkerLost."""
        preparing = self._prepared[worker_id] = asyncio.create_task(self._started(worker_id))
        try:
            await asyncio.shield(preparing)
        except Exception as error:
            self._prepared.pop(worker_id, None)
            raise WorkerLost(f"{worker_id} does not start again: {error}") from error

    async def replace(self, worker_id: str) -> WorkerInfo:
        """End a worker's thread and start its next incarnation, empty, or take the prepared one. Raises WorkerLost."""
        if (present := self._incarnations.get(worker_id)) is not None:
            await asyncio.to_thread(present.loop.stop, STOP_TIMEOUT_S)
        preparing = self._prepared.pop(worker_id, None) or asyncio.create_task(self._started(worker_id))
        try:
            self._incarnations[worker_id] = await preparing
        except Exception as error:
            raise WorkerLost(f"{worker_id} does not start again: {error}") from error
        return self._incarnations[worker_id].info

    async def leaving(self) -> Mapping[str, float]:
        """Return nothing: the host is this machine."""
        return {}

    async def _begin(self, worker_id: str) -> WorkerInfo:
        incarnation = self._incarnations[worker_id] = await self._started(worker_id)
        return incarnation.info

    async def _started(self, worker_id: str) -> _Incarnation:
        name, events = new_incarnation(worker_id), _EventQueue()
        loop = EngineLoop(self._factories[worker_id], name, events)
        try:
            engine = await asyncio.wrap_future(loop.ready)
        except BaseException:
            # After a cancellation the thread still makes the engine. An interpreter that ends meanwhile aborts.
            await asyncio.to_thread(loop.stop, MAKE_TIMEOUT_S)
            raise
        info = WorkerInfo(
            worker_id=worker_id,
            incarnation=name,
            model=engine.info,
            pid=os.getpid(),
            node=socket.gethostname(),
            num_slots=self._num_slots,
            device=self._device,
        )
        return _Incarnation(info, loop, events)

    def _incarnation(self, worker_id: str) -> _Incarnation:
        incarnation = self._incarnations.get(worker_id)
        if incarnation is None:
            raise WorkerLost(f"{worker_id} is not running")
        return incarnation

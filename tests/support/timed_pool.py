"""A real coordinator in virtual time over one toy worker whose passes take a fixed time plus a time per token.

Decode steps take a fixed time. They run beside the passes, but a batch waits until decoding has had its share of the
time of the one before, as on a worker.

For promises about waiting times, which are exact here. Faults are tested in the simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from coordinator.base.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from tests.simulation.loop import SimLoop
from tests.simulation.world import SimTime, World
from tests.support.toy_engine import ToyEngine
from tests.support.toy_pool import ToyPool
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import Batch, BatchResult, PassItem, SampleEvent, SampleRequest, WorkerInfo
from workers.contract.protocols import Owner

T = TypeVar("T")
STEP_S = 0.001
"""Seconds that a batch without a pass takes."""


@dataclass(slots=True)
class TimedPool:
    """Implements `workers.contract.protocols.Pool`: one worker, which never fails."""

    fixed_s: float
    token_s: float
    decode_s: float = 0.01
    engine: ToyEngine = field(default_factory=lambda: ToyEngine("w0-1"))
    passes: list[tuple[float, int]] = field(default_factory=list)
    """Begin and number of tokens of each pass."""
    _owed_s: float = 0.0
    _started: asyncio.Event = field(default_factory=asyncio.Event)

    def base_models(self) -> Mapping[str, str]:
        return {"w0": "toy"}

    async def start(self, owner: Owner, drained: Collection[str] = ()) -> None:
        pass

    async def stop(self, *, is_final: bool = False) -> None:
        pass

    def workers(self) -> tuple[WorkerInfo, ...]:
        worker = WorkerInfo(
            worker_id="w0", incarnation="w0-1", model=self.engine.info, pid=1, node="", num_slots=16, device="none"
        )
        return (worker,)

    async def run(self, worker_id: str, batch: Batch) -> BatchResult:
        num_tokens = sum(len(d.tokens) for item in batch.items if isinstance(item, PassItem) for d in item.data)
        if num_tokens:
            self.passes.append((asyncio.get_running_loop().time(), num_tokens))
        if self.engine.can_decode():
            await asyncio.sleep(self._owed_s)
        seconds = self.fixed_s + self.token_s * num_tokens if num_tokens else STEP_S
        self._owed_s = seconds * batch.decode_share / (1.0 - batch.decode_share)
        await asyncio.sleep(seconds)
        return replace(self.engine.run(batch), wall_s=seconds)

    async def start_sample(self, worker_id: str, request: SampleRequest) -> None:
        self.engine.start_sample(request)
        self._started.set()

    async def cancel_sample(self, worker_id: str, op_id: str) -> None:
        pass

    async def sample_events(self, worker_id: str) -> AsyncIterator[SampleEvent]:
        while True:
            while self.engine.can_decode():
                await asyncio.sleep(self.decode_s)
                for event in self.engine.decode_step():
                    yield event
            self._started.clear()
            await self._started.wait()

    async def ping(self, worker_id: str) -> None:
        pass

    async def add(self, base_model: str) -> WorkerInfo:
        raise AssertionError("there is one worker")

    async def remove(self, worker_id: str) -> None:
        raise AssertionError("there is one worker")

    async def prepare(self, worker_id: str) -> None:
        raise AssertionError("its host never leaves")

    async def replace(self, worker_id: str) -> WorkerInfo:
        raise AssertionError("this worker is never lost")

    async def leaving(self) -> Mapping[str, float]:
        return {}


def in_virtual_time(
    data_dir: Path,
    pool: TimedPool,
    body: Callable[[ToyPool], Coroutine[Any, Any, T]],
    *,
    seconds_max: float = 600.0,
    **config: Any,
) -> T:
    """Start a coordinator, run `body` on it, and stop it; return the result of `body`."""

    async def run_body() -> T:
        coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir, **config), pool, SimTime(World(0)))
        await coordinator.start()
        try:
            return await body(ToyPool(coordinator, {"w0": [pool.engine]}))
        finally:
            await coordinator.stop()

    loop = SimLoop(Random(0), 0.0, seconds_max)
    try:
        result = loop.run_until_complete(run_body())
        assert not loop.problems, loop.problems
    finally:
        loop.drop()
        loop.close()
    return result


async def paired_step(toys: ToyPool, adapter: str, seq: int, lengths: Sequence[int], tenant: str) -> ops_pb.Operation:
    """Submit a forward_backward and its optim_step together and wait for both; return the first."""
    names = await asyncio.gather(
        toys.forward_backward(adapter, seq, *lengths, tenant=tenant), toys.optim_step(adapter, seq + 1, tenant=tenant)
    )
    first, _ = await toys.wait(*names, tenant=tenant)
    return first

"""A service in this process, reached directly or over gRPC, and tenants that step on any service.

Depends on the coordinator, the client and its transport. `scripts.embedded_pool` is a pool in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from coordinator.base.config import CoordinatorConfig, GrpcConfig
from coordinator.coordinator import Coordinator
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.rpcs import SERVICES, use_case_name
from coordinator.runtime.data_dir import Seams
from coordinator.service import Service
from coordinator.tenants.principals import Principal
from scripts.bench.models import Model
from tests.support.loop_thread import LoopThread
from tinkerpool import ServiceClient, TrainingClient, types
from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from workers.contract import messages
from workers.contract.protocols import Pool
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

T = TypeVar("T")
P = TypeVar("P", bound=Pool)
ADAM = types.AdamParams(learning_rate=1e-4)
USE_CASES = {method.name: use_case_name(method) for service in SERVICES for method in service.methods}


class LocalService:
    """A coordinator with its log on disk, an engine on a thread, and a gRPC door, all in this process."""

    def __init__(
        self, data_dir: Path, model: PoolModel, *, num_threads: int = 0, num_slots: int = 16, seams: Seams | None = None
    ) -> None:
        """Start the service, and return when it serves. `seams`: as for the coordinator."""
        self._thread = LoopThread()
        pool = make_pool(PoolConfig(models=(model,), kind="local", num_threads=num_threads, num_slots=num_slots))
        self.engine_s = 0.0
        """Seconds in which the engine ran batches, as it reports them."""
        self.coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir), self._timed(pool), seams=seams)
        self._door = GrpcDoor(GrpcConfig(port=0))
        self._thread.run(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.run(self._stop())
        self._thread.close()

    def over_grpc(self, tenant: str) -> ServiceClient:
        """Return a tenant's client through the door."""
        key, _ = self._thread.run(self.coordinator.authenticator.create_key(tenant))
        return ServiceClient(f"http://127.0.0.1:{self._door.port}", key)

    def direct(self, tenant: str) -> ServiceClient:
        """Return a tenant's client that calls the use cases directly, without network or serialization."""
        key, _ = self._thread.run(self.coordinator.authenticator.create_key(tenant))
        principal = self.coordinator.authenticator.authenticate(key)
        return ServiceClient(transport=DirectTransport(self.coordinator.service, principal, self._thread.loop))

    def _timed(self, pool: P) -> P:
        run = pool.run

        async def timed(worker_id: str, batch: messages.Batch) -> messages.BatchResult:
            result = await run(worker_id, batch)
            self.engine_s += result.wall_s
            return result

        pool.run = timed  # type: ignore[method-assign]
        return pool

    async def _start(self) -> None:
        self._door.bind()
        await self.coordinator.start()
        coordinator = self.coordinator
        await self._door.start(coordinator)

    async def _stop(self) -> None:
        await self._door.refuse()
        await self.coordinator.stop()
        await self._door.stop(1.0)


class DirectTransport:
    """Implements the client's `Transport` with the use cases of a coordinator on another thread's loop.

    A refusal is raised as the coordinator's own exception and ends the benchmark.
    """

    def __init__(self, service: Service, principal: Principal, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._principal = principal
        self._loop = loop

    async def call(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """See Transport."""
        calling = asyncio.run_coroutine_threadsafe(self._use_case(method, request), self._loop)
        response: ResponseT = await asyncio.wait_for(asyncio.wrap_future(calling), timeout_s)
        return response

    async def stream(
        self, method: ServerStream[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """See Transport."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[ResponseT | None] = asyncio.Queue()

        async def pump() -> None:
            try:
                async for response in self._use_case(method, request):
                    here.call_soon_threadsafe(arrived.put_nowait, response)
            finally:
                here.call_soon_threadsafe(arrived.put_nowait, None)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (response := await arrived.get()) is not None:
                yield response
            await asyncio.wrap_future(pumping)
        finally:
            pumping.cancel()

    async def close(self) -> None:
        """See Transport."""

    def _use_case(self, method: Unary[RequestT, ResponseT], request: RequestT) -> Any:
        return getattr(self._service, USE_CASES[method.name])(self._principal, request)


def serve_arguments(model: Model, args: argparse.Namespace) -> list[str]:
    """Return the arguments of `tinkerpool serve` for a model and this command line."""
    return ["--model", f"{model.name}={model.path}", "--threads", str(args.threads), "--pool", args.pool]


def to_user_data(data: Sequence[messages.Datum]) -> list[types.Datum]:
    """Convert an engine's sequences to the client's type."""
    return [
        types.Datum(types.ModelInput.from_ints(datum.tokens.astype(np.int64)), dict(datum.loss_inputs))
        for datum in data
    ]


async def _pipelined(training: TrainingClient, batch: list[types.Datum], num_steps: int) -> list[float]:
    """Submit each step before awaiting the previous one; return the steps' cycles."""
    waiting: deque[Any] = deque()
    cycles = []
    for step in range(num_steps + 1):
        if step < num_steps:
            waiting.append((training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)))
        if step > 0:
            passed, stepped = waiting.popleft()
            await passed
            cycles.append((await stepped).metrics["clock_cycle:unique"])
    return cycles


class Tenants:
    """Tenants of a service that step at the same time, each with its own client and adapter."""

    def __init__(self, clients: Sequence[ServiceClient], model_name: str, rank: int, data: Sequence[Any]) -> None:
        """`data[i]`: the training data of tenant i, as an engine takes it."""
        self.trainings = [c.create_lora_training_client(model_name, rank=rank).result() for c in clients]
        self._batches = [to_user_data(part) for part in data]

    def step(self) -> list[float]:
        """Take a step of every tenant, pass and optimizer step submitted together; return the seconds of each."""
        begin_s: list[float] = []
        end_s = [0.0] * len(self.trainings)
        halves: list[Future[Any]] = []
        num_ended = threading.Semaphore(0)

        def record_end(tenant: int, _: object) -> None:
            end_s[tenant] = time.perf_counter()
            num_ended.release()

        for tenant, (training, batch) in enumerate(zip(self.trainings, self._batches, strict=True)):
            begin_s.append(time.perf_counter())
            passed, stepped = training.forward_backward(batch, "cross_entropy"), training.optim_step(ADAM)
            for half in (passed.future(), stepped.future()):
                half.add_done_callback(partial(record_end, tenant))
                halves.append(half)
        for _ in halves:
            num_ended.acquire()
        for half in halves:
            half.result()  # raises the operation's error
        return [end - begin for begin, end in zip(begin_s, end_s, strict=True)]

    def train(self, num_steps: int) -> list[float]:
        """Run every tenant's pipelined loop; return the clock's cycles per step of each tenant."""

        async def run_all() -> list[list[float]]:
            loops = (_pipelined(t, b, num_steps) for t, b in zip(self.trainings, self._batches, strict=True))
            return await asyncio.gather(*loops)

        return [(cycles[-1] - cycles[0] + 1) / num_steps for cycles in asyncio.run(run_all())]

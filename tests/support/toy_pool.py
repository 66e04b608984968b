"""A real coordinator over a LocalPool of toy engines: everything but the model."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.auth import Principal
from coordinator.config import CoordinatorConfig
from coordinator.coordinator import Coordinator
from tests.toy_engine import ToyEngine
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import adapters_pb2, sessions_pb2, training_pb2, types_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.local import LocalPool


@dataclass(slots=True)
class ToyPool:
    """A running coordinator, its engines, and shorthands for calls."""

    coordinator: Coordinator
    engines: dict[str, list[ToyEngine]]
    """Worker to its engines, one per life."""
    principals: dict[str, Principal] = field(default_factory=dict)

    @property
    def service(self) -> Any:
        """The use cases."""
        return self.coordinator.service

    async def principal(self, tenant: str = "alice") -> Principal:
        """A tenant's principal, made at first use."""
        if tenant not in self.principals:
            key, _ = await self.coordinator.authenticator.create_key(tenant)
            self.principals[tenant] = self.coordinator.authenticator.authenticate(key)
        return self.principals[tenant]

    async def adapter(self, tenant: str = "alice", **values: Any) -> str:
        """A new adapter's id."""
        principal = await self.principal(tenant)
        request = sessions_pb2.CreateSessionRequest(request_id=uuid.uuid4().hex)
        session = (await self.service.create_session(principal, request)).session
        settings: dict[str, Any] = {"base_model": "toy", "rank": 8, "index": 0} | values
        response = await self.service.create_adapter(
            principal, adapters_pb2.CreateAdapterRequest(session_id=session.session_id, **settings)
        )
        return str(response.adapter.adapter_id)

    async def forward_backward(self, adapter_id: str, seq: int, *lengths: int, tenant: str = "alice") -> str:
        """Submit a forward_backward of sequences of these lengths; returns the operation's name."""
        request = pass_request(adapter_id, seq, lengths)
        response = await self.service.forward_backward(await self.principal(tenant), request)
        return str(response.operation.name)

    async def optim_step(self, adapter_id: str, seq: int, tenant: str = "alice", learning_rate: float = 1e-3) -> str:
        """Submit an optim_step; returns the operation's name."""
        request = training_pb2.OptimStepRequest(
            adapter_id=adapter_id, seq=seq, adam=types_pb2.AdamParams(learning_rate=learning_rate)
        )
        return str((await self.service.optim_step(await self.principal(tenant), request)).operation.name)

    async def wait(self, *names: str, tenant: str = "alice") -> list[ops_pb.Operation]:
        """The finished operations, in the order of their names."""
        found = {}
        request = ops_pb.WaitOperationsRequest(names=names)
        async for response in self.service.wait_operations(await self.principal(tenant), request):
            found[response.operation.name] = response.operation
        return [found[name] for name in names]

    def chain(self, adapter_id: str) -> bytes:
        """The hash chain of the adapter's copy."""
        for engines in self.engines.values():
            if adapter_id in engines[-1].adapters:
                return engines[-1].adapters[adapter_id].chain
        raise AssertionError(f"{adapter_id} is on no worker")


@asynccontextmanager
async def running_pool(
    data_dir: Path, *, num_workers: int = 1, seconds_per_batch: float = 0.0, **config: Any
) -> AsyncIterator[ToyPool]:
    """Start a coordinator with toy workers on a data directory, and stop it at the end."""
    engines: dict[str, list[ToyEngine]] = {f"w{i}": [] for i in range(num_workers)}

    def factory_of(worker_id: str) -> Any:
        def factory(incarnation: str) -> ToyEngine:
            engine = ToyEngine(incarnation, seconds_per_batch=seconds_per_batch)
            engines[worker_id].append(engine)
            return engine

        return factory

    pool = LocalPool({worker_id: factory_of(worker_id) for worker_id in engines})
    coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir, **config), pool)
    await coordinator.start()
    try:
        yield ToyPool(coordinator, engines)
    finally:
        await coordinator.stop()


def datum(length: int, first: int = 1) -> types_pb2.Datum:
    """A sequence for cross_entropy."""
    tokens = np.arange(first, first + length, dtype=np.int32) % 60
    return types_pb2.Datum(
        tokens=to_tensor(tokens),
        loss_inputs={"target_tokens": to_tensor(tokens), "weights": to_tensor(np.ones(length, np.float32))},
    )


def pass_request(adapter_id: str, seq: int, lengths: Sequence[int]) -> training_pb2.ForwardBackwardRequest:
    """A forward_backward of sequences of these lengths."""
    return training_pb2.ForwardBackwardRequest(
        adapter_id=adapter_id,
        seq=seq,
        data=[datum(length, seq) for length in lengths],
        loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
    )

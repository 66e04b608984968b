"""A real coordinator over a LocalPool of toy engines."""

from __future__ import annotations

import asyncio
import io
import itertools
import shutil
import sqlite3
import tarfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import ServiceError
from coordinator.base.time import Time
from coordinator.coordinator import Coordinator
from coordinator.operations.adapter_log import AdapterLog
from coordinator.payloads.passes import cut_chunks, decode_pass
from coordinator.runtime.core import Core
from coordinator.runtime.data_dir import Seams
from coordinator.scheduling.worker_losses import LossKind
from coordinator.storage import disk
from coordinator.storage.folders import StateFolders
from coordinator.storage.rows import NewOperation
from coordinator.storage.store import Store
from coordinator.tenants.principals import Principal, Role
from tests.support.toy_engine import ToyEngine, digest, fresh_chain, item_digest, toy_token
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import (
    AdamParams,
    AdapterSpec,
    OptimStepItem,
    PassItem,
    SampleRequest,
    SamplerVersion,
    SamplingParams,
)
from workers.contract.protocols import WorkerLost
from workers.pool.local import LocalPool

RESERVE_BYTES = 1 << 18
"""Room on the disk that a toy pool reserves for deletions."""


@dataclass(slots=True)
class ToyPool:
    """A running coordinator, its engines, and shorthands for calls."""

    coordinator: Coordinator
    engines: dict[str, list[ToyEngine]]
    """Worker to its engines, one per incarnation."""
    principals: dict[str, Principal] = field(default_factory=dict)

    @property
    def service(self) -> Any:
        """The use cases."""
        return self.coordinator.service

    @property
    def core(self) -> Core:
        """The coordinator's parts. Tests reach them only through this property."""
        return self.coordinator.core

    @property
    def store(self) -> Store:
        """The database."""
        return self.core.store

    @property
    def folders(self) -> StateFolders:
        """The folders of checkpoints, samplers and snapshots."""
        return self.core.states.folders

    def log_of(self, adapter_id: str) -> AdapterLog:
        """Return an adapter's log."""
        return self.core.registry.logs[adapter_id]

    async def principal(self, tenant: str = "alice") -> Principal:
        """Return a tenant's principal, created at first use."""
        if tenant not in self.principals:
            key, _ = await self.coordinator.authenticator.create_key(tenant)
            self.principals[tenant] = self.coordinator.authenticator.authenticate(key)
        return self.principals[tenant]

    async def administrator(self) -> Principal:
        """Return an administrator, with a new key."""
        key, _ = await self.coordinator.authenticator.create_key("root", role=Role.ADMIN)
        return self.coordinator.authenticator.authenticate(key)

    async def adapter(self, tenant: str = "alice", **values: Any) -> str:
        """Create an adapter; return its id."""
        principal = await self.principal(tenant)
        request = sessions_pb2.CreateSessionRequest(request_id=uuid.uuid4().hex)
        session = (await self.service.create_session(principal, request)).session
        settings: dict[str, Any] = {"base_model": "toy", "rank": 8, "index": 0} | values
        response = await self.service.create_adapter(
            principal, adapters_pb2.CreateAdapterRequest(session_id=session.session_id, **settings)
        )
        return str(response.adapter.adapter_id)

    async def forward_backward(
        self,
        adapter_id: str,
        seq: int,
        *lengths: int,
        tenant: str = "alice",
        token: int | None = None,
        batch: tuple[int, int] | None = None,
    ) -> str:
        """Submit a forward_backward of sequences of these lengths; return the operation's name.

        All tokens of the first sequence are `token`, if given; `batch` are the first and the last seq of its batch.
        """
        request = pass_request(adapter_id, seq, lengths)
        if batch is not None:
            request.batch.first_seq, request.batch.num_requests = batch[0], batch[1] - batch[0] + 1
        if token is not None:
            request.data[0].tokens.CopyFrom(to_tensor(np.full(lengths[0], token, np.int32)))
        response = await self.service.forward_backward(await self.principal(tenant), request)
        return str(response.operation.name)

    async def optim_step(self, adapter_id: str, seq: int, tenant: str = "alice", learning_rate: float = 1e-3) -> str:
        """Submit an optim_step; return the operation's name."""
        request = training_pb2.OptimStepRequest(
            adapter_id=adapter_id, seq=seq, adam=types_pb2.AdamParams(learning_rate=learning_rate)
        )
        return str((await self.service.optim_step(await self.principal(tenant), request)).operation.name)

    async def discard_gradient(self, adapter_id: str, seq: int) -> str:
        """Submit a discard_gradient; return the operation's name."""
        request = training_pb2.DiscardGradientRequest(adapter_id=adapter_id, seq=seq)
        return str((await self.service.discard_gradient(await self.principal(), request)).operation.name)

    async def submit(self, adapter_id: str, seq: int) -> str:
        """Submit an optim_step at every third seq, otherwise a forward_backward; return the operation's name."""
        if seq % 3 == 0:
            return await self.optim_step(adapter_id, seq)
        return await self.forward_backward(adapter_id, seq, *LENGTHS)

    def spec_of(self, adapter_id: str) -> AdapterSpec:
        """Return the spec that the coordinator gave the adapter at its creation."""
        return self.log_of(adapter_id).spec

    async def wait(self, *names: str, tenant: str = "alice") -> list[ops_pb.Operation]:
        """Wait for operations; return them in the order of `names`."""
        found = {}
        request = ops_pb.WaitOperationsRequest(names=names)
        async for response in self.service.wait_operations(await self.principal(tenant), request):
            found[response.operation.name] = response.operation
        return [found[name] for name in names]

    async def take_over(self, *tenants: str) -> None:
        """Act as tenants that an earlier epoch created."""
        for tenant in tenants or ("alice",):
            [row] = [row for row in self.core.store.tenants.all() if row.name == tenant]
            self.principals[tenant] = Principal(row.tenant_id, tenant, "key", Role.MEMBER)

    async def session(self, tenant: str = "alice") -> str:
        """Create a session; return its id."""
        request = sessions_pb2.CreateSessionRequest(request_id=uuid.uuid4().hex)
        response = await self.service.create_session(await self.principal(tenant), request)
        return str(response.session.session_id)

    async def submit_save(self, adapter_id: str, seq: int, name: str, tenant: str = "alice", **values: Any) -> str:
        """Submit a save of a state; return the operation's name. `values` are more fields of the request."""
        request = checkpoints_pb2.SaveStateRequest(adapter_id=adapter_id, seq=seq, name=name, **values)
        return str((await self.service.save_state(await self.principal(tenant), request)).operation.name)

    async def save(
        self, adapter_id: str, seq: int, name: str, tenant: str = "alice", **values: Any
    ) -> ops_pb.Operation:
        """Save a state and wait."""
        return (await self.wait(await self.submit_save(adapter_id, seq, name, tenant, **values), tenant=tenant))[0]

    async def load_state(self, adapter_id: str, seq: int, path: str, *, with_optimizer: bool = True) -> str:
        """Submit a load of a checkpoint; return the operation's name."""
        request = training_pb2.LoadStateRequest(
            adapter_id=adapter_id, seq=seq, path=path, with_optimizer=with_optimizer
        )
        return str((await self.service.load_state(await self.principal(), request)).operation.name)

    async def cancel(self, name: str) -> ops_pb.Operation:
        """Cancel an operation; return it as it is then."""
        request = ops_pb.CancelOperationRequest(name=name)
        operation: ops_pb.Operation = (await self.service.cancel_operation(await self.principal(), request)).operation
        return operation

    async def delete_adapter(self, adapter_id: str) -> None:
        """Delete an adapter."""
        request = adapters_pb2.DeleteAdapterRequest(adapter_id=adapter_id)
        await self.service.delete_adapter(await self.principal(), request)

    async def finish_session(self, session_id: str) -> None:
        """End a session, or the session of an adapter."""
        request = sessions_pb2.FinishSessionRequest(session_id=session_id.partition(":")[0])
        await self.service.finish_session(await self.principal(), request)

    async def submit_publish(self, adapter_id: str, seq: int, name: str = "", **values: Any) -> str:
        """Submit a save of weights for a sampler; return the operation's name."""
        request = checkpoints_pb2.SaveWeightsForSamplerRequest(adapter_id=adapter_id, seq=seq, name=name, **values)
        return str((await self.service.save_weights_for_sampler(await self.principal(), request)).operation.name)

    async def publish(self, adapter_id: str, seq: int, name: str = "") -> ops_pb.Operation:
        """Save weights for a sampler and wait."""
        return (await self.wait(await self.submit_publish(adapter_id, seq, name)))[0]

    async def set_access(self, path: str, *, is_public: bool, tenant: str = "alice") -> None:
        """Publish a checkpoint, or make it private."""
        request = checkpoints_pb2.SetCheckpointAccessRequest(path=path, is_public=is_public)
        await self.service.set_checkpoint_access(await self.principal(tenant), request)

    async def delete_checkpoint(self, path: str) -> None:
        """Delete a checkpoint."""
        await self.service.delete_checkpoint(await self.principal(), checkpoints_pb2.DeleteCheckpointRequest(path=path))

    async def export(self, path: str) -> dict[str, bytes]:
        """Export a checkpoint; return its files by name."""
        request = checkpoints_pb2.ExportCheckpointRequest(path=path)
        pieces = [piece.data async for piece in self.service.export_checkpoint(await self.principal(), request)]
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            return {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]

    async def sampler(self, session_id: str, tenant: str = "alice", **values: Any) -> str:
        """Create a sampler, of the base model if `model_path` is not given; return its id."""
        source = values if "model_path" in values else {"base_model": "toy"} | values
        request = sampling_pb2.CreateSamplerRequest(session_id=session_id, **source)
        response = await self.service.create_sampler(await self.principal(tenant), request)
        return str(response.sampler.sampler_id)

    async def sample(self, sampler_id: str, seq: int, tenant: str = "alice", **values: Any) -> str:
        """Submit a sample; return the operation's name."""
        request = sample_request(sampler_id, seq, **values)
        return str((await self.service.sample(await self.principal(tenant), request)).operation.name)

    def tenant_id(self, tenant: str = "alice") -> str:
        """Return the id of a tenant."""
        row = self.store.tenants.named(tenant)
        assert row is not None
        return row.tenant_id

    def checkpoint_bytes(self, tenant_id: str) -> int:
        """Return what holdings count for the checkpoints of a tenant."""
        holdings, logs = self.core.holdings, self.core.registry.logs.values()
        states = (holdings.state_bytes(log.spec, log.base_model) for log in logs if log.tenant_id == tenant_id)
        return holdings.num_bytes(tenant_id) - self.store.tenants.row_bytes(tenant_id) - sum(states)

    async def written(self) -> None:
        """Wait until no snapshot and no weights are being written."""
        await self.core.states.publishing.finish()
        for loop in self.core.loops.values():
            await loop.until_idle()
            await loop._snapshots.finish()  # private: no product code waits for the end of snapshots

    def lose_worker(self, worker_id: str = "w0", incarnation: str = "") -> None:
        """Report a worker's incarnation, by default its present one, as lost, although it is running."""
        core = self.coordinator.core
        core.scheduling.losses.record(
            worker_id, incarnation or core.fleet.worker(worker_id).name, LossKind.DIED, "reported by a test"
        )

    def samples_on(self, worker_id: str = "w0") -> list[str]:
        """Return the samples that a worker has."""
        return list(self.core.fleet.worker(worker_id).samples)

    def versions_on(self, worker_id: str = "w0") -> set[str]:
        """Return the sampler versions that a worker holds, by the coordinator's records."""
        return set(self.core.fleet.worker(worker_id).versions)

    async def kill_worker(self, worker_id: str = "w0") -> None:
        """End a worker's engine loop as a crash would. Private: a pool has no method that crashes a worker."""
        incarnation = self.core.pool._incarnations[worker_id]  # type: ignore[attr-defined]
        await asyncio.to_thread(incarnation.loop.stop)

    def hold(self) -> None:
        """Block batches and samples of every worker."""
        for engine in self._present():
            engine.may_run.clear()
            engine.may_decode = False

    async def release(self) -> None:
        """Unblock batches and samples."""
        for engine in itertools.chain(*self.engines.values()):  # a worker may have two for a while
            engine.may_run.set()
            engine.may_decode = True
        for worker_id in self.engines:
            with suppress(WorkerLost):
                await self.core.pool.cancel_sample(worker_id, "unknown")  # wakes the loop

    def chain(self, adapter_id: str) -> bytes:
        """Return the hash chain of the adapter's copy."""
        for engine in self._present():
            if adapter_id in engine.adapters:
                return engine.adapters[adapter_id].chain
        raise AssertionError(f"{adapter_id} is on no worker")

    def _present(self) -> list[ToyEngine]:
        """Return the engine of each worker's last incarnation."""
        return [engines[-1] for engines in self.engines.values() if engines]


@asynccontextmanager
async def running_pool(
    data_dir: Path,
    *,
    num_workers: int = 1,
    seconds_per_batch: float = 0.0,
    time: Time | None = None,
    is_crash: bool = False,
    connect: Callable[[Path], Any] | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    engine_values: Sequence[Mapping[str, Any]] = (),
    **config: Any,
) -> AsyncIterator[ToyPool]:
    """Start a coordinator with toy workers on a data directory, and stop it at the end.

    `connect` opens the database. `engine_values`: for each worker more arguments of its engine. `is_crash`: its data
    directory is restored to its contents at the end of the `async with` block, as if the process was killed there.
    """
    values_of = {f"w{i}": values for i, values in enumerate(engine_values or [{}] * num_workers)}
    engines: dict[str, list[ToyEngine]] = {worker_id: [] for worker_id in values_of}

    def factory_of(worker_id: str) -> Any:
        def factory(incarnation: str) -> ToyEngine:
            engine = ToyEngine(
                incarnation,
                seconds_per_batch=seconds_per_batch,
                tokenizer_files=tokenizer_files,
                **values_of[worker_id],
            )
            engines.setdefault(incarnation.rpartition("-")[0], []).append(engine)  # one that joins has another id
            return engine

        return factory

    base_models = dict.fromkeys(engines, "toy")
    pool = LocalPool({worker_id: factory_of(worker_id) for worker_id in engines}, base_models=base_models)
    coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir, **config), pool, time, Seams(connect=connect))
    toys = ToyPool(coordinator, engines)
    # Patched: the size is no setting, and hundreds of pools would compute, write and sync 8 MiB each.
    with mock.patch.object(disk, "RESERVE_BYTES", RESERVE_BYTES):
        await coordinator.start()
    try:
        yield toys
        if is_crash:
            await toys.core.states.until_removed()  # the copy must not find half a folder
            shutil.copytree(data_dir, data_dir.with_name(f"{data_dir.name}-crashed"))
    finally:
        for engine in itertools.chain(*engines.values()):
            engine.may_run.set()
        await coordinator.stop()
        if (crashed := data_dir.with_name(f"{data_dir.name}-crashed")).exists():
            shutil.rmtree(data_dir)
            crashed.rename(data_dir)


@dataclass(slots=True)
class FakeTime:
    """Implements `coordinator.base.time.Time`; a test advances it."""

    now: float = 1000.0
    wall_offset: float = 1.7e9
    sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_offset + self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, future))
        await future

    async def until(self, is_done: Callable[[], bool], seconds_max: float = 10_000.0) -> float:
        """Advance until `is_done` returns True; return the seconds of this time that it took."""
        started = self.now
        while not is_done():
            assert self.now - started < seconds_max, f"not done after {seconds_max} s"
            await self.advance(1.0)
            await asyncio.sleep(0.001)  # threads need real time
        return self.now - started

    async def advance(self, seconds: float, step: float = 1.0) -> None:
        """Advance in steps; after each, wake the sleeps that have ended."""
        for _ in range(round(seconds / step)):
            self.now += step
            due = [future for end, future in self.sleepers if end <= self.now]
            self.sleepers = [(end, future) for end, future in self.sleepers if end > self.now]
            for future in due:
                if not future.done():
                    future.set_result(None)
            for _ in range(5):
                await asyncio.sleep(0)


async def refusal(call: Awaitable[object]) -> ServiceError:
    """Return the error of a call that the service refuses."""
    with pytest.raises(ServiceError) as raised:
        await call
    return raised.value


def fail_appends(monkeypatch: pytest.MonkeyPatch, store: Store, *seqs: int) -> None:
    """Let appends of operations with these seqs fail as on a full disk. Patched: no disk fails on demand."""
    append = store.operations.append

    def failing(rows: Iterable[NewOperation]) -> asyncio.Future[None]:
        rows = list(rows)
        if any(row.seq in seqs for row in rows):
            return store.database.write(_full)
        return append(rows)

    def _full(_db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store.operations, "append", failing)


def sample_request(
    sampler_id: str,
    seq: int = 0,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    num_samples: int = 1,
    record_stability_info: bool = False,
    **params: Any,
) -> sampling_pb2.SampleRequest:
    """Return a sample request; `params` are its sampling parameters."""
    return sampling_pb2.SampleRequest(
        sampler_id=sampler_id,
        seq=seq,
        prompt=to_tensor(np.array(prompt, np.int32)),
        num_samples=num_samples,
        params=sampling_pb2.SamplingParams(max_tokens=max_tokens, **params),
        record_stability_info=record_stability_info,
    )


def expected_tokens(chain: bytes, request: sampling_pb2.SampleRequest) -> list[list[int]]:
    """Return the tokens that a toy engine samples for this request from weights with this chain."""
    toy = SampleRequest(
        op_id="",
        version=SamplerVersion(key=""),
        prompt=from_tensor(request.prompt),
        num_samples=request.num_samples,
        params=SamplingParams(max_tokens=request.params.max_tokens, seed=request.params.seed),
    )
    positions = range(request.params.max_tokens)
    return [[toy_token(chain, toy, index, each) for each in positions] for index in range(request.num_samples)]


def tokens_of(operation: ops_pb.Operation) -> list[list[int]]:
    """Return the tokens of a sample that succeeded."""
    assert operation.state == ops_pb.OPERATION_STATE_SUCCEEDED, operation
    return [from_tensor(sequence.tokens).tolist() for sequence in operation.sample.sequences]


def datum(length: int, first: int = 1) -> types_pb2.Datum:
    """Return a sequence for cross_entropy."""
    tokens = np.arange(first, first + length, dtype=np.int32) % 60
    return types_pb2.Datum(
        tokens=to_tensor(tokens),
        loss_inputs={"target_tokens": to_tensor(tokens), "weights": to_tensor(np.ones(length, np.float32))},
    )


def pass_request(adapter_id: str, seq: int, lengths: Sequence[int]) -> training_pb2.ForwardBackwardRequest:
    """Return a forward_backward of sequences of these lengths."""
    return training_pb2.ForwardBackwardRequest(
        adapter_id=adapter_id,
        seq=seq,
        data=[datum(length, seq) for length in lengths],
        loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY,
    )


LENGTHS = (8, 8, 8, 4)
"""Lengths of a request of two chunks of 16 tokens at most."""


def expected_chain(spec: AdapterSpec, windows: Sequence[tuple[Sequence[int], int]]) -> bytes:
    """Return the chain of an undisturbed engine after these windows: the seqs of the passes, and that of the step."""
    chain = fresh_chain(spec)
    for passes, step in windows:
        gradient = b""
        for seq in passes:
            for item in pass_items(spec.adapter_id, seq):
                gradient = digest(gradient, item_digest(item))
        chain = digest(chain, gradient, item_digest(step_item(spec.adapter_id, step)))
    return chain


def pass_items(adapter_id: str, seq: int) -> list[PassItem]:
    decoded = decode_pass(pass_request(adapter_id, seq, LENGTHS).SerializeToString())
    chunks = cut_chunks(decoded.lengths, 16)
    return [
        PassItem(
            op_id="",
            adapter_id=adapter_id,
            prev_seq=0,
            seq=seq,
            chunk_index=index,
            num_chunks=len(chunks),
            data=decoded.data[chunk.start : chunk.stop],
            loss_fn=decoded.loss_fn,
            loss_config=decoded.loss_config,
            backward=True,
        )
        for index, chunk in enumerate(chunks)
    ]


def step_item(adapter_id: str, seq: int) -> OptimStepItem:
    return OptimStepItem(op_id="", adapter_id=adapter_id, prev_seq=0, seq=seq, params=AdamParams(learning_rate=1e-3))

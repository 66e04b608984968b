"""Adapter logs with a few operations, and a function that runs them as a worker does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind, Operation, Usage
from coordinator.payloads.passes import Chunk
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import AdapterSpec, RequestBatch

FB, FORWARD, STEP, LOAD, SAVE, DISCARD = (
    Kind.FORWARD_BACKWARD,
    Kind.FORWARD,
    Kind.OPTIM_STEP,
    Kind.LOAD_STATE,
    Kind.SAVE_STATE,
    Kind.DISCARD_GRADIENT,
)

ERROR = ops_pb.OperationError(code=9, reason="NON_FINITE", message="the loss is not finite")


@dataclass
class Files:
    """Stands for snapshots and published weights that are being written."""

    unsettled: set[str] = field(default_factory=set)
    unwritten: set[str] = field(default_factory=set)
    """Adapters whose published weights have no file, or versions without one."""
    awaited: set[str] = field(default_factory=set)
    """Adapters whose logs are needed to rematerialize a version."""
    failing: set[str] = field(default_factory=set)
    """Adapters of which no snapshot may be taken now."""
    failed: set[str] = field(default_factory=set)
    """Adapters of which the last snapshot has failed, long ago."""
    readable_max: int = 64
    """States that may be read at a time."""

    def is_unsettled(self, adapter_id: str) -> bool:
        """Return whether a snapshot of the adapter may be durable and not covered."""
        return adapter_id in self.unsettled

    def may_read(self, adapter_id: str) -> bool:
        """Return whether a copy of the adapter may be read."""
        return True

    def is_unwritten(self, adapter_id: str) -> bool:
        """Return whether published weights of the adapter have no file."""
        return adapter_id in self.unwritten

    def must_rematerialize(self, adapter_id: str) -> bool:
        """Return whether the adapter's log is needed to rematerialize a version."""
        return adapter_id in self.awaited

    def may_take(self, adapter: AdapterLog, *, is_awaited: bool = False) -> bool:
        """Return whether a snapshot of the adapter may be taken."""
        return self.can_take(adapter)

    def can_take(self, adapter: AdapterLog) -> bool:
        """Return the same, whether or not the last one has failed."""
        return adapter.adapter_id not in self.failing

    def has_failed(self, adapter_id: str) -> bool:
        """Return whether the last snapshot of the adapter has failed."""
        return adapter_id in self.failed

    def num_readable(self, adapters: Sequence[AdapterLog], size_of: Callable[[AdapterLog], int]) -> int:
        """Return how many of these adapters' states may be read now."""
        return min(len(adapters), self.readable_max)

    def held(self, version: str) -> bytes | None:
        """Return the weights of a version without a file; None: they are in a file."""
        return b"weights" if version in self.unwritten else None


def spec_named(name: str) -> AdapterSpec:
    """Return the spec of an adapter of this name."""
    return AdapterSpec(adapter_id=name, rank=8, alpha=1.0, seed=0, train_attn=True, train_mlp=True, train_unembed=True)


def adapter_with(*kinds: Kind, first: int = 1, name: str = "a", tenant: str = "t") -> AdapterLog:
    """Return an adapter log with durable operations of these kinds."""
    adapter = AdapterLog(tenant, "s", "toy", spec_named(name))
    for seq, kind in enumerate(kinds, first):
        adapter.add(operation(seq, kind, name=name, tenant=tenant))
    return adapter


def operation(seq: int, kind: Kind, *, name: str = "a", tenant: str = "t") -> Operation:
    """Return a durable operation; a pass has one chunk of four tokens."""
    one = appending(seq, kind, name=name, tenant=tenant)
    one.accept()
    return one


def appending(seq: int, kind: Kind, *, name: str = "a", tenant: str = "t") -> Operation:
    """Return an operation whose append has not ended."""
    chunks = (Chunk(0, 1, 4),) if kind.is_pass else ()
    return Operation(tenant, name, seq, kind, b"", b"", "", 16, 10, chunks)


def in_batch(adapter: AdapterLog, *seqs: int) -> None:
    """Mark these operations, at consecutive sequence numbers, as one batch."""
    for seq in seqs:
        adapter.operations[seq].batch = RequestBatch(seqs[0], seqs[-1])


def run_together(adapter: AdapterLog, *seqs: int, fail: Iterable[int] = ()) -> None:
    """Run these operations in one phase: all are with the worker before the first result is applied."""
    adapter.ahead().copy.took_gradient_drop()
    for seq in seqs:
        adapter.copy.start(adapter.operations[seq])
    for seq in seqs:
        one = adapter.operations[seq]
        is_forbidden = adapter.copy.window.forbids(one.kind.window_role, seq)
        one.fail(ERROR) if seq in fail or is_forbidden else one.succeed(1, Usage())
        one.commit()
        adapter.applied(one)


def run(adapter: AdapterLog, *seqs: int, fail: Iterable[int] = ()) -> None:
    """Run these operations, each of which must be ready, and commit their outcomes."""
    for seq in seqs:
        one = adapter.operations[seq]
        ready = list(adapter.ahead().passes()) + list(adapter.ahead().states())
        assert one in ready, f"{seq} is not ready"
        if not one.is_final:
            one.fail(ERROR) if seq in fail else one.succeed(1, Usage())
            one.commit()
        adapter.applied(one)


def seqs(operations: Iterable[Operation]) -> list[int]:
    """Return the operations' sequence numbers."""
    return [each.seq for each in operations]

"""Each adapter's operations in order, and how far its copy on a worker has come. In memory only; rebuilt from the log.

Knows neither fairness (`planner`) nor storage nor what the operations compute. The invariants:

- operations run strictly by seq, with no gap; a decided one that failed counts as done;
- `cursor` is the last seq that the copy on the worker has behind it, `placed_seq` the last one that worker ran; they
  differ by operations that need no worker (failed ones, and on a replay everything that changes no state, but for
  saves whose weights have to be made again);
- once an operation that adds gradient or loads a state fails, its gradient window is closed: what needs it fails too,
  up to and including the next optim_step, and the worker is told to drop the pending gradient before it goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from coordinator.base.errors import Code
from coordinator.operations.operation import Kind, Operation
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import AdapterSpec

NOBODY = (0, -1)
"""No seq is suspected."""


@dataclass(slots=True, eq=False)
class AdapterQueue:
    """One adapter: what it is, what it has been asked, where its copy lives and how far that has come."""

    tenant_id: str
    session_id: str
    base_model: str
    spec: AdapterSpec
    snapshot_seq: int = 0
    """What the newest durable snapshot contains; a new copy starts there."""
    snapshot_window_error: ops_pb.OperationError | None = None
    """The failure that had closed the gradient window there."""
    suspected: tuple[int, int] = NOBODY
    """First and last seq of operations whose worker died: they run one by one, each in a batch of its own."""
    next_seq: int = 1
    """The place after the highest accepted one: what a server-assigned operation gets."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """Everything after `snapshot_seq`, by seq."""
    worker_id: str = ""
    """Where the copy lives; empty: nowhere, it must be installed."""
    residents: Counter[str] = field(default_factory=Counter)
    """How many adapters have a copy on each worker; shared by those that are counted together."""
    cursor: int = 0
    placed_seq: int = 0
    window_error: ops_pb.OperationError | None = None
    """The failure that closed the current gradient window."""
    must_drop_gradient: bool = False
    """The copy holds gradient of a closed window."""
    engine_s_since_snapshot: float = 0.0
    """What a replay from the snapshot would cost."""
    window_bytes: int = 0
    """Bytes of the requests since the last optimizer step was accepted."""
    gap_since: float | None = None
    """When an operation was first seen to wait behind a seq that has not come."""
    decided: list[Operation] = field(default_factory=list)
    """Failed here, without a worker; waiting to be committed."""
    damage: ops_pb.OperationError | None = None
    """Why no copy can be made: everything that is asked fails with this, until the next start tries again."""
    is_deleted: bool = False
    """Its deletion has begun, and has not failed: it takes nothing more, for nothing would end what it took."""

    @property
    def adapter_id(self) -> str:
        """Its id."""
        return self.spec.adapter_id

    @property
    def applied_seq(self) -> int:
        """The last seq up to which everything is committed."""
        seq = self.snapshot_seq
        while (operation := self.operations.get(seq + 1)) is not None and operation.is_committed:
            seq += 1
        return seq

    @property
    def is_replaying(self) -> bool:
        """The copy is behind what has been decided. Call `settle` first."""
        operation = self.operations.get(self.cursor + 1)
        return operation is not None and self._is_replay(operation)

    @property
    def is_between_operations(self) -> bool:
        """The copy has no operation behind it in part, and nothing of it is to be run again. Call `settle` first."""
        first = next(self.ready_passes(), None)
        return not self.is_replaying and (first is None or not first.next_chunk)

    @property
    def is_as_committed(self) -> bool:
        """What came after the copy's last operation is committed: what the window is, the log says too."""
        since = (self.operations.get(seq) for seq in range(self.placed_seq, self.cursor + 1))
        return not self.decided and all(operation is None or operation.is_committed for operation in since)

    @property
    def has_pending_gradient(self) -> bool:
        """The copy's gradient is not empty, as far as is known here."""
        for seq in range(self.cursor, self.snapshot_seq, -1):
            operation = self.operations.get(seq)
            if operation is None or operation.kind in (Kind.OPTIM_STEP, Kind.LOAD_STATE):
                return False
            if operation.kind is Kind.FORWARD_BACKWARD:
                return True
        return False

    def add(self, operation: Operation) -> None:
        """Take an accepted operation into the order."""
        assert operation.seq not in self.operations
        self.operations[operation.seq] = operation
        self.next_seq = max(self.next_seq, operation.seq + 1)
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.window_bytes += operation.num_bytes
        elif operation.kind in (Kind.OPTIM_STEP, Kind.LOAD_STATE):
            self.window_bytes = 0

    def retract(self, operation: Operation) -> None:
        """Take back one whose append failed. If a worker may have seen it, its copy is given up."""
        self.operations.pop(operation.seq, None)
        while self.next_seq - 1 > self.snapshot_seq and self.next_seq - 1 not in self.operations:
            self.next_seq -= 1  # or a place that the server gives would leave a gap
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.window_bytes = max(0, self.window_bytes - operation.num_bytes)
        if operation.is_running or operation.parts or operation.seq <= self.cursor:
            self.lose_copy()

    def lose_copy(self) -> None:
        """The copy on the worker is gone or not to be trusted: start again from the snapshot."""
        if self.worker_id:
            self.residents[self.worker_id] -= 1
        self.worker_id = ""
        self.cursor = self.placed_seq = self.snapshot_seq
        self.window_error = self.snapshot_window_error
        self.must_drop_gradient = False
        for operation in self.operations.values():
            operation.restart()

    def suspect(self, first: int, last: int) -> None:
        """The worker died while it ran operations from `first` to `last`."""
        self.suspected = (first, max(last, self.suspected[1]))

    def placed(self, worker_id: str) -> None:
        """A fresh copy from the snapshot is being installed there."""
        self.lose_copy()
        self.worker_id = worker_id
        self.residents[worker_id] += 1
        self.engine_s_since_snapshot = 0.0

    def give_up(self, error: ops_pb.OperationError) -> None:
        """No copy can be made: fail what is asked, now and from now on."""
        self.damage = self.damage or error
        self.lose_copy()
        for operation in self.operations.values():
            if not operation.is_final and not operation.is_deciding:
                operation.fail(self.damage)
                self.decided.append(operation)

    def settle(self) -> None:
        """Move the cursor over everything that needs no worker, failing what a closed window forbids."""
        if self.damage is not None:
            self.give_up(self.damage)
            return
        while (operation := self.operations.get(self.cursor + 1)) is not None:
            if not operation.is_final:
                if self.window_error is None or not operation.kind.needs_open_window or operation.is_running:
                    return
                operation.fail(window_closed(self.window_error))
                self.decided.append(operation)
            elif self._is_replay(operation):
                return
            self._pass(operation)

    def ready_passes(self) -> Iterator[Operation]:
        """The prefix of forwards and forward_backwards that may run now, in order. Call `settle` first."""
        return self._one_by_one(self._ready_passes())

    def ready_states(self) -> Iterator[Operation]:
        """What the step phase may run now, in order: saves, at most one optim_step, and at most one load, as the last:
        should it fail, what comes after it must not have run.

        Call `settle` first.
        """
        return self._one_by_one(self._ready_states())

    def _one_by_one(self, ready: Iterable[Operation]) -> Iterator[Operation]:
        """What is ready, up to the first suspected operation, or that one alone."""
        first, last = self.suspected
        for index, operation in enumerate(ready):
            is_suspected = first <= operation.seq <= last
            if is_suspected and index:
                return
            yield operation
            if is_suspected:
                return

    def _ready_passes(self) -> Iterator[Operation]:
        seq = self.cursor + 1
        while self.damage is None and (operation := self.operations.get(seq)) is not None:
            if operation.is_final and not self._is_replay(operation):
                if operation.is_failed or operation.kind.changes_state:
                    return
            elif not operation.kind.is_pass or self._is_forbidden(operation):
                return
            else:
                yield operation
            seq += 1

    def _ready_states(self) -> Iterator[Operation]:
        seq, num_steps, has_save = self.cursor + 1, 0, False
        while self.damage is None and (operation := self.operations.get(seq)) is not None:
            if operation.is_final and not self._is_replay(operation):
                if operation.is_failed or operation.kind.changes_state:
                    return
            elif operation.kind.is_pass or self._is_forbidden(operation):
                return
            else:
                if operation.kind is Kind.OPTIM_STEP and num_steps == 1:
                    return
                if operation.kind is Kind.LOAD_STATE and has_save:
                    return  # what that saves may be what this loads, or need the log, which a load cuts
                num_steps += operation.kind is Kind.OPTIM_STEP
                has_save |= operation.kind in (Kind.SAVE_STATE, Kind.SAVE_WEIGHTS_FOR_SAMPLER)
                yield operation
                if operation.kind is Kind.LOAD_STATE:
                    return
            seq += 1

    def is_ready(self) -> bool:
        """Whether a cycle would do anything for it."""
        self.settle()
        if self.decided:
            return True
        first = self.operations.get(self.cursor + 1)  # undecided, or to be run again: else `settle` had gone on
        return first is not None and self.damage is None and not self._is_forbidden(first)

    def ran(self, operation: Operation) -> None:
        """The worker has this operation behind it, whether it succeeded or failed."""
        self.placed_seq = operation.seq
        operation.is_running = False

    def covered(self, seq: int, window_error: bytes, replay_s: float) -> None:
        """A snapshot up to `seq` is durable; running again what it contains would have taken `replay_s`."""
        if seq <= self.snapshot_seq:
            return
        self.snapshot_seq = seq
        self.snapshot_window_error = ops_pb.OperationError.FromString(window_error) if window_error else None
        self.engine_s_since_snapshot = max(0.0, self.engine_s_since_snapshot - replay_s)
        for old in [s for s in self.operations if s <= seq and self.operations[s].is_committed]:
            del self.operations[old]
        if self.placed_seq < seq:
            self.lose_copy()  # it was lost while the snapshot was written, and what it would run again is gone

    def missing_seq(self) -> int | None:
        """The seq that operations wait for and that has not come, if there is one."""
        self.settle()
        expected = self.cursor + 1
        if self.damage is not None or expected in self.operations or self.next_seq <= expected:
            return None
        waits_behind = any(not o.is_final for s, o in self.operations.items() if s > expected)
        return expected if waits_behind else None

    def _is_forbidden(self, operation: Operation) -> bool:
        """Its window is closed: `settle` will fail it once it comes to it. (A replay's turn cannot be there yet.)"""
        return self.window_error is not None and operation.kind.needs_open_window and not operation.is_final

    def _is_replay(self, operation: Operation) -> bool:
        return (
            operation.is_final
            and not operation.is_failed
            and (operation.kind.changes_state or operation.is_underived)
            and operation.seq > self.placed_seq
        )

    def _pass(self, operation: Operation) -> None:
        self.cursor = operation.seq
        if operation.kind is Kind.FORWARD_BACKWARD and operation.is_failed:
            assert operation.outcome is not None
            self.window_error = self.window_error or _named(operation)
            self.must_drop_gradient = True
        elif operation.kind is Kind.OPTIM_STEP:
            self.window_error = None
            self.must_drop_gradient |= operation.is_failed
        elif operation.kind is Kind.LOAD_STATE and operation.is_failed:
            self.window_error = self.window_error or _named(operation)
            self.must_drop_gradient = True
        elif operation.kind is Kind.LOAD_STATE:
            self.window_error = None


@dataclass(frozen=True, slots=True)
class ReadyChunks:
    """The ready chunks of an adapter, by their tokens, in order; each is looked up when it is asked for."""

    adapter: AdapterQueue

    def __iter__(self) -> Iterator[int]:
        """Call `settle` first."""
        for operation in self.adapter.ready_passes():
            for index in range(operation.next_chunk, len(operation.chunks)):
                yield operation.chunks[index].num_tokens


def _named(operation: Operation) -> ops_pb.OperationError:
    assert operation.outcome is not None
    error = ops_pb.OperationError()
    error.CopyFrom(operation.outcome.error)
    error.message = f"{operation.name} failed: {error.message}"
    return error


def window_closed(first: ops_pb.OperationError) -> ops_pb.OperationError:
    """Why an operation of a closed gradient window is not run; `first` is the failure that closed it."""
    return ops_pb.OperationError(
        code=Code.FAILED_PRECONDITION,
        reason="GRADIENT_WINDOW_CLOSED",
        message=f"not run: an earlier operation of the same step failed and its gradient is gone; {first.message};"
        " submit the step again after the next optim_step",
    )

"""One adapter's operations by sequence number, and the replay cursor of its copy on a worker.

In memory; rebuilt from the operation log in the database. Does not depend on fairness, storage, or on what the
operations compute. The invariants:

- operations run strictly by seq, with no gap; a failed one counts as done;
- `copy.cursor` is the last seq that the copy has passed, `copy.applied_seq` the last one that its worker ran. They
  differ by operations that need no worker: failed ones, discard_gradients, and on a replay all that change no state,
  except saves whose weights must be rematerialized;
- once an operation that adds gradient or loads a state fails, its gradient window is closed: the operations that it
  forbids fail too (`workers.contract.gradient_windows`), and with the next item the worker drops the pending gradient;
- progress of execution belongs to one generation of the copy: losing or installing the copy starts the next one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from coordinator.fleet.fleet import Residency
from coordinator.operations.operation import Kind, Operation, OutcomeState, Usage
from coordinator.operations.windows import Window, failure_of, window_closed
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.gradient_windows import EMPTY
from workers.contract.messages import AdapterSpec, ItemResult

NO_SEQS = (0, -1)
"""An empty range of sequence numbers."""
ENDS_WINDOW = (Kind.OPTIM_STEP, Kind.LOAD_STATE, Kind.DISCARD_GRADIENT)
"""The operations after which no gradient is pending, if they succeed."""


@dataclass(slots=True, eq=False)
class Progress:
    """How far an operation has run on one generation of its adapter's copy."""

    num_chunks_done: int = 0
    results: list[ItemResult] = field(default_factory=list)
    """The results of those chunks."""
    is_running: bool = False
    """A worker has it."""

    @property
    def usage(self) -> Usage:
        """The cost of its chunks so far."""
        return Usage(sum(r.num_tokens for r in self.results), sum(r.engine_s for r in self.results))


@dataclass(slots=True, eq=False)
class Copy:
    """One generation of the adapter's state on a worker, from the newest snapshot on."""

    generation: int
    cursor: int
    applied_seq: int
    """The last seq that the worker ran."""
    window: Window
    """The gradient window at the cursor."""
    applied_window: Window
    """The gradient window at `applied_seq`: that of a snapshot."""
    worker_id: str = ""
    """Empty: there is no copy, the next worker must install one."""
    must_drop_gradient: bool = False
    """The copy holds gradient of a closed window."""
    progress: dict[int, Progress] = field(default_factory=dict)
    """By seq."""


@dataclass(slots=True, eq=False)
class AdapterLog:
    """One adapter: its spec, its operations in order, and the copy that runs them."""

    tenant_id: str
    session_id: str
    base_model: str
    spec: AdapterSpec
    adapter_id: str = field(init=False)
    residency: Residency = field(default_factory=Residency)
    """Which worker each adapter of this base model has its copy on."""
    snapshot_seq: int = 0
    """The last seq that the newest durable snapshot contains; a new copy starts there."""
    snapshot_window: Window = EMPTY
    """The gradient window there."""
    quarantined: tuple[int, int] = NO_SEQS
    """First and last seq of operations whose worker was lost: each of them runs in a batch of its own."""
    next_seq: int = 1
    """The seq after the highest accepted one: the next one that the server assigns."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """All after `snapshot_seq`, by seq."""
    copy: Copy = field(default_factory=lambda: Copy(0, 0, 0, EMPTY, EMPTY))
    engine_s_since_snapshot: float = 0.0
    """Engine seconds that a replay from the snapshot would take."""
    window_bytes: int = 0
    """Bytes of the payloads that add to the pending gradient, since the last operation that ends a window."""
    may_begin: bool = True
    """Whether operations may begin now; otherwise only replays, and what has run in part, are ready."""
    gap_since: float | None = None
    """When an operation was first seen behind a seq that has not arrived."""
    damage: ops_pb.OperationError | None = None
    """Why no copy can be made: every operation fails with this error until the next start tries again."""
    is_restored: bool = False
    """The log comes from a backup and may lack acknowledged operations: only the server assigns sequence numbers."""
    is_deleted: bool = False
    """Its deletion has begun, and has not failed: it accepts no more operations."""
    _decided: list[Operation] = field(default_factory=list)
    """Decided without a worker, not yet committed."""
    _reinstalls: Counter[str] = field(default_factory=Counter)
    """How often each operation found the copy out of order, since the last result for an undecided operation."""

    def __post_init__(self) -> None:
        """Copy the id from the spec: every walk over a thousand adapters reads it."""
        self.adapter_id = self.spec.adapter_id

    @property
    def worker_id(self) -> str:
        """Where the copy is; empty: nowhere."""
        return self.copy.worker_id

    @property
    def has_decided(self) -> bool:
        """Whether operations were decided without a worker that no cycle has committed."""
        return bool(self._decided)

    @property
    def committed_seq(self) -> int:
        """The last seq up to which everything is committed."""
        seq = self.snapshot_seq
        while (operation := self.operations.get(seq + 1)) is not None and operation.is_committed:
            seq += 1
        return seq

    @property
    def is_replaying(self) -> bool:
        """The copy is behind the decided operations. Call `advance` first."""
        operation = self.operations.get(self.copy.cursor + 1)
        return operation is not None and self._is_replay(operation)

    @property
    def is_between_operations(self) -> bool:
        """No operation has run in part on the copy, and none is to be replayed. Call `advance` first."""
        first = next(self.ready_passes(), None)
        return not self.is_replaying and (first is None or not self.num_chunks_done(first))

    @property
    def is_as_committed(self) -> bool:
        """Everything after the copy's last operation is committed: the log has the present state of the window."""
        since = (self.operations.get(seq) for seq in range(self.copy.applied_seq, self.copy.cursor + 1))
        return not self._decided and all(operation is None or operation.is_committed for operation in since)

    @property
    def is_ahead(self) -> bool:
        """An operation ran on the copy that the snapshot does not contain."""
        has_run = self.engine_s_since_snapshot > 0 or self.copy.applied_seq > self.snapshot_seq
        return bool(self.worker_id) and has_run

    @property
    def has_pending_gradient(self) -> bool:
        """The copy's gradient is not empty."""
        return self.copy.window.has_gradient

    def let_begin(self, may_begin: bool) -> None:
        """Let operations begin from now on, or not."""
        self.may_begin = may_begin

    def waits_for(self, seq: int) -> bool:
        """Return whether accepted operations wait for this seq, which is the lowest one that has not arrived."""
        is_gap = self.snapshot_seq < seq < self.next_seq and seq not in self.operations
        return is_gap and all(before in self.operations for before in range(self.snapshot_seq + 1, seq))

    def is_next(self, seq: int) -> bool:
        """Return whether this seq has not arrived, every one before it has, and none behind it has."""
        return seq == self.next_seq and all(before in self.operations for before in range(self.copy.cursor + 1, seq))

    def unfinished(self) -> list[Operation]:
        """Return the operations without a committed outcome, in order."""
        decided = {operation.seq: operation for operation in self._decided}
        undecided = {seq: o for seq, o in self.operations.items() if not o.is_final}
        return [each for _, each in sorted((decided | undecided).items())]

    # ---- acceptance

    def add(self, operation: Operation) -> None:
        """Add an accepted operation."""
        assert operation.seq not in self.operations
        self.operations[operation.seq] = operation
        self.next_seq = max(self.next_seq, operation.seq + 1)
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.window_bytes += operation.num_bytes
        elif operation.kind in ENDS_WINDOW:
            self.window_bytes = 0

    def withdraw(self, operation: Operation) -> None:
        """Remove an operation whose append failed. If a worker may have run it, drop the adapter's copy."""
        has_begun = operation.seq in self.copy.progress
        operation.withdraw()
        if self.operations.get(operation.seq) is not operation:
            return  # the adapter was deleted meanwhile
        del self.operations[operation.seq]
        if operation in self._decided:
            self._decided.remove(operation)
        while self.next_seq - 1 > self.snapshot_seq and self.next_seq - 1 not in self.operations:
            self.next_seq -= 1  # or a server-assigned seq would leave a gap
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.window_bytes = max(0, self.window_bytes - operation.num_bytes)
        if has_begun or operation.seq <= self.copy.cursor:
            self.lose_copy()

    def restore(self, next_seq: int) -> None:
        """Continue the numbering of the last epoch, in a recovery."""
        self.next_seq = max(self.next_seq, next_seq)

    def begin_deletion(self) -> None:
        """Accept no more operations."""
        self.is_deleted = True

    def cancel_deletion(self, decided: Iterable[Operation]) -> None:
        """Accept operations again, as the deletion failed; the operations that it decided are still to be committed."""
        self._decided = list(decided)
        self.is_deleted = False

    # ---- the copy

    def lose_copy(self) -> None:
        """Start again from the snapshot: the copy on the worker was lost or cannot be trusted."""
        if self.worker_id:
            self.residency.leave(self.worker_id, self.adapter_id)
        seq, window = self.snapshot_seq, self.snapshot_window
        self.copy = Copy(self.copy.generation + 1, seq, seq, window, window)

    def place_copy(self, worker_id: str) -> None:
        """Start a new copy from the snapshot, which is being installed on this worker."""
        self.lose_copy()
        self.copy.worker_id = worker_id
        self.residency.enter(worker_id, self.adapter_id)
        self.engine_s_since_snapshot = 0.0

    def join(self, residency: Residency) -> None:
        """Record this adapter's copy in `residency` from now on, and no longer in the residency before."""
        if self.worker_id:
            self.residency.leave(self.worker_id, self.adapter_id)
            residency.enter(self.worker_id, self.adapter_id)
        self.residency = residency

    def quarantine(self, first: int, last: int) -> None:
        """Quarantine operations `first` to `last`: their worker was lost while it ran them."""
        self.quarantined = (first, max(last, self.quarantined[1]))

    def run_singly(self) -> None:
        """Run each undecided operation in a batch of its own; those of an earlier quarantine are not affected."""
        undecided = (seq for seq, each in self.operations.items() if seq > self.copy.cursor and not each.is_final)
        if self.quarantined == NO_SEQS and (first := min(undecided, default=0)):
            self.quarantine(first, self.next_seq - 1)

    def release(self) -> None:
        """End the quarantine of its operations."""
        self.quarantined = NO_SEQS

    def charge_replay(self, engine_s: float) -> None:
        """Add engine seconds of work that a replay would repeat."""
        self.engine_s_since_snapshot += engine_s

    def took_gradient_drop(self) -> None:
        """Record that an item on its way to the worker tells it to drop the closed window's gradient."""
        self.copy.must_drop_gradient = False

    def count_reinstall(self, op_id: str) -> int:
        """Drop the copy because `op_id` found it out of order; return how often in a row that happened."""
        self.lose_copy()
        self._reinstalls[op_id] += 1
        return self._reinstalls[op_id]

    # ---- progress on the copy

    def progress(self, operation: Operation) -> Progress:
        """Return how far the operation has run on the present copy."""
        return self.copy.progress.setdefault(operation.seq, Progress())

    def num_chunks_done(self, operation: Operation) -> int:
        """Return the number of the operation's chunks that the present copy has run."""
        found = self.copy.progress.get(operation.seq)
        return found.num_chunks_done if found is not None else 0

    def is_running(self, operation: Operation) -> bool:
        """Return whether a worker has the operation, or has run a part of it."""
        found = self.copy.progress.get(operation.seq)
        return found is not None and found.is_running

    def has_begun(self, operation: Operation) -> bool:
        """Return whether a worker has the operation, has run a part of it, or its result is being written."""
        found = self.copy.progress.get(operation.seq)
        has_run = found is not None and (found.is_running or bool(found.num_chunks_done))
        return has_run or operation.outcome_state is OutcomeState.DECIDING

    def usage(self, operation: Operation) -> Usage:
        """Return what the operation cost on the present copy so far."""
        found = self.copy.progress.get(operation.seq)
        return found.usage if found is not None else Usage()

    def start(self, operation: Operation) -> None:
        """Record that the operation is about to be sent to a worker."""
        self.progress(operation).is_running = True

    def pause(self, operation: Operation) -> None:
        """Record that the worker ran a part of the operation; the rest waits for another cycle."""
        self.progress(operation).is_running = False
        self._added_gradient(operation)

    def add_result(self, operation: Operation, result: ItemResult) -> None:
        """Add the result of one more chunk, or of a whole operation without chunks."""
        progress = self.progress(operation)
        progress.results.append(result)
        progress.num_chunks_done += 1
        self._reinstalls.clear()

    def replayed_chunk(self, operation: Operation, *, is_last: bool) -> None:
        """Count one more replayed chunk of a decided operation."""
        progress = self.progress(operation)
        progress.num_chunks_done = 0 if is_last else progress.num_chunks_done + 1

    def applied(self, operation: Operation) -> None:
        """Record that the worker ran this operation to its end, whether it succeeded or failed."""
        self.copy.applied_seq = operation.seq
        self.copy.progress.pop(operation.seq, None)

    # ---- decisions without a worker

    def fail(self, operation: Operation, error: ops_pb.OperationError) -> None:
        """Fail an operation without a worker; the next commit makes the failure visible."""
        operation.fail(error, self.usage(operation))
        self.copy.progress.pop(operation.seq, None)
        self._decided.append(operation)

    def fail_behind(self, seq: int, error: ops_pb.OperationError) -> None:
        """Fail every undecided operation after `seq`."""
        for operation in list(self.operations.values()):
            if operation.seq > seq and operation.is_undecided:
                self.fail(operation, error)

    def take_decided(self) -> list[Operation]:
        """Return the operations that were decided without a worker since the last call: they are to be committed."""
        decided, self._decided = self._decided, []
        return decided

    def abort(self, error: ops_pb.OperationError) -> None:
        """Fail every operation, now and from now on: no copy can be made in this epoch."""
        self.damage = self.damage or error
        self._reinstalls.clear()
        self.lose_copy()
        self.fail_behind(self.snapshot_seq, self.damage)

    def note_gap(self, now: float | None) -> None:
        """Record since when a seq is missing; None: none is."""
        self.gap_since = now

    # ---- order

    def advance(self) -> None:
        """Move the cursor over everything that needs no worker, and decide the operations that no worker is to run.

        A refused operation stops the cursor until its record is durable: if that append fails, it was never accepted.
        """
        if self.damage is not None:
            self.abort(self.damage)
            return
        while (operation := self.operations.get(self.copy.cursor + 1)) is not None:
            if not operation.is_final:
                if not self._decide(operation):
                    return
            elif self._is_replay(operation) or (not operation.is_durable and operation.seq > self.copy.applied_seq):
                return
            self._pass(operation)

    def ready_passes(self) -> Iterator[Operation]:
        """Yield the prefix of forwards and forward_backwards that may run now, in order. Call `advance` first."""
        return self._one_by_one(self._ready_passes())

    def ready_states(self) -> Iterator[Operation]:
        """Yield the operations that the step phase may run now, in order. Call `advance` first.

        These are saves, at most one optim_step, and at most one load. The load is the last one: if it fails, the
        operations behind it must not have run.
        """
        return self._one_by_one(self._ready_states())

    def is_ready(self) -> bool:
        """Return whether a cycle would run or decide an operation of this adapter."""
        self.advance()
        if self._decided:
            return True
        first = self.operations.get(self.copy.cursor + 1)  # undecided, or to be replayed: else `advance` had gone on
        if first is None or self.damage is not None or self._is_forbidden(first):
            return False
        return not first.is_final or self._is_replay(first)

    def cover(self, seq: int, window: Window, replay_s: float) -> None:
        """Drop the operations up to `seq`: a durable snapshot covers them; their replay would have taken `replay_s`."""
        if seq <= self.snapshot_seq:
            return
        self.snapshot_seq = seq
        self.snapshot_window = window
        self.engine_s_since_snapshot = max(0.0, self.engine_s_since_snapshot - replay_s)
        for old in [s for s in self.operations if s <= seq and self.operations[s].is_committed]:
            del self.operations[old]
        if self.copy.applied_seq < seq:
            self.lose_copy()  # it was lost while the snapshot was written: the operations that it would replay left

    def missing_seq(self) -> int | None:
        """Return the seq that operations wait for and that has not arrived, if there is one."""
        self.advance()
        expected = self.copy.cursor + 1
        if self.damage is not None or expected in self.operations or self.next_seq <= expected:
            return None
        waits_behind = any(not o.is_final for s, o in self.operations.items() if s > expected)
        return expected if waits_behind else None

    def _one_by_one(self, ready: Iterator[Operation]) -> Iterator[Operation]:
        """Return the operations before the first quarantined one, or only that one if it is first.

        Without those that may not begin now.
        """
        if not self.may_begin:
            ready = itertools.takewhile(lambda each: self._is_replay(each) or self.num_chunks_done(each) > 0, ready)
        return ready if self.quarantined == NO_SEQS else _until_quarantined(ready, *self.quarantined)

    def _ready_passes(self) -> Iterator[Operation]:
        seq = self.copy.cursor + 1
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
        seq, num_steps, has_save = self.copy.cursor + 1, 0, False
        while self.damage is None and (operation := self.operations.get(seq)) is not None:
            if operation.is_final and not self._is_replay(operation):
                if operation.is_failed or operation.kind.changes_state:
                    return
            elif operation.kind.is_pass or not operation.kind.needs_worker or self._is_forbidden(operation):
                return
            else:
                if operation.kind is Kind.OPTIM_STEP and num_steps == 1:
                    return
                if operation.kind is Kind.LOAD_STATE and has_save:
                    return  # it may load the checkpoint being saved, and it cuts the log that an unwritten save needs
                num_steps += operation.kind is Kind.OPTIM_STEP
                has_save |= operation.kind.is_save
                yield operation
                if operation.kind is Kind.LOAD_STATE:
                    return
            seq += 1

    def _is_forbidden(self, operation: Operation) -> bool:
        """Return whether the operation's window is closed, so that `advance` will fail it."""
        window = self.copy.window
        return (
            window.closed_by is not None
            and not operation.is_final
            and window.forbids(operation.kind.window_role, operation.seq)
        )

    def _is_replay(self, operation: Operation) -> bool:
        return (
            operation.is_final
            and not operation.is_failed
            and (operation.kind.changes_state or operation.must_rematerialize)
            and operation.kind.needs_worker
            and operation.seq > self.copy.applied_seq
        )

    def _decide(self, operation: Operation) -> bool:
        """Decide the next operation if no worker is to run it; return whether it is decided."""
        if not operation.kind.needs_worker:
            operation.succeed(0, Usage()).discard_gradient.SetInParent()
            self._decided.append(operation)
        elif self._is_forbidden(operation) and not self.is_running(operation):
            self.fail(operation, window_closed(self.copy.window, operation.kind.window_role))
        else:
            return False
        return True

    def _pass(self, operation: Operation) -> None:
        copy, role = self.copy, operation.kind.window_role
        copy.cursor = operation.seq
        failure = failure_of(operation) if operation.is_failed else None
        copy.window = copy.window.after(role, operation.seq, failure, operation.batch)
        if operation.seq == copy.applied_seq:
            copy.applied_window = copy.window
        if role.leaves_gradient(has_failed=failure is not None):
            copy.must_drop_gradient = True
        else:
            self._added_gradient(operation)

    def _added_gradient(self, operation: Operation) -> None:
        """Note that the copy's gradient is that of the present window.

        If an operation ran behind a failed batch in the same phase, then the worker dropped that batch's by itself.
        """
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.copy.must_drop_gradient = False


@dataclass(frozen=True, slots=True)
class ReadyChunks:
    """The ready chunks of an adapter, by their tokens, in order; each is looked up when it is asked for."""

    log: AdapterLog

    def __iter__(self) -> Iterator[int]:
        """Call `advance` first."""
        for operation in self.log.ready_passes():
            for chunk in operation.chunks[self.log.num_chunks_done(operation) :]:
                yield chunk.num_tokens


def _until_quarantined(ready: Iterable[Operation], first: int, last: int) -> Iterator[Operation]:
    for index, operation in enumerate(ready):
        is_quarantined = first <= operation.seq <= last
        if is_quarantined and index:
            return
        yield operation
        if is_quarantined:
            return

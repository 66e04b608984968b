"""One adapter's operations by sequence number, and which of them need no worker.

In memory; rebuilt from the operation log in the database. Does not depend on fairness, storage, or on what the
operations compute. The invariants:

- operations run strictly by seq, with no gap; a failed one counts as done;
- once an operation that adds gradient or loads a state fails, its gradient window is closed: the operations that it
  forbids fail too (`workers.contract.gradient_windows`), and with the next item the worker drops the pending gradient;
- losing or installing the copy starts the next generation of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.base.errors import Code
from coordinator.fleet.fleet import Residency
from coordinator.observe.timeline import WaitClock
from coordinator.operations.copy import NO_SEQS, Ahead, Copy
from coordinator.operations.operation import Kind, Operation, Usage
from coordinator.operations.windows import Window, window_closed
from tinkerpool.v1 import history_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.gradient_windows import EMPTY
from workers.contract.messages import AdapterSpec

SEQ_LOST = "SEQ_LOST"
"""The reason of an operation that never arrived, and of those that waited behind it."""
ENDS_WINDOW = (Kind.OPTIM_STEP, Kind.LOAD_STATE, Kind.DISCARD_GRADIENT)
"""The operations after which no gradient is pending, if they succeed."""


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
    copy: Copy = field(default_factory=Copy)
    waits: WaitClock = field(default_factory=WaitClock)
    """What its next operation waits for."""
    engine_s_since_snapshot: float = 0.0
    """Engine seconds that a replay from the snapshot would take."""
    window_bytes: int = 0
    """Bytes of the payloads that add to the pending gradient, since the last operation that ends a window."""
    has_lost_append: bool = False
    """Its last append failed. Until one succeeds, operations begin when they are durable, and not while they are being
    appended: one that ends its workers would else end one at each attempt, and be forgotten each time."""
    gap_since: float | None = None
    """When an operation was first seen behind a seq that has not arrived."""
    damage: ops_pb.OperationError | None = None
    """Why no copy can be made: every operation fails with this error until the next start tries again."""
    fingerprint: str = ""
    """Of the numerics that ran its operations last, its class; empty: nothing ran yet."""
    has_changed_class: bool = False
    """Its class has changed, and no result has said so yet."""
    is_restored: bool = False
    """The log comes from a backup and may lack acknowledged operations: only the server assigns sequence numbers."""
    name: str = ""
    """What people call it; empty: nothing."""
    used_at: float = 0.0
    """When it was created, or its last operation was accepted: a time of day."""
    stored_used_at: float = 0.0
    """What its row has of that."""
    is_deleted: bool = False
    """Its deletion has begun, and has not failed: it accepts no more operations."""
    _arrived_seq: int = 0
    """The last seq up to which all had arrived when an operation did: what is behind it is unblocked once."""
    _decided: list[Operation] = field(default_factory=list)
    """Decided without a worker, not yet committed."""
    _ahead: Ahead | None = None
    """The last view, returned again while it is the same: a cycle asks a thousand adapters, each a few times."""

    def __post_init__(self) -> None:
        """Copy the id from the spec: every walk over a thousand adapters reads it."""
        self.adapter_id = self.spec.adapter_id

    @property
    def home(self) -> str:
        """The worker that has the copy; empty: none."""
        return self.copy.home

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
    def is_between_operations(self) -> bool:
        """No operation has run in part on the copy, and none is to be replayed. Decides nothing.

        So a tenant that submits discards during each commit does not put off its adapter's snapshots.
        """
        first = self.operations.get(self.copy.cursor + 1)
        return first is None or not (self.copy.must_replay(first) or self.copy.num_chunks_done(first))

    @property
    def is_as_committed(self) -> bool:
        """Everything after the copy's last operation is committed: the log has the present state of the window."""
        since = (self.operations.get(seq) for seq in range(self.copy.applied_seq, self.copy.cursor + 1))
        return not self._decided and all(operation is None or operation.is_committed for operation in since)

    @property
    def is_past_snapshot(self) -> bool:
        """An operation ran on the copy that the snapshot does not contain."""
        has_run = self.engine_s_since_snapshot > 0 or self.copy.applied_seq > self.snapshot_seq
        return bool(self.home) and has_run

    @property
    def waits_for_append(self) -> bool:
        """Whether nothing may begin before the append of an operation has succeeded; see `has_lost_append`."""
        return self.has_lost_append and not all(each.is_durable for each in self.operations.values())

    def waits_for(self, seq: int) -> bool:
        """Return whether accepted operations wait for this seq, which is the lowest one that has not arrived."""
        is_gap = self.snapshot_seq < seq < self.next_seq and seq not in self.operations
        return is_gap and all(before in self.operations for before in range(self.snapshot_seq + 1, seq))

    @property
    def num_missing(self) -> int:
        """The number of sequence numbers below `next_seq` that have not arrived."""
        return self.next_seq - 1 - self.snapshot_seq - sum(seq > self.snapshot_seq for seq in self.operations)

    def is_next(self, seq: int) -> bool:
        """Return whether this seq has not arrived, every one before it has, and none behind it has."""
        return seq == self.next_seq and all(before in self.operations for before in range(self.copy.cursor + 1, seq))

    def unfinished(self) -> list[Operation]:
        """Return the operations without a committed outcome, in order."""
        decided = {operation.seq: operation for operation in self._decided}
        undecided = {seq: o for seq, o in self.operations.items() if not o.is_final}
        return [each for _, each in sorted((decided | undecided).items())]

    def run_in_part(self) -> list[Operation]:
        """Return the undecided operations of which the copy has run some chunks."""
        found = [operation for seq in self.copy.progress if (operation := self.operations.get(seq)) is not None]
        return [each for each in found if not each.is_final and self.copy.num_chunks_done(each)]

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

    def arrived(self, operation: Operation, now: float) -> None:
        """Record that an operation was accepted now, in service time; what is behind it has waited for it until now."""
        operation.timeline.arrive(self.waits, now)
        self._arrived_seq = max(self._arrived_seq, self.snapshot_seq)
        while (present := self.operations.get(self._arrived_seq + 1)) is not None:
            self._arrived_seq += 1
            if self._arrived_seq > operation.seq:
                present.timeline.unblock(self.waits, now)

    def withdraw(self, operation: Operation) -> None:
        """Remove an operation whose append failed. If a worker may have run it, drop the adapter's copy.

        It did arrive: the time that its client has to send it again begins anew.
        """
        self.gap_since = None
        self.has_lost_append = True
        has_begun = operation.seq in self.copy.progress
        operation.withdraw()
        if self.operations.get(operation.seq) is not operation:
            return  # the adapter was deleted meanwhile
        del self.operations[operation.seq]
        self._arrived_seq = min(self._arrived_seq, operation.seq - 1)
        if operation in self._decided:
            self._decided.remove(operation)
        while self.next_seq - 1 > self.snapshot_seq and self.next_seq - 1 not in self.operations:
            self.next_seq -= 1  # or a server-assigned seq would leave a gap
        if operation.kind is Kind.FORWARD_BACKWARD:
            self.window_bytes = max(0, self.window_bytes - operation.num_bytes)
        if has_begun or operation.seq <= self.copy.cursor:
            self.lose_copy()

    def accepted(self) -> bool:
        """Record that an append is durable; return whether its operations waited for that."""
        has_waited, self.has_lost_append = self.has_lost_append, False
        return has_waited

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

    def start(self, operation: Operation, now: float, cycle_id: int) -> None:
        """Record that an operation is about to be sent to the copy's worker; what is behind it waits for it."""
        self.copy.start(operation)
        if not operation.is_final:
            operation.timeline.begin(self.waits, self.home, now, cycle_id)
        self.waits.switch(history_pb2.WAIT_REASON_ORDER, now)

    def lose_copy(self) -> None:
        """Start again from the snapshot: the copy on the worker was lost or cannot be trusted."""
        self._renew_copy("")

    def lose_worker(self) -> None:
        """Start again from the snapshot: the worker was lost, and what failed there tells nothing of the next one."""
        self.lose_copy()
        self.copy.reinstalls.clear()

    def place_copy(self, worker_id: str) -> None:
        """Start a new copy from the snapshot, which is being installed on this worker."""
        self._renew_copy(worker_id)
        self.residency.enter(worker_id, self.adapter_id)
        self.engine_s_since_snapshot = 0.0

    def enter_class(self, fingerprint: str) -> None:
        """Record the class of the worker that has a new copy, if it is another one than before."""
        self.has_changed_class |= self.fingerprint != ""
        self.fingerprint = fingerprint

    def take_class_change(self) -> bool:
        """Return whether the class has changed since the last call that returned True."""
        has_changed, self.has_changed_class = self.has_changed_class, False
        return has_changed

    def _renew_copy(self, worker_id: str) -> None:
        if self.home:
            self.residency.leave(self.home, self.adapter_id)
        self.copy = self.copy.next_generation(self.snapshot_seq, self.snapshot_window, worker_id)

    def join(self, residency: Residency) -> None:
        """Record this adapter's copy in `residency` from now on, and no longer in the residency before."""
        if self.home:
            self.residency.leave(self.home, self.adapter_id)
            residency.enter(self.home, self.adapter_id)
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

    def applied(self, operation: Operation) -> None:
        """Record that the worker ran this operation to its end; decide those behind it that need no worker."""
        self.copy.applied(operation)
        self._advance()

    # ---- decisions without a worker

    def fail(self, operation: Operation, error: ops_pb.OperationError) -> None:
        """Fail an operation without a worker; the next commit makes the failure visible."""
        operation.fail(error, self.copy.usage(operation))
        self.copy.end(operation)
        self._decided.append(operation)

    def fail_behind(self, seq: int, error: ops_pb.OperationError) -> None:
        """Fail every undecided operation after `seq`."""
        for operation in list(self.operations.values()):
            if operation.seq > seq and operation.is_undecided:
                self.fail(operation, error)

    def take_decided(self) -> list[Operation]:
        """Return the operations that are decided without a worker, since the last call: they are to be committed."""
        self._advance()
        decided, self._decided = self._decided, []
        return decided

    def abort(self, error: ops_pb.OperationError) -> None:
        """Fail every operation, now and from now on: no copy can be made in this epoch."""
        self.damage = self.damage or error
        self.lose_copy()
        self.fail_behind(self.snapshot_seq, self.damage)

    def note_gap(self, now: float | None) -> None:
        """Record since when a seq is missing; None: none is."""
        self.gap_since = now

    # ---- order

    def ahead(self, *, may_begin: bool = True) -> Ahead:
        """Decide every operation that needs no worker; return what a worker may run next. `may_begin`: see `Ahead`."""
        self._advance()
        ahead = self._ahead
        if (
            ahead is None
            or ahead.copy is not self.copy
            or ahead.quarantined is not self.quarantined
            or ahead.may_begin is not may_begin
        ):
            operations = self.operations if self.damage is None else {}
            ahead = self._ahead = Ahead(self.copy, operations, self.quarantined, may_begin)
        return ahead

    def is_ready(self) -> bool:
        """Return whether a cycle would run or decide an operation of this adapter."""
        self._advance()
        if self._decided:
            return True
        first = self.operations.get(self.copy.cursor + 1)
        if first is None or self.damage is not None or self.copy.forbids(first):
            return False
        return not first.is_final or self.copy.must_replay(first)

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
        expected = self._gap()
        waits_behind = expected and any(not o.is_final for s, o in self.operations.items() if s > expected)
        return expected if waits_behind else None

    def lost_seqs(self) -> list[int]:
        """Return the missing seqs below an operation that is stored as SEQ_LOST: nothing is to wait for them again."""
        expected = self._gap()
        if expected is None:
            return []
        last = max((seq for seq, each in self.operations.items() if each.is_committed and _is_lost(each)), default=0)
        return [seq for seq in range(expected, last) if seq not in self.operations]

    def _gap(self) -> int | None:
        """Return the seq behind the cursor if it has not arrived, but a later one has."""
        self._advance()
        expected = self.copy.cursor + 1
        is_gap = self.damage is None and expected not in self.operations and expected < self.next_seq
        return expected if is_gap else None

    def _advance(self) -> None:
        """Move the cursor over everything that needs no worker, and decide the operations that no worker is to run.

        A refused operation stops the cursor until its record is durable: if that append fails, it was never accepted.
        """
        if self.damage is not None:
            self.abort(self.damage)
            return
        copy = self.copy
        while (operation := self.operations.get(copy.cursor + 1)) is not None:
            if not operation.is_final:
                if not self._decide(operation):
                    return
            elif copy.must_replay(operation) or (not operation.is_durable and operation.seq > copy.applied_seq):
                return
            copy.move_past(operation)

    def _decide(self, operation: Operation) -> bool:
        """Decide the next operation if no worker is to run it; return whether it is decided."""
        if not operation.kind.needs_worker:
            operation.succeed(0, Usage()).discard_gradient.SetInParent()
            self._decided.append(operation)
        elif self.copy.forbids(operation) and not self.copy.is_running(operation):
            self.fail(operation, window_closed(self.copy.window, operation.kind.window_role))
        else:
            return False
        return True


def seq_lost(adapter_id: str, seq: int) -> ops_pb.OperationError:
    """Return why an operation failed that never arrived, or that waited behind it."""
    return ops_pb.OperationError(
        code=Code.ABORTED,
        reason=SEQ_LOST,
        message=f"operation {seq} of {adapter_id} did not arrive in time: it is lost, and the operations that waited "
        "behind it did not run. Continue with ServiceClient.get_training_client, or from the next_seq of GetAdapter, "
        "and submit them again",
    )


def _is_lost(operation: Operation) -> bool:
    return operation.outcome is not None and operation.outcome.error.reason == SEQ_LOST

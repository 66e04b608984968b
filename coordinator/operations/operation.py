"""An operation in memory: its payload, its chunks, whether the operation log has it, and its outcome.

Also converts operations to and from rows of the log, and errors to outcomes.

Two states, each changed by named transitions that assert where they start:

- acceptance: APPENDING until the operation log has the operation, then DURABLE; WITHDRAWN if the append failed;
- outcome: UNDECIDED, DECIDING while a worker's result is made durable, DECIDED, COMMITTED with a cycle's commit,
  RETIRED once the result has left memory, DROPPED when the store has dropped the result, too.

Does not depend on order (`adapter_log`), execution on a worker (the adapter log's copy), the database or doors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from coordinator.base.errors import Code, ServiceError
from coordinator.observe.timeline import Timeline
from coordinator.operations.holdings import NO_CLAIM, Claim, SaveRequest
from coordinator.payloads.canonical import serialize
from coordinator.payloads.passes import Chunk, DecodedPass
from coordinator.storage.rows import DecidedOperation, NewOperation, OperationRow
from tinkerpool.v1 import checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.gradient_windows import WindowRole
from workers.contract.messages import UNMARKED, ErrorCode, ItemError, RequestBatch

CYCLE_METRIC = "clock_cycle:unique"
"""The metric with the cycle that decided an operation: one value for a pass and its step that were sent together."""
CLASS_METRIC = "numerics_changed:max"
"""The metric, with the value 1, of the first result that other numerics have computed than those before."""


class Kind(Enum):
    """What an operation does. The value is its name in the store and in reports.

    Properties are cached: planning reads them for every operation of a thousand adapters, several times a cycle.
    """

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    LOAD_STATE = "load_state"
    DISCARD_GRADIENT = "discard_gradient"
    SAVE_STATE = "save_state"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAMPLE = "sample"

    @cached_property
    def needs_worker(self) -> bool:
        """A worker runs it; otherwise its adapter's log decides it when its turn comes."""
        return self not in _WITHOUT_WORKER

    @cached_property
    def is_pass(self) -> bool:
        """Runs in a cycle's pass; the other operations that a worker runs for an adapter run in its step phase."""
        return self in _PASSES

    @cached_property
    def is_save(self) -> bool:
        """Hands the adapter's state out without changing it."""
        return self in _SAVES

    @cached_property
    def moves_state(self) -> bool:
        """Moves the adapter's whole state between its worker and a file."""
        return self.is_save or self is Kind.LOAD_STATE

    @cached_property
    def changes_state(self) -> bool:
        """Changes the adapter, so that recovery must apply it again."""
        return self in _CHANGING

    @cached_property
    def window_role(self) -> WindowRole:
        """Its effect on the adapter's gradient window."""
        return _WINDOW_ROLES.get(self, WindowRole.NONE)

    @property
    def wire(self) -> ops_pb.OperationKind.ValueType:
        """The enum value in the contract."""
        return getattr(ops_pb, f"OPERATION_KIND_{self.name}")  # type: ignore[no-any-return]


_WITHOUT_WORKER = (Kind.DISCARD_GRADIENT,)
_PASSES = (Kind.FORWARD, Kind.FORWARD_BACKWARD)
_SAVES = (Kind.SAVE_STATE, Kind.SAVE_WEIGHTS_FOR_SAMPLER)
_CHANGING = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_STATE, Kind.DISCARD_GRADIENT)
_WINDOW_ROLES = {
    Kind.FORWARD_BACKWARD: WindowRole.ADD,
    Kind.OPTIM_STEP: WindowRole.STEP,
    Kind.LOAD_STATE: WindowRole.RESET,
    Kind.DISCARD_GRADIENT: WindowRole.DISCARD,
}


class Acceptance(Enum):
    """Whether the operation log has the operation."""

    APPENDING = auto()
    DURABLE = auto()
    WITHDRAWN = auto()
    """The append failed: it was never accepted, and its sequence number may belong to another operation by now."""


class OutcomeState(Enum):
    """How far the operation is from a visible outcome."""

    UNDECIDED = auto()
    DECIDING = auto()
    """It ran, and its state is being written: the loss of its worker does not affect it any more."""
    DECIDED = auto()
    """The outcome is set, and not visible yet."""
    COMMITTED = auto()
    RETIRED = auto()
    """The result has left memory; the store has it."""
    DROPPED = auto()
    """The store has dropped the result: only the sequence number and the request id stay taken."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of an operation."""

    num_tokens: int = 0
    """Tokens that went through the base model."""
    engine_s: float = 0.0
    """Seconds of engine time."""


@dataclass(slots=True, eq=False)
class Operation:
    """One durable request and its outcome."""

    tenant_id: str
    target_id: str
    """The adapter or sampler."""
    seq: int
    kind: Kind
    payload: bytes
    """The canonical bytes of the request; empty once memory no longer needs them (the store has them)."""
    payload_hash: bytes
    request_id: str
    chunk_tokens: int
    """The chunk size that it was admitted with."""
    num_bytes: int
    """Size of the payload."""
    chunks: tuple[Chunk, ...] = ()
    batch: RequestBatch = UNMARKED
    """The batch that a forward_backward is part of."""
    claim: Claim = NO_CLAIM
    """What it may add to what its tenant holds; counted while it is in flight."""
    records: tuple[tuple[str, int], ...] = ()
    """The recorded samples that it was made with; its append renews them."""
    append_id: int = 0
    """Identifies this append in the log: another operation at the same sequence number has another id."""
    decoded: DecodedPass | None = None
    """The decoded payload of a pass; dropped with the payload, and decoded again where a replay needs it."""
    must_rematerialize: bool = False
    """A save whose weights were lost in a crash before their file existed: it runs again to rematerialize them."""
    is_cancelled: bool = False
    """A sample that was cancelled: it ends at its next decode step, or when it is submitted."""
    acceptance: Acceptance = Acceptance.APPENDING
    outcome_state: OutcomeState = OutcomeState.UNDECIDED
    outcome: ops_pb.Operation | None = field(default=None)
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def name(self) -> str:
        """`<target>:<seq>`."""
        return f"{self.target_id}:{self.seq}"

    @property
    def is_durable(self) -> bool:
        """The append has committed."""
        return self.acceptance is Acceptance.DURABLE

    @property
    def is_undecided(self) -> bool:
        """No result is being written and no outcome is set: it may still be failed or cancelled."""
        return self.outcome_state is OutcomeState.UNDECIDED

    @property
    def is_final(self) -> bool:
        """Decided, though perhaps not yet committed."""
        return self.outcome is not None

    @property
    def is_failed(self) -> bool:
        """Decided, with an error."""
        return self.outcome is not None and self.outcome.state == ops_pb.OPERATION_STATE_FAILED

    @property
    def is_committed(self) -> bool:
        """The outcome has committed."""
        return self.outcome_state in (OutcomeState.COMMITTED, OutcomeState.RETIRED, OutcomeState.DROPPED)

    @property
    def is_dropped(self) -> bool:
        """The store has dropped its result."""
        return self.outcome_state is OutcomeState.DROPPED

    @property
    def never_arrived(self) -> bool:
        """It records the failure of a sequence number that never arrived: there was no request."""
        return self.is_failed and not self.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the base model for it."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    # ---- acceptance

    def accept(self) -> None:
        """Move from APPENDING to DURABLE: the log has it."""
        assert self.acceptance is Acceptance.APPENDING, f"{self.name} is {self.acceptance.name}"
        self.acceptance = Acceptance.DURABLE

    def withdraw(self) -> None:
        """Move from APPENDING to WITHDRAWN: the append failed."""
        assert self.acceptance is Acceptance.APPENDING, f"{self.name} is {self.acceptance.name}"
        self.acceptance = Acceptance.WITHDRAWN

    # ---- outcome

    def cancel(self) -> None:
        """Mark a sample as cancelled, durable or not."""
        assert self.kind is Kind.SAMPLE, f"{self.name} is {self.kind.name}"
        self.is_cancelled = True

    def begin_deciding(self) -> None:
        """Move from UNDECIDED to DECIDING: its result has arrived and is being made durable."""
        assert self.outcome_state is OutcomeState.UNDECIDED, f"{self.name} is {self.outcome_state.name}"
        self.outcome_state = OutcomeState.DECIDING

    def succeed(self, cycle_id: int, usage: Usage) -> ops_pb.Operation:
        """Move from UNDECIDED or DECIDING to DECIDED, with success; return the outcome, for the caller to fill in."""
        return self._decide(ops_pb.OPERATION_STATE_SUCCEEDED, cycle_id, usage)

    def fail(self, error: ops_pb.OperationError, usage: Usage | None = None, *, cycle_id: int = 0) -> None:
        """Move from UNDECIDED or DECIDING to DECIDED, with an error. Work that was done stays charged."""
        outcome = self._decide(ops_pb.OPERATION_STATE_FAILED, cycle_id, usage or Usage())
        outcome.error.CopyFrom(error)

    def move_to_cycle(self, cycle_id: int) -> None:
        """Record that another cycle commits the outcome: the one that decided it was split."""
        assert self.outcome_state is OutcomeState.DECIDED, f"{self.name} is {self.outcome_state.name}"
        assert self.outcome is not None
        self.outcome.cycle_id = cycle_id
        if self.outcome.HasField("forward_backward"):
            self.outcome.forward_backward.metrics[CYCLE_METRIC] = float(cycle_id)

    def undecide(self) -> None:
        """Move from DECIDED back to UNDECIDED: its commit was refused, so it runs again or is failed anew."""
        assert self.outcome_state is OutcomeState.DECIDED, f"{self.name} is {self.outcome_state.name}"
        self.outcome = None
        self.outcome_state = OutcomeState.UNDECIDED

    def commit(self) -> None:
        """Move from DECIDED to COMMITTED: the outcome is durable and visible."""
        assert self.outcome_state is OutcomeState.DECIDED, f"{self.name} is {self.outcome_state.name}"
        assert self.is_durable, f"{self.name} committed while {self.acceptance.name}"
        self.outcome_state = OutcomeState.COMMITTED

    def retire(self) -> None:
        """Move from COMMITTED to RETIRED: keep the state that a replay needs, and leave the result to the store."""
        assert self.outcome_state is OutcomeState.COMMITTED, f"{self.name} is {self.outcome_state.name}"
        assert self.outcome is not None
        self.drop_payload()
        error = self.outcome.error if self.is_failed else None
        self.outcome = ops_pb.Operation(state=self.outcome.state, error=error)
        self.outcome_state = OutcomeState.RETIRED

    def as_message(self, *, is_running: bool = False) -> ops_pb.Operation:
        """Return the operation as its owner may see it now; `is_running`: a worker has it.

        A retired operation is shown as running: the wait that follows reads its result from the store.
        """
        if self.outcome is not None and self.outcome_state in (OutcomeState.COMMITTED, OutcomeState.DROPPED):
            return self.outcome
        is_shown_running = is_running or self.outcome_state is OutcomeState.RETIRED
        state = ops_pb.OPERATION_STATE_RUNNING if is_shown_running else ops_pb.OPERATION_STATE_QUEUED
        return ops_pb.Operation(
            name=self.name, kind=self.kind.wire, state=state, target_id=self.target_id, seq=self.seq
        )

    # ---- memory

    def drop_payload(self) -> None:
        """Free the request's memory; a replay reads it from the store again."""
        assert self.is_durable, f"{self.name} is not in the store"
        self.payload = b""
        self.decoded = None

    def keep_decoded(self, decoded: DecodedPass) -> None:
        """Hold the payload decoded until the operation has run."""
        self.decoded = decoded

    def rematerialized(self) -> None:
        """Record that its weights have been rematerialized."""
        self.must_rematerialize = False

    def _decide(self, state: ops_pb.OperationState.ValueType, cycle_id: int, usage: Usage) -> ops_pb.Operation:
        assert self.outcome_state in (OutcomeState.UNDECIDED, OutcomeState.DECIDING), f"{self.name} was decided twice"
        self.outcome = ops_pb.Operation(
            name=self.name,
            kind=self.kind.wire,
            state=state,
            target_id=self.target_id,
            seq=self.seq,
            cycle_id=cycle_id,
            num_tokens=usage.num_tokens,
            engine_seconds=usage.engine_s,
        )
        self.outcome_state = OutcomeState.DECIDED
        return self.outcome


def service_error(error: ServiceError) -> ops_pb.OperationError:
    """Return a refusal as the outcome of an operation."""
    return ops_pb.OperationError(code=error.code, reason=error.reason, message=error.message)


_CODES = {
    ErrorCode.INVALID_ARGUMENT: Code.INVALID_ARGUMENT,
    ErrorCode.NON_FINITE: Code.FAILED_PRECONDITION,
    ErrorCode.OUT_OF_MEMORY: Code.RESOURCE_EXHAUSTED,
    ErrorCode.DATA_LOSS: Code.DATA_LOSS,
    ErrorCode.OUT_OF_ORDER: Code.ABORTED,
    ErrorCode.CANCELLED: Code.CANCELLED,
    ErrorCode.INTERNAL: Code.INTERNAL,
}


def item_error(error: ItemError) -> ops_pb.OperationError:
    """Return a worker's error as users see it."""
    return ops_pb.OperationError(code=_CODES[error.code], reason=error.code.name, message=error.message)


def new_row(operation: Operation) -> NewOperation:
    """Return an operation as the log appends it; a refused one with its outcome."""
    is_marked = operation.batch != UNMARKED
    return NewOperation(
        target_id=operation.target_id,
        seq=operation.seq,
        append_id=operation.append_id,
        tenant_id=operation.tenant_id,
        kind=operation.kind.value,
        request_id=operation.request_id or None,
        payload=operation.payload,
        payload_hash=operation.payload_hash,
        chunk_tokens=operation.chunk_tokens,
        batch_first_seq=operation.batch.first_seq if is_marked else None,
        batch_last_seq=operation.batch.last_seq if is_marked else None,
        outcome=serialize(operation.outcome) if operation.outcome is not None else None,
        is_failed=operation.is_failed,
        records=operation.records,
    )


def decided_row(operation: Operation, day: int, history: bytes = b"") -> DecidedOperation:
    """Return a decided operation as a commit stores it, with its entry in the history, if it gets one.

    `day`: that its usage counts for, also when it becomes visible.
    """
    outcome = operation.outcome
    assert outcome is not None
    return DecidedOperation(
        target_id=operation.target_id,
        seq=operation.seq,
        append_id=operation.append_id,
        tenant_id=operation.tenant_id,
        kind=operation.kind.value,
        outcome=serialize(outcome),
        day=day,
        is_failed=operation.is_failed,
        num_tokens=outcome.num_tokens,
        engine_s=outcome.engine_seconds,
        history=history,
    )


def operation_of_row(row: OperationRow) -> Operation:
    """Return an operation as the store has it, without its payload."""
    if row.outcome_bytes is None:
        state = OutcomeState.UNDECIDED
    else:
        state = OutcomeState.COMMITTED if row.outcome_bytes else OutcomeState.DROPPED
    batch = UNMARKED
    if row.batch_first_seq is not None and row.batch_last_seq is not None:
        batch = RequestBatch(row.batch_first_seq, row.batch_last_seq)
    return Operation(
        tenant_id=row.tenant_id,
        target_id=row.target_id,
        seq=row.seq,
        kind=Kind(row.kind),
        payload=b"",
        payload_hash=row.payload_hash,
        request_id=row.request_id or "",
        chunk_tokens=row.chunk_tokens,
        batch=batch,
        num_bytes=row.num_bytes,
        append_id=row.append_id,
        acceptance=Acceptance.DURABLE,
        outcome_state=state,
        outcome=ops_pb.Operation.FromString(row.outcome or b"") if row.outcome_bytes is not None else None,
    )


def save_request(operation: Operation) -> SaveRequest:
    """Return the request of a save."""
    if operation.kind is Kind.SAVE_STATE:
        return checkpoints_pb2.SaveStateRequest.FromString(operation.payload)
    return checkpoints_pb2.SaveWeightsForSamplerRequest.FromString(operation.payload)

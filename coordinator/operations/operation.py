"""An operation in memory: what was asked, how it is cut into chunks, and how it ended.

Knows the kinds and their properties; neither order (`queue`), nor storage, nor doors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from coordinator.operations.chunks import Chunk
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import Datum, ItemResult


class Kind(Enum):
    """What an operation does. The value is its name in the store and in reports."""

    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    LOAD_STATE = "load_state"
    SAVE_STATE = "save_state"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAMPLE = "sample"

    @property
    def is_pass(self) -> bool:
        """Runs in a cycle's pass; the others on an adapter run in its step phase."""
        return self in (Kind.FORWARD, Kind.FORWARD_BACKWARD)

    @property
    def changes_state(self) -> bool:
        """Changes the adapter, so that recovery must run it again."""
        return self in (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP, Kind.LOAD_STATE)

    @property
    def needs_open_window(self) -> bool:
        """Must not run once an earlier operation of its gradient window failed."""
        return self in (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)

    @property
    def wire(self) -> ops_pb.OperationKind.ValueType:
        """The enum value in the contract."""
        return getattr(ops_pb, f"OPERATION_KIND_{self.name}")  # type: ignore[no-any-return]


@dataclass(slots=True, eq=False)
class Operation:
    """One durable request. `outcome` is set when it is decided and shown to nobody before it is committed."""

    tenant_id: str
    target_id: str
    seq: int
    kind: Kind
    body: bytes
    """The canonical request; empty once it is no longer needed in memory (the store has it)."""
    body_hash: bytes
    request_id: str
    chunk_tokens: int
    """The chunk size that it was admitted with."""
    num_bytes: int
    """Size of the body, for the quotas."""
    chunks: tuple[Chunk, ...] = ()
    append_id: int = 0
    """Identifies its append to the log: an outcome is stored only for that append."""
    loss: tuple[str, dict[str, float]] = ("", {})
    """Decoded loss and its options, once `data` is."""
    data: tuple[Datum, ...] = ()
    """Decoded sequences; dropped with `body`."""
    next_chunk: int = 0
    """Chunks that ran on the adapter's present copy."""
    parts: list[ItemResult] = field(default_factory=list)
    """Results of those chunks."""
    is_running: bool = False
    is_deciding: bool = False
    """It has run, and its state is being written: nobody else decides it, whatever happens to its worker."""
    is_durable: bool = False
    """The append has committed."""
    is_committed: bool = False
    """The outcome has committed."""
    is_underived: bool = False
    """A save whose weights went with the last life, before their file was there: it runs again to make them."""
    is_retired: bool = False
    """The result has left memory: the store has it."""
    is_dropped: bool = False
    """Its result is gone: all that is left is that its place and request id are taken."""
    outcome: ops_pb.Operation | None = None

    @property
    def name(self) -> str:
        """`<target>:<seq>`."""
        return f"{self.target_id}:{self.seq}"

    @property
    def is_final(self) -> bool:
        """Decided, though perhaps not yet committed."""
        return self.outcome is not None

    @property
    def is_failed(self) -> bool:
        """Decided, with an error."""
        return self.outcome is not None and self.outcome.state == ops_pb.OPERATION_STATE_FAILED

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the base model for it."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    def restart(self) -> None:
        """Forget what ran on a copy of the adapter that is gone."""
        self.next_chunk = 0
        self.parts.clear()
        self.is_running = False

    def undecide(self) -> None:
        """It ran on what was never logged, and its outcome was not stored: it runs again."""
        self.outcome = None
        self.is_deciding = False
        self.restart()

    def drop_body(self) -> None:
        """Free the memory of a decided request; a replay reads it from the store again."""
        self.body = b""
        self.data = ()
        self.parts = []

    def retire(self) -> None:
        """Keep what order and replay need of a committed operation, and leave its result to the store."""
        assert self.outcome is not None
        self.drop_body()
        self.is_retired = True
        error = self.outcome.error if self.is_failed else None
        self.outcome = ops_pb.Operation(state=self.outcome.state, error=error)

    def as_message(self) -> ops_pb.Operation:
        """The operation as its owner may see it now. (One just retired seems to run: who waits gets the result.)"""
        if self.outcome is not None and self.is_committed and not self.is_retired:
            return self.outcome
        state = ops_pb.OPERATION_STATE_RUNNING if self.is_running or self.is_retired else ops_pb.OPERATION_STATE_QUEUED
        return ops_pb.Operation(
            name=self.name, kind=self.kind.wire, state=state, target_id=self.target_id, seq=self.seq
        )

    def fail(self, error: ops_pb.OperationError, *, cycle_id: int = 0) -> None:
        """Decide: failed. Tokens and engine time of what ran stay charged."""
        self._decide(ops_pb.OPERATION_STATE_FAILED, cycle_id)
        assert self.outcome is not None
        self.outcome.error.CopyFrom(error)

    def succeed(self, cycle_id: int) -> ops_pb.Operation:
        """Decide: succeeded. Returns the outcome, whose result the caller fills in."""
        self._decide(ops_pb.OPERATION_STATE_SUCCEEDED, cycle_id)
        assert self.outcome is not None
        return self.outcome

    def _decide(self, state: ops_pb.OperationState.ValueType, cycle_id: int) -> None:
        assert self.outcome is None, f"{self.name} was decided twice"
        self.is_running = False
        self.outcome = ops_pb.Operation(
            name=self.name,
            kind=self.kind.wire,
            state=state,
            target_id=self.target_id,
            seq=self.seq,
            cycle_id=cycle_id,
            num_tokens=sum(part.num_tokens for part in self.parts),
            engine_seconds=sum(part.engine_s for part in self.parts),
        )

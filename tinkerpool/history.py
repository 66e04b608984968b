"""The history of an operation as a value and in words: when it came, what it waited for, where and when it ran.

Depends on the contract; makes no calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb

WAITS = {
    pb.WAIT_REASON_ORDER: "behind earlier operations of its adapter",
    pb.WAIT_REASON_SEQUENCE: "for an earlier operation that had not arrived",
    pb.WAIT_REASON_CYCLE: "for the next cycle to begin",
    pb.WAIT_REASON_BUDGET: "for room in a cycle, while others had their turn",
    pb.WAIT_REASON_SLOTS: "for a free slot on a worker",
    pb.WAIT_REASON_MEMORY: "for host memory on a worker",
    pb.WAIT_REASON_MOVE: "for the adapter's move to another worker",
    pb.WAIT_REASON_FILE: "for a file with its weights",
    pb.WAIT_REASON_QUARANTINE: "because a worker was lost, and what ran there runs one by one",
    pb.WAIT_REASON_PROBATION: "for a turn alone: operations of its tenant ended workers",
    pb.WAIT_REASON_HELD: "because its tenant was suspended, or the pool was stopping",
    pb.WAIT_REASON_WORKER: "for its worker, which did not reply",
}
"""What an operation waits for, in words that follow `it waited`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A part of an operation's wait."""

    reason: str
    """`order`, `cycle`, `budget`, ...: the contract's WaitReason in small letters."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """What is known of one operation, or metrics that were reported. Times are aware and in UTC."""

    operation: str
    """Its name; empty for reported metrics."""
    kind: str
    """`forward_backward`, `optim_step`, ...; `report` for reported metrics."""
    state: str
    """`queued`, `running`, `succeeded` or `failed`; empty for reported metrics."""
    target_id: str
    """The adapter or sampler."""
    arrive_time: datetime | None
    """None: before the pool's last start."""
    begin_time: datetime | None
    end_time: datetime | None
    waits: tuple[Wait, ...]
    """What it waited for before a worker began it, longest first."""
    waits_for: str
    """What an unfinished operation waits for now; empty: nothing."""
    position: int
    """How many others of its adapter come before an unfinished operation."""
    remaining_s: float | None
    """A guess of the seconds until an unfinished operation is finished."""
    worker_id: str
    cycle_id: int
    num_tenants: int
    """Tenants in that cycle."""
    pass_s: float
    """Seconds of that cycle's pass."""
    step_s: float
    """Seconds of its step phase."""
    num_begins: int
    num_tokens: int
    engine_s: float
    metrics: Mapping[str, float]
    error_reason: str
    step: int
    """The step that reported metrics belong to."""


def entry_of(message: pb.HistoryEntry) -> HistoryEntry:
    """Return an entry of the contract as a value."""
    return HistoryEntry(
        operation=message.operation,
        kind=kind_of(message),
        state=_lower(ops_pb.OperationState.Name(message.state), "OPERATION_STATE_"),
        target_id=message.target_id,
        arrive_time=_moment(message.arrive_time) if message.HasField("arrive_time") else None,
        begin_time=_moment(message.begin_time) if message.HasField("begin_time") else None,
        end_time=_moment(message.end_time) if message.HasField("end_time") else None,
        waits=tuple(Wait(reason=reason_of(each.reason), seconds=each.seconds) for each in message.waits),
        waits_for=reason_of(message.waits_for),
        position=message.position,
        remaining_s=message.remaining_seconds if message.HasField("remaining_seconds") else None,
        worker_id=message.worker_id,
        cycle_id=message.cycle_id,
        num_tenants=message.num_tenants,
        pass_s=message.pass_seconds,
        step_s=message.step_seconds,
        num_begins=message.num_begins,
        num_tokens=message.num_tokens,
        engine_s=message.engine_seconds,
        metrics=dict(message.metrics),
        error_reason=message.error_reason,
        step=message.step,
    )


def kind_of(message: pb.HistoryEntry) -> str:
    """Return what an entry is about: the kind of its operation, or `report`."""
    return kind_name(message.kind) or "report"


def kind_name(kind: ops_pb.OperationKind.ValueType) -> str:
    """Return a kind of operation in small letters; empty for none."""
    return _lower(ops_pb.OperationKind.Name(kind), "OPERATION_KIND_")


def reason_of(reason: pb.WaitReason.ValueType) -> str:
    """Return a reason in small letters; empty for none, and for one that only a newer pool knows."""
    return _lower(pb.WaitReason.Name(reason), "WAIT_REASON_") if reason in WAITS else ""


def progress_of(message: pb.HistoryEntry) -> str:
    """Return in a sentence where an unfinished operation is: position, reason, estimate; empty if it is finished."""
    if message.state == ops_pb.OPERATION_STATE_RUNNING:
        where = f"runs on {message.worker_id}" if message.worker_id else "runs"
        where += f" in cycle {message.cycle_id}" if message.cycle_id else ""
    elif message.state == ops_pb.OPERATION_STATE_QUEUED:
        where = f"waits {WAITS.get(message.waits_for, 'for its turn')}"
        where += f" ({message.position} before it)" if message.position else ""
    else:
        return ""
    rest = f", about {message.remaining_seconds:.0f} s more" if message.remaining_seconds >= 1 else ""
    return f"{message.operation} ({kind_of(message)}) {where}{rest}"


def _lower(name: str, prefix: str) -> str:
    name = name.removeprefix(prefix)
    return "" if name == "UNSPECIFIED" else name.lower()


def _moment(timestamp: Timestamp) -> datetime:
    return datetime.fromisoformat(timestamp.ToJsonString())

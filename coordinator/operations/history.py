"""The entries of operations in the history: finished ones as they are stored, and unfinished ones as they are now.

Depends on operations and their timelines; not on storage, or on how a cycle chooses. An entry has no tokens, texts or
other contents of a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from coordinator.base.time import Time
from coordinator.observe import metrics
from coordinator.observe.timeline import Seconds, WaitClock
from coordinator.operations.operation import Operation
from coordinator.payloads.canonical import serialize
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces

WAIT_S_MIN = 1e-4
"""Shorter waits are left out."""
NO_PHASES: Mapping[str, float] = MappingProxyType({})


class Entries:
    """Makes entries; counts what has finished, and reports it to the traces."""

    def __init__(self, time: Time, traces: Traces | None, *, are_kept: bool) -> None:
        """`are_kept`: whether the pool keeps a history."""
        self._time = time
        self._traces = traces
        self._are_kept = are_kept

    def finished(
        self, operation: Operation, *, pass_s: float = 0.0, step_s: float = 0.0, num_tenants: int = 0
    ) -> bytes:
        """Return the entry of an operation that is decided, and whose outcome goes into a commit now.

        `pass_s`, `step_s`, `num_tenants`: of its cycle. Empty if no history is kept.
        """
        outcome, now = operation.outcome, self._time.monotonic()
        operation.timeline.decide(now)
        if not self._are_kept or outcome is None:
            return b""
        entry = self._entry(operation)
        entry.state = outcome.state
        entry.cycle_id = outcome.cycle_id
        entry.pass_seconds, entry.step_seconds, entry.num_tenants = pass_s, step_s, num_tenants
        entry.num_tokens = outcome.num_tokens
        entry.engine_seconds = outcome.engine_seconds
        entry.error_reason = outcome.error.reason
        self._set_moment(entry, "end_time", now)
        found = outcome.forward_backward.metrics if operation.kind.is_pass else outcome.optim_step.metrics
        for name, value in found.items():
            entry.metrics[name] = value
        return serialize(entry)

    def committed(
        self, operation: Operation, cycle: pool_pb2.Cycle | None = None, phase_s: Mapping[str, float] = NO_PHASES
    ) -> None:
        """Count and trace an operation whose outcome has committed.

        `cycle`: that which committed it. `phase_s`: of a sample, see `SampleResult`.
        """
        outcome, arrived = operation.outcome, operation.timeline.arrived
        assert outcome is not None
        metrics.count_operation(
            operation.kind.value,
            is_failed=operation.is_failed,
            num_tokens=outcome.num_tokens,
            engine_s=outcome.engine_seconds,
            waits=operation.timeline.waits,
            seconds=None if arrived is None else self._time.monotonic() - arrived,
        )
        if self._traces is not None:
            decided_in = cycle if outcome.cycle_id else None
            self._traces.commit(operation.tenant_id, outcome, operation.timeline, decided_in, phase_s)

    def unfinished(
        self, operation: Operation, clock: WaitClock | None, position: int, remaining_s: float | None
    ) -> pb.HistoryEntry:
        """Return the entry of an operation whose outcome has not committed.

        `clock`: of what it waits for; None: a worker has it, or it is decided. `position`: how many others of its
        adapter or sampler come before it. `remaining_s`: a guess of the seconds until it is finished; None: nothing is
        known.
        """
        entry = self._entry(operation)
        entry.state = ops_pb.OPERATION_STATE_RUNNING if clock is None else ops_pb.OPERATION_STATE_QUEUED
        entry.position = position
        if remaining_s is not None:
            entry.remaining_seconds = remaining_s
        timeline, now = operation.timeline, self._time.monotonic()
        if clock is None:
            entry.cycle_id = timeline.cycle_id
        if clock is not None and clock.reason == pb.WAIT_REASON_SEQUENCE:
            entry.waits_for = clock.reason
            if timeline.arrived is not None:  # the adapter's clock does not know of the gap
                _set_waits(entry, {clock.reason: now - timeline.arrived})
        elif clock is not None:
            entry.waits_for = pb.WAIT_REASON_ORDER if position else clock.reason
            if timeline.begun is None:
                _set_waits(entry, timeline.waits_until(clock, now))
        return entry

    def reported(self, report: pb.ReportMetricsRequest) -> bytes:
        """Return the entry of metrics that a user reports."""
        entry = pb.HistoryEntry(target_id=report.adapter_id, step=report.step, metrics=report.metrics)
        self._set_moment(entry, "arrive_time", self._time.monotonic())
        return serialize(entry)

    @staticmethod
    def is_repeat(report: pb.ReportMetricsRequest, entry: bytes) -> bool:
        """Return whether an entry is of a report with the same step and metrics: NaNs are equal."""
        found = pb.HistoryEntry.FromString(entry)
        reported = pb.ReportMetricsRequest(adapter_id=found.target_id, step=found.step, metrics=found.metrics)
        return serialize(reported) == serialize(report)

    def _entry(self, operation: Operation) -> pb.HistoryEntry:
        timeline = operation.timeline
        entry = pb.HistoryEntry(
            operation=operation.name,
            kind=operation.kind.wire,
            target_id=operation.target_id,
            worker_id=timeline.worker_id,
            num_begins=timeline.num_begins,
        )
        _set_waits(entry, timeline.waits)
        if timeline.arrived is not None:
            self._set_moment(entry, "arrive_time", timeline.arrived)
        if timeline.begun is not None:
            self._set_moment(entry, "begin_time", timeline.begun)
        return entry

    def _set_moment(self, entry: pb.HistoryEntry, field: str, moment: float) -> None:
        """Set a timestamp to a moment of service time, by the wall clock as it is now."""
        wall = self._time.wall() - self._time.monotonic() + moment
        getattr(entry, field).FromNanoseconds(int(wall * 1e9))


def _set_waits(entry: pb.HistoryEntry, waits: Seconds) -> None:
    for reason, seconds in sorted(waits.items(), key=lambda each: -each[1]):
        if seconds >= WAIT_S_MIN:
            entry.waits.add(reason=reason, seconds=seconds)

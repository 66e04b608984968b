"""The timeline of a session as a trace of Perfetto, made of entries of the history and of cycles.

One track has the client's requests, one for each adapter and sampler the waits and runs of its operations, and one for
each worker its cycles with their passes and steps. Depends on the contract and on Perfetto's format; not on where
entries and cycles are kept. Times are nanoseconds of the wall clock.

Main invariant: two slices of one row are nested or do not overlap. Where they would, the later one goes to another row
of the same name; Perfetto shows rows of equal names and parents as one track.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BUILTIN_CLOCK_BOOTTIME,
    BUILTIN_CLOCK_REALTIME,
    Trace,
    TrackDescriptor,
    TrackEvent,
)

from tinkerpool.history import WAITS, kind_of, reason_of
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

Value: TypeAlias = "str | int | float | Mapping[str, Value] | Sequence[Value]"

PASS_KINDS = (ops_pb.OPERATION_KIND_FORWARD, ops_pb.OPERATION_KIND_FORWARD_BACKWARD)
"""Kinds of operations that run in the pass of a cycle; others of a cycle run in its step phase."""
_SEQUENCE_ID = 1
"""Of all packets: they have one writer."""
_ROOT = 1
"""The track that all others are in."""
_UUID_MAX = 1 << 63


class SessionTrace:
    """Makes the packets of one session's trace. Add the entries in the order of their commits."""

    def __init__(
        self,
        session_id: str,
        name_of: Callable[[str], str],
        cycle_of: Callable[[int], pool_pb2.Cycle | None],
    ) -> None:
        """`name_of`: the name of an adapter, or empty. `cycle_of`: what is known of a cycle; None: nothing any more."""
        self._session_id = session_id
        self._name_of = name_of
        self._cycle_of = cycle_of
        self._trace = Trace()
        self._rows: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        """Track to the ends of its rows, earliest first, each with the row's id."""
        self._num_rows = 0
        self._num_operations = 0
        self._cycle_id = 0
        self._in_cycle: list[tuple[int, pb.HistoryEntry]] = []
        """The entries of that cycle so far, each with the number of its operation."""
        root = self._trace.packet.add().track_descriptor
        root.uuid, root.name = _ROOT, f"session {session_id}"
        root.child_ordering = TrackDescriptor.LEXICOGRAPHIC

    def add(self, entry: pb.HistoryEntry) -> None:
        """Add an operation. Metrics that a user reported are left out: they have no duration."""
        if not entry.operation:
            return
        if not self._num_operations:
            self._set_clock(entry.end_time.ToNanoseconds())
        self._num_operations += 1
        arrive, begin, end = _moments(entry)
        values = _values(entry)
        self._slice(self._row("requests", arrive, end), kind_of(entry), "request", arrive, end, values, self._flow())
        track = entry.target_id.removeprefix(f"{self._session_id}:")
        row = self._row(f"{track} {self._name_of(entry.target_id)}".rstrip(), arrive, end)
        self._add_waits(row, entry, arrive, begin)
        self._slice(row, kind_of(entry), "operation", begin, end, values, self._flow())
        if not entry.cycle_id:
            return
        if entry.cycle_id != self._cycle_id:
            self.end_cycle()
            self._cycle_id = entry.cycle_id
        self._in_cycle.append((self._num_operations, entry))

    def end_cycle(self) -> None:
        """Add the cycle of the entries added last: no entry of it follows."""
        if not self._in_cycle:
            return
        cycle = self._cycle_of(self._cycle_id)
        placed = {each.adapter_id: each.worker_id for each in cycle.entries} if cycle is not None else {}
        of_worker: defaultdict[str, list[tuple[int, pb.HistoryEntry]]] = defaultdict(list)
        for number, entry in self._in_cycle:
            of_worker[placed.get(entry.target_id) or entry.worker_id].append((number, entry))
        for worker_id, entries in of_worker.items():
            self._add_cycle(worker_id, entries, cycle)
        self._in_cycle.clear()

    def take(self) -> bytes:
        """Return the next part of the file: the packets that were added since the last call."""
        part: bytes = self._trace.SerializeToString()
        self._trace.Clear()
        return part

    def _add_waits(self, row: int, entry: pb.HistoryEntry, arrive: int, begin: int) -> None:
        """Add what the operation waited for. The history has sums by reason: their order here is the usual one."""
        now = arrive
        for wait in sorted(entry.waits, key=lambda each: _usual_order(each.reason)):
            end = min(now + int(wait.seconds * 1e9), begin)
            values = {"operation": entry.operation, "waits": WAITS.get(wait.reason, "")}
            self._slice(row, reason_of(wait.reason) or "wait", "wait", now, end, values)
            now = end

    def _add_cycle(
        self, worker_id: str, entries: Sequence[tuple[int, pb.HistoryEntry]], cycle: pool_pb2.Cycle | None
    ) -> None:
        """Add a worker's part of a cycle. The start of a cycle that is not kept any more follows from its end."""
        first = entries[0][1]
        pass_ns, step_ns = int(first.pass_seconds * 1e9), int(first.step_seconds * 1e9)
        if cycle is not None:
            start = cycle.start_time.ToNanoseconds()
        else:
            start = first.end_time.ToNanoseconds() - pass_ns - step_ns
        end = start + pass_ns + step_ns
        values: dict[str, Value] = {"cycle": first.cycle_id, "worker": worker_id, "tenants": first.num_tenants}
        for work in cycle.workers if cycle is not None else ():
            if work.worker_id == worker_id:
                values["phase_seconds"] = dict(sorted(work.seconds.items()))
        row = self._row(f"worker {worker_id}", start, end)
        self._slice(row, f"cycle {first.cycle_id}", "cycle", start, end, values)
        phases = (("pass", start, pass_ns, True), ("step", start + pass_ns, step_ns, False))
        for name, begin, duration, is_pass in phases:
            ran = [each for each in entries if (each[1].kind in PASS_KINDS) is is_pass]
            if duration or ran:
                self._add_phase(row, name, begin, begin + duration, ran)

    def _add_phase(self, row: int, name: str, begin: int, end: int, ran: Sequence[tuple[int, pb.HistoryEntry]]) -> None:
        values: dict[str, Value] = {
            "tokens": sum(entry.num_tokens for _, entry in ran),
            "operations": [_values(entry) for _, entry in ran],
        }
        self._slice(row, name, "cycle", begin, end, values, [number for number, _ in ran])

    def _flow(self) -> Collection[int]:
        """Return the flow of the present operation: Perfetto draws arrows between slices with the same one."""
        return (self._num_operations,)

    def _row(self, track: str, begin: int, end: int) -> int:
        """Return the row of the track that a slice goes to: the one that has been free for the shortest time."""
        rows = self._rows[track]
        number = bisect_right(rows, (begin, _UUID_MAX)) - 1
        if number >= 0:
            _, row = rows.pop(number)
        else:
            self._num_rows += 1
            row = _ROOT + self._num_rows
            described = self._trace.packet.add().track_descriptor
            described.uuid, described.parent_uuid, described.name = row, _ROOT, track
        insort(rows, (end, row))
        return row

    def _slice(
        self,
        row: int,
        name: str,
        category: str,
        begin: int,
        end: int,
        values: Mapping[str, Value],
        flows: Collection[int] = (),
    ) -> None:
        event = self._packet(begin).track_event
        event.type, event.track_uuid, event.name = TrackEvent.TYPE_SLICE_BEGIN, row, name
        event.categories.append(category)
        event.flow_ids.extend(flows)
        for key, value in values.items():
            _set(event.debug_annotations.add(name=key), value)
        event = self._packet(end).track_event
        event.type, event.track_uuid = TrackEvent.TYPE_SLICE_END, row

    def _set_clock(self, now: int) -> None:
        """Say that the clock of the trace, which Perfetto takes for the time since a boot, shows the time of day."""
        snapshot = self._packet(now).clock_snapshot
        for clock in (BUILTIN_CLOCK_BOOTTIME, BUILTIN_CLOCK_REALTIME):
            snapshot.clocks.add(clock_id=clock, timestamp=now)

    def _packet(self, moment: int) -> Any:
        return self._trace.packet.add(timestamp=moment, trusted_packet_sequence_id=_SEQUENCE_ID)


def _moments(entry: pb.HistoryEntry) -> tuple[int, int, int]:
    """Return when an operation came, began and ended, in this order also after a step of the wall clock.

    An operation that came before the coordinator's last start shows from when it began.
    """
    end = entry.end_time.ToNanoseconds()
    begin = entry.begin_time.ToNanoseconds() if entry.HasField("begin_time") else None
    arrive = entry.arrive_time.ToNanoseconds() if entry.HasField("arrive_time") else begin
    arrive = min(end if arrive is None else arrive, end)
    return arrive, min(max(arrive if begin is None else begin, arrive), end), end


def _values(entry: pb.HistoryEntry) -> dict[str, Value]:
    """Return what a slice says of its operation."""
    values: dict[str, Value] = {"operation": entry.operation, "kind": kind_of(entry)}
    values["sampler" if entry.kind == ops_pb.OPERATION_KIND_SAMPLE else "adapter"] = entry.target_id
    if entry.cycle_id:
        values["cycle"] = entry.cycle_id
    if entry.worker_id:
        values["worker"] = entry.worker_id
    values["tokens"], values["engine_seconds"] = entry.num_tokens, entry.engine_seconds
    if entry.num_begins > 1:
        values["begun_times"] = entry.num_begins
    if entry.error_reason:
        values["error"] = entry.error_reason
    return values


def _usual_order(reason: pb.WaitReason.ValueType) -> tuple[bool, bool, int]:
    """Order reasons: first a seq that has not arrived, then earlier operations, at last the next cycle."""
    return reason == pb.WAIT_REASON_CYCLE, reason != pb.WAIT_REASON_SEQUENCE, reason


def _set(annotation: Any, value: Value) -> None:
    if isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _set(annotation.dict_entries.add(name=key), each)
    else:
        for each in value:
            _set(annotation.array_values.add(), each)

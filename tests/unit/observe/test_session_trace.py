"""The timeline of a session: rows of nested slices, from entries in the order of their commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.observe.session_trace import SessionTrace
from tests.support.timelines import Slice, packets, slices
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

FORWARD_BACKWARD, OPTIM_STEP = ops_pb.OPERATION_KIND_FORWARD_BACKWARD, ops_pb.OPERATION_KIND_OPTIM_STEP
MS = 1_000_000
START = 1_795_000_000_000 * MS
"""A moment of the wall clock in nanoseconds, as those of a pool."""


def entry(
    seq: int,
    moments: Sequence[int],
    kind: ops_pb.OperationKind.ValueType = FORWARD_BACKWARD,
    waits: dict[pb.WaitReason.ValueType, int] | None = None,
    adapter: str = "s:train:0",
    **values: Any,
) -> pb.HistoryEntry:
    """Return an entry. `moments`: when it came, began and ended; they and waits are in milliseconds."""
    made = pb.HistoryEntry(operation=f"{adapter}:{seq}", kind=kind, target_id=adapter, **values)
    for field, moment in zip(("arrive_time", "begin_time", "end_time"), moments, strict=True):
        getattr(made, field).FromNanoseconds(START + moment * MS)
    for reason, duration in (waits or {}).items():
        made.waits.add(reason=reason, seconds=duration / 1000)
    return made


def trace_of(
    *entries: pb.HistoryEntry, cycles: Sequence[pool_pb2.Cycle] = (), name: str = ""
) -> tuple[bytes, list[Slice]]:
    """Return the file of these entries, and its slices."""
    known = {each.cycle_id: each for each in cycles}
    trace = SessionTrace("s", lambda _: name, known.get)
    parts = []
    for each in entries:
        trace.add(each)
        parts.append(trace.take())
    trace.end_cycle()
    data = b"".join([*parts, trace.take()])
    return data, slices(data)


def spans(found: Sequence[Slice], track: str) -> list[tuple[str, int, int, int]]:
    """Return name, begin, end and depth of a track's slices; times are in milliseconds."""
    return [
        (each.name, (each.begin - START) // MS, (each.end - START) // MS, each.depth)
        for each in found
        if each.track == track
    ]


def test_an_operation_is_a_request_and_on_its_adapters_track_waits_and_a_run() -> None:
    waits = {pb.WAIT_REASON_CYCLE: 3, pb.WAIT_REASON_SEQUENCE: 1, pb.WAIT_REASON_ORDER: 2}
    _, found = trace_of(entry(1, (0, 6, 10), waits=waits, num_tokens=5, worker_id="w0"), name="mine")
    assert spans(found, "requests") == [("forward_backward", 0, 10, 0)]
    assert spans(found, "train:0 mine") == [
        ("sequence", 0, 1, 0),
        ("order", 1, 3, 0),
        ("cycle", 3, 6, 0),
        ("forward_backward", 6, 10, 0),
    ]
    [run] = [each for each in found if each.category == "operation"]
    assert run.values == {
        "operation": "s:train:0:1",
        "kind": "forward_backward",
        "adapter": "s:train:0",
        "worker": "w0",
        "tokens": 5,
        "engine_seconds": 0.0,
    }
    waited = [each for each in found if each.category == "wait"]
    assert {each.values["operation"] for each in waited} == {"s:train:0:1"}
    assert waited[1].values["waits"] == "behind earlier operations of its adapter"


def in_cycle(seq: int, kind: ops_pb.OperationKind.ValueType, moments: Sequence[int], **values: Any) -> pb.HistoryEntry:
    settings: dict[str, Any] = {
        "cycle_id": 7,
        "worker_id": "w0",
        "num_tenants": 2,
        "pass_seconds": 0.004,
        "step_seconds": 0.002,
    }
    return entry(seq, moments, kind, num_tokens=seq, **settings | values)


def test_a_cycle_is_on_its_workers_track_with_its_pass_and_its_steps_and_who_ran_in_them() -> None:
    cycle = pool_pb2.Cycle(
        cycle_id=7, workers=[pool_pb2.WorkerPhases(worker_id="w0", seconds={"loss": 0.5, "pack": 1})]
    )
    cycle.start_time.FromNanoseconds(START + 3 * MS)
    _, found = trace_of(in_cycle(1, FORWARD_BACKWARD, (0, 4, 10)), in_cycle(2, OPTIM_STEP, (0, 8, 10)), cycles=[cycle])
    assert spans(found, "worker w0") == [("pass", 3, 7, 1), ("step", 7, 9, 1), ("cycle 7", 3, 9, 0)]
    passed, stepped, whole = (each for each in found if each.track == "worker w0")
    assert whole.values["phase_seconds"] == {"loss": 0.5, "pack": 1.0}
    assert (whole.values["cycle"], whole.values["tenants"]) == (7, 2)
    assert [each["operation"] for each in passed.values["operations"]] == ["s:train:0:1"]
    assert [each["operation"] for each in stepped.values["operations"]] == ["s:train:0:2"]
    assert (passed.values["tokens"], stepped.values["tokens"]) == (1, 2)
    flows = {each.values["operation"]: each.flows for each in found if each.category == "request"}
    assert (passed.flows, stepped.flows) == (flows["s:train:0:1"], flows["s:train:0:2"])


def test_a_cycle_that_is_not_kept_any_more_ends_with_its_operations() -> None:
    _, found = trace_of(in_cycle(1, FORWARD_BACKWARD, (0, 4, 10)))
    assert spans(found, "worker w0") == [("pass", 4, 8, 1), ("step", 8, 10, 1), ("cycle 7", 4, 10, 0)]


def test_an_adapter_is_shown_where_the_cycle_had_it_and_not_where_the_operation_began_first() -> None:
    cycle = pool_pb2.Cycle(cycle_id=7, entries=[pool_pb2.CycleEntry(adapter_id="s:train:0", worker_id="w1")])
    _, found = trace_of(in_cycle(1, FORWARD_BACKWARD, (0, 4, 10)), cycles=[cycle])
    assert {each.track for each in found if each.category == "cycle"} == {"worker w1"}


def test_what_came_before_a_restart_shows_from_when_it_began_and_what_no_worker_ran_without_a_run() -> None:
    restarted, cancelled = entry(1, (0, 6, 10)), entry(2, (0, 0, 10))
    restarted.ClearField("arrive_time")
    cancelled.ClearField("begin_time")
    _, found = trace_of(restarted, cancelled)
    assert spans(found, "requests") == [("forward_backward", 6, 10, 0), ("forward_backward", 0, 10, 0)]


def test_reported_metrics_have_no_slice() -> None:
    assert trace_of(pb.HistoryEntry(target_id="s:train:0", step=3, metrics={"reward": 1.0}))[1] == []


def test_the_clock_of_the_trace_shows_the_time_of_day() -> None:
    data, _ = trace_of(entry(1, (0, 6, 10)))
    [snapshot] = [each.clock_snapshot for each in packets(data) if each.HasField("clock_snapshot")]
    assert {each.clock_id: each.timestamp for each in snapshot.clocks} == {1: START + 10 * MS, 6: START + 10 * MS}


MOMENTS = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))


@given(st.lists(MOMENTS, max_size=20))
def test_slices_of_a_row_never_overlap_whatever_the_moments_are(all_moments: list[tuple[int, int, int]]) -> None:
    entries = [
        in_cycle(seq, FORWARD_BACKWARD, moments, cycle_id=seq, waits={pb.WAIT_REASON_ORDER: 9})
        for seq, moments in enumerate(all_moments, start=1)
    ]
    _, found = trace_of(*entries)
    assert len([each for each in found if each.category == "request"]) == len(entries)
    expected = {(f"s:train:0:{seq}", START + min(each[0], each[2]) * MS) for seq, each in enumerate(all_moments, 1)}
    assert {(each.values["operation"], each.begin) for each in found if each.category == "request"} == expected
    for each in found:
        assert each.begin <= each.end
        assert each.depth == (1 if each.name in {"pass", "step"} else 0), "a slice of another operation is around it"


def test_operations_one_after_another_share_a_row_and_waiting_ones_have_rows_of_their_own() -> None:
    def num_rows(*moments: tuple[int, int, int]) -> int:
        _, found = trace_of(*(entry(seq, each) for seq, each in enumerate(moments, start=1)))
        return len({each.row for each in found if each.track == "requests"})

    assert num_rows((0, 1, 4), (4, 5, 8), (9, 10, 11)) == 1
    assert num_rows((0, 1, 4), (0, 5, 8), (0, 10, 11), (11, 12, 13)) == 3


@pytest.mark.parametrize("reason", pb.WaitReason.values())
def test_each_reason_has_a_name(reason: pb.WaitReason.ValueType) -> None:
    _, found = trace_of(entry(1, (0, 6, 10), waits={reason: 6}))
    [wait] = [each for each in found if each.category == "wait"]
    assert wait.name

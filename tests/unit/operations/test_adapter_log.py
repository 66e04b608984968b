"""One adapter's log in memory: ready operations, closed windows, lost copies."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.observe.timeline import Timeline
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind, Operation, Usage
from coordinator.operations.windows import Window, window_bytes, window_of
from coordinator.payloads.passes import Chunk
from tests.support.adapter_logs import (
    DISCARD,
    ERROR,
    FB,
    FORWARD,
    LOAD,
    SAVE,
    STEP,
    adapter_with,
    appending,
    in_batch,
    operation,
    run,
    run_together,
    seqs,
    spec_named,
)
from workers.contract.gradient_windows import EMPTY, GradientWindow
from workers.contract.messages import UNMARKED, ItemResult, RequestBatch


def test_a_pass_takes_the_prefix_of_passes_and_no_operation_behind_a_gap() -> None:
    adapter = adapter_with(FB, FORWARD, FB, STEP, FB)
    assert seqs(adapter.ahead().passes()) == [1, 2, 3]
    assert not list(adapter.ahead().states())
    del adapter.operations[2]
    assert seqs(adapter.ahead().passes()) == [1]
    assert adapter.missing_seq() is None
    run(adapter, 1)
    assert adapter.missing_seq() == 2


def test_a_seq_is_next_if_all_before_it_and_none_behind_it_have_arrived() -> None:
    adapter = adapter_with(FB, FB, FB)
    assert [seq for seq in range(1, 7) if adapter.is_next(seq)] == [4]
    del adapter.operations[2]
    assert not [seq for seq in range(1, 7) if adapter.is_next(seq)], "a part of a batch whose first part is missing"
    run(adapter, 1)
    adapter.add(operation(2, FB))
    run(adapter, 2)
    assert [seq for seq in range(1, 7) if adapter.is_next(seq)] == [4]


@given(st.permutations(range(6, 14)), st.integers(0, 4), st.sets(st.integers(0, 7)))
def test_an_operation_is_unblocked_by_the_last_arrival_of_those_before_it(
    order: list[int], num_restored: int, withdrawn: set[int]
) -> None:
    adapter = AdapterLog("t", "s", "toy", spec_named("a"), snapshot_seq=5)
    for seq in order[:num_restored]:  # they have no moment of arrival
        adapter.add(operation(seq, FB))
    arrivals = dict.fromkeys(order[:num_restored], 0.0)
    arriving = order[num_restored:]
    for now, seq in enumerate(arriving + [seq for at, seq in enumerate(arriving) if at in withdrawn], 1):
        if seq in adapter.operations:  # its append failed, and its client sends it again
            adapter.withdraw(adapter.operations[seq])
        one = appending(seq, FB)
        adapter.add(one)
        adapter.arrived(one, now)
        arrivals[seq] = now
    for seq, one in adapter.operations.items():
        last = max((arrivals[before] for before in range(6, seq)), default=0.0)
        assert one.timeline.unblocked == (last if last > arrivals[seq] else None)


def test_each_operation_is_unblocked_once_when_they_arrive_in_descending_order() -> None:
    adapter = adapter_with()
    with patch.object(Timeline, "unblock", autospec=True) as unblock:
        for seq in range(50, 0, -1):
            one = appending(seq, FB)
            adapter.add(one)
            adapter.arrived(one, 0.0)
    assert unblock.call_count == 49


def test_a_step_phase_takes_one_optimizer_step_with_the_saves_and_loads_around_it() -> None:
    assert seqs(adapter_with(STEP, LOAD, STEP, FB).ahead().states()) == [1, 2]
    assert seqs(adapter_with(SAVE, STEP, SAVE, LOAD).ahead().states()) == [1, 2, 3], "the load may need the checkpoint"
    assert seqs(adapter_with(STEP, SAVE, STEP).ahead().states()) == [1, 2]
    assert seqs(adapter_with(LOAD, STEP).ahead().states()) == [1], "if the load fails, the step must not have run"


def test_a_closed_window_fails_its_step_also_behind_a_save() -> None:
    adapter = adapter_with(FB, SAVE, STEP, STEP)
    run(adapter, 1, fail=[1])
    assert seqs(adapter.ahead().states()) == [2]
    run(adapter, 2)
    assert seqs(adapter.take_decided()) == [3]
    assert seqs(adapter.ahead().states()) == [4]


def test_a_failed_pass_closes_its_window_up_to_and_including_the_step() -> None:
    adapter = adapter_with(FB, FB, FORWARD, FB, STEP, FB, STEP)
    run(adapter, 1, 2, fail=[2])
    assert seqs(adapter.ahead().passes()) == [3], "a forward still runs"
    run(adapter, 3)
    decided = adapter.take_decided()
    assert seqs(decided) == [4, 5]
    assert all(each.outcome is not None and "a:2 failed" in each.outcome.error.message for each in decided)
    assert adapter.take_decided() == [], "each is committed once"
    assert seqs(adapter.ahead().passes()) == [6]
    assert adapter.copy.must_drop_gradient


def test_quarantined_operations_run_one_by_one_until_their_release() -> None:
    adapter = adapter_with(FB, FB, FB)
    adapter.quarantine(1, 2)
    assert seqs(adapter.ahead().passes()) == [1]
    adapter.release()
    assert seqs(adapter.ahead().passes()) == [1, 2, 3]


def test_a_load_opens_a_closed_window_and_closes_an_open_one_if_it_fails() -> None:
    for fails in (False, True):
        adapter = adapter_with(FB, LOAD, FB, STEP)
        run(adapter, 1, 2, fail=[2] if fails else [1])
        assert seqs(adapter.take_decided()) == ([3, 4] if fails else [])


def test_a_discard_is_decided_in_its_turn_and_the_next_item_drops_the_gradient() -> None:
    adapter = adapter_with(FB, DISCARD, DISCARD, FORWARD, FB, STEP)
    assert seqs(adapter.ahead().passes()) == [1]
    assert adapter.take_decided() == []
    run(adapter, 1)
    assert seqs(decided := adapter.take_decided()) == [2, 3]
    assert all(each.outcome is not None and each.outcome.HasField("discard_gradient") for each in decided)
    assert (adapter.copy.cursor, adapter.copy.applied_seq, adapter.copy.must_drop_gradient) == (3, 1, True)
    assert not adapter.copy.window.has_gradient
    assert seqs(adapter.ahead().passes()) == [4, 5]


def test_a_discard_opens_a_closed_window_for_operations_behind_it() -> None:
    adapter = adapter_with(FB, FB, DISCARD, FB, STEP)
    run(adapter, 1, fail=[1])
    assert seqs(adapter.take_decided()) == [2, 3]
    assert adapter.operations[2].is_failed
    assert not adapter.operations[3].is_failed
    run(adapter, 4, 5)
    assert adapter.take_decided() == []


def test_a_cancelled_discard_closes_the_window_whose_gradient_it_should_have_dropped() -> None:
    adapter = adapter_with(FB, DISCARD, STEP, STEP)
    adapter.fail(adapter.operations[2], ERROR)
    run(adapter, 1)
    assert seqs(adapter.take_decided()) == [2, 3]
    assert adapter.operations[3].is_failed
    assert seqs(adapter.ahead().states()) == [4]


def test_a_replay_drops_the_gradient_between_the_passes_around_a_discard() -> None:
    adapter = adapter_with(FB, SAVE, DISCARD, FORWARD, FB, STEP)
    run(adapter, 1, 2)
    for each in adapter.take_decided():
        each.commit()
    run(adapter, 4, 5)
    adapter.place_copy("w1")
    replayed = []
    while adapter.ahead().is_replaying:
        ready = seqs([*adapter.ahead().passes(), *adapter.ahead().states()])
        replayed.append((ready, adapter.copy.must_drop_gradient))
        adapter.copy.took_gradient_drop()
        adapter.applied(adapter.operations[ready[0]])
    assert replayed == [([1], False), ([5], True)]


def test_a_discard_whose_append_fails_discards_nothing() -> None:
    adapter = adapter_with(FB)
    adapter.add(appending(2, DISCARD))
    adapter.place_copy("w0")
    run(adapter, 1)
    assert adapter.copy.must_drop_gradient
    adapter.withdraw(adapter.operations[2])
    assert adapter.take_decided() == []
    assert (adapter.home, adapter.copy.must_drop_gradient) == ("", False)
    assert adapter.ahead().is_replaying


def test_a_failed_batch_fails_its_rest_and_the_step_behind_it_and_the_next_batch_runs_at_once() -> None:
    adapter = adapter_with(FB, FB, FORWARD, FB, STEP)
    in_batch(adapter, 1, 2)
    in_batch(adapter, 4)
    run(adapter, 1, fail=[1])
    assert seqs(adapter.take_decided()) == [2]
    assert seqs(adapter.ahead().passes()) == [3, 4], "a forward changes nothing"
    run(adapter, 3, 4, 5)
    assert adapter.take_decided() == []

    adapter = adapter_with(FB, FORWARD, STEP, FB)
    in_batch(adapter, 1)
    run(adapter, 1, 2, fail=[1])
    assert seqs(adapter.take_decided()) == [3], "a step without its batch must not run"
    assert seqs(adapter.ahead().passes()) == [4]


def test_an_unmarked_pass_or_another_batch_in_the_window_closes_it_up_to_the_step() -> None:
    for first in ((), (1,)):
        adapter = adapter_with(FB, FB, FB, STEP, FB)
        in_batch(adapter, *first)
        in_batch(adapter, 2)
        in_batch(adapter, 3)
        run(adapter, 1, 2, fail=[2])
        assert seqs(adapter.take_decided()) == [3, 4]
        assert seqs(adapter.ahead().passes()) == [5]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_batch_that_ran_behind_a_failed_one_in_the_same_phase_keeps_its_gradient(num_chunks: int) -> None:
    adapter = adapter_with(FB, FB, FB, STEP)
    in_batch(adapter, 1)
    in_batch(adapter, 2, 3)
    two = adapter.operations[2]
    if num_chunks == 1:
        run_together(adapter, 1, 2, fail=[1])
    else:
        two.chunks *= 2
        adapter.copy.start(two)
        run_together(adapter, 1, fail=[1])
        assert adapter.copy.must_drop_gradient
        adapter.copy.add_result(two, 0, ItemResult(op_id=two.name))
        adapter.copy.pause(two)
    assert not adapter.copy.must_drop_gradient, "the worker has dropped the first batch's gradient by itself"
    assert seqs(adapter.ahead().passes()) == ([3] if num_chunks == 1 else [2, 3])


def test_a_step_of_the_same_phase_as_its_failed_batch_does_not_run() -> None:
    adapter = adapter_with(FB, FB, FB, STEP, FB)
    in_batch(adapter, 1, 2)
    in_batch(adapter, 3)
    run_together(adapter, 1, 2, 3, fail=[1, 3])
    assert [adapter.operations[seq].is_failed for seq in (1, 2, 3)] == [True] * 3
    assert seqs(adapter.take_decided()) == [4]
    assert seqs(adapter.ahead().passes()) == [5]
    assert adapter.copy.must_drop_gradient


@pytest.mark.parametrize("kinds", [(FB, FB), (FB, FB, FB), (STEP, FB, FB), (FB, FB, DISCARD, FB)])
def test_a_window_is_the_same_after_a_replay_from_a_snapshot_in_its_middle(kinds: tuple[Kind, ...]) -> None:
    """Operations that need no worker may follow the snapshot's seq when it is taken: they are passed again."""
    adapter = adapter_with(*kinds)
    for seq, kind in enumerate(kinds, 1):
        if kind is FB:
            in_batch(adapter, seq)
            if seq > 1:
                adapter.fail(adapter.operations[seq], ERROR)  # as a refusal, or a cancellation
    run(adapter, *(seq for seq, kind in enumerate(kinds, 1) if seq == 1 or kind is STEP))
    for each in adapter.take_decided():
        each.commit()
    window = adapter.copy.window
    adapter.cover(adapter.copy.applied_seq, adapter.copy.applied_window, 0.0)
    adapter.lose_copy()
    adapter.ahead()
    assert (adapter.copy.cursor, adapter.copy.window) == (len(kinds), window)


@pytest.mark.parametrize("batch", [UNMARKED, RequestBatch(2, 3), None])
@pytest.mark.parametrize("error", [ERROR, None])
def test_a_window_is_read_back_as_it_was_written(batch: RequestBatch | None, error: Any) -> None:
    window: Window = GradientWindow(error, batch)
    assert window_of(window_bytes(window)) == window
    assert (window_bytes(window) == b"") is (window == EMPTY)


def test_a_lost_copy_is_rebuilt_by_the_operations_that_changed_state() -> None:
    adapter = adapter_with(FB, FORWARD, FB, STEP, FB, STEP, SAVE, FB)
    run(adapter, 1, 2, 3, 4, 5, fail=[5])
    assert adapter.operations[6].is_failed
    run(adapter, 7)
    adapter.place_copy("w1")
    replayed = []
    while adapter.ahead().is_replaying:
        [first, *_] = [*adapter.ahead().passes(), *adapter.ahead().states()]
        replayed.append(first.seq)
        adapter.applied(first)
    assert replayed == [1, 3, 4]
    assert adapter.copy.applied_seq == 4
    assert seqs(adapter.ahead().passes()) == [8]
    assert adapter.copy.must_drop_gradient


@pytest.mark.parametrize("renew", [AdapterLog.lose_copy, lambda adapter: adapter.place_copy("w1")])
def test_progress_of_one_generation_of_the_copy_does_not_count_for_the_next(
    renew: Callable[[AdapterLog], None],
) -> None:
    adapter = adapter_with(FB)
    adapter.place_copy("w0")
    one = adapter.operations[1]
    adapter.copy.start(one)
    adapter.copy.add_result(one, 0, ItemResult(op_id=one.name, num_tokens=4, engine_s=0.5))
    copy = adapter.copy
    assert (copy.num_chunks_done(one), copy.is_running(one), copy.usage(one)) == (1, True, Usage(4, 0.5))
    renew(adapter)
    assert adapter.copy.generation > copy.generation
    copy = adapter.copy
    assert (copy.num_chunks_done(one), copy.is_running(one), copy.usage(one)) == (0, False, Usage())
    assert copy.results(one) == []
    assert adapter.is_between_operations


def test_losing_a_copy_twice_leaves_the_same_state_as_losing_it_once() -> None:
    adapter, other = adapter_with(FB, STEP, FB), adapter_with(FB, name="b")
    other.join(adapter.residency)
    for each in (adapter, other):
        each.place_copy("w0")
    run(adapter, 1, 2)
    for _ in range(2):
        adapter.lose_copy()
        assert adapter.residency.on("w0") == ["b"]
        assert (adapter.home, adapter.copy.cursor, adapter.ahead().is_replaying) == ("", 0, True)


@pytest.mark.parametrize(
    ("kinds", "failing", "is_pending"),
    [
        ((), (), False),
        ((STEP,), (), False),
        ((FB,), (), True),
        ((FB, FORWARD, SAVE), (), True),
        ((FB, STEP), (), False),
        ((FB, STEP, FORWARD), (), False),
        ((FB, LOAD), (), False),
        ((FB, DISCARD), (), False),
        ((DISCARD, FB), (), True),
        ((FB, STEP), (2,), False),  # the gradient of a step that failed is dropped
    ],
)
def test_a_gradient_is_pending_from_a_pass_to_the_next_step_or_load(
    kinds: tuple[Kind, ...], failing: tuple[int, ...], is_pending: bool
) -> None:
    adapter = adapter_with(*kinds)
    run(adapter, *(seq for seq, kind in enumerate(kinds, 1) if kind is not DISCARD), fail=failing)
    assert adapter.copy.window.has_gradient is is_pending


def test_a_failed_append_leaves_no_gap_before_the_next_server_assigned_seq() -> None:
    adapter = adapter_with(FB, STEP)
    for kind in (FB, STEP):
        adapter.add(appending(adapter.next_seq, kind))
    for seq in (3, 4):
        adapter.withdraw(adapter.operations[seq])
    assert adapter.next_seq == 3
    adapter.add(appending(9, FB))
    adapter.withdraw(adapter.operations[9])
    assert adapter.next_seq == 3


@pytest.mark.parametrize(("progress", "copy"), [("none", ("w0", 1)), ("started", ("", 0)), ("applied", ("", 0))])
def test_withdrawing_an_operation_drops_only_a_copy_that_may_have_run_it(progress: str, copy: tuple[str, int]) -> None:
    adapter = adapter_with(FB)
    adapter.add(appending(2, FB))
    adapter.place_copy("w0")
    run(adapter, 1)
    two = adapter.operations[2]
    if progress != "none":
        adapter.copy.start(two)
    if progress == "applied":
        two.succeed(1, Usage())
        adapter.applied(two)
    adapter.withdraw(two)
    assert (adapter.home, adapter.copy.cursor) == copy


def test_a_refused_operation_closes_its_window_only_once_its_record_is_durable() -> None:
    """If the append fails, its sequence number belongs to the next attempt, which may succeed."""
    adapter = adapter_with(FB)
    for seq in (2, 3):
        adapter.add(appending(seq, FB))
    refused, behind = adapter.operations[2], adapter.operations[3]
    refused.fail(ERROR)
    behind.accept()
    run(adapter, 1)
    assert adapter.copy.cursor == 1
    assert not adapter.is_ready()
    assert (adapter.missing_seq(), list(adapter.ahead().passes()), adapter.take_decided()) == (None, [], [])
    refused.accept()
    refused.commit()
    assert adapter.is_ready()
    assert adapter.take_decided() == [behind]


def test_a_snapshot_that_becomes_durable_after_its_copy_was_lost_is_the_start_of_the_next_copy() -> None:
    adapter = adapter_with(FB, STEP)
    adapter.place_copy("w0")
    run(adapter, 1, 2)
    adapter.lose_copy()
    adapter.cover(2, EMPTY, 0.0)
    adapter.add(operation(3, FB))
    assert adapter.missing_seq() is None
    assert seqs(adapter.ahead().passes()) == [3]


def test_only_operations_that_a_snapshot_covers_leave_memory() -> None:
    adapter = adapter_with(FB, STEP, FB)
    run(adapter, 1, 2)
    adapter.cover(2, EMPTY, 0.0)
    assert list(adapter.operations) == [3]
    assert adapter.copy.cursor == 2


def test_an_adapter_that_cannot_be_rebuilt_fails_every_operation_and_never_runs_one() -> None:
    adapter = adapter_with(FB, STEP, FB)
    run(adapter, 1, 2)
    adapter.abort(ERROR)
    assert seqs(adapter.take_decided()) == [3]
    assert not adapter.is_ready()
    adapter.add(operation(4, STEP))
    assert adapter.is_ready()
    assert seqs(adapter.take_decided()) == [4]
    assert not list(adapter.ahead().passes())
    assert not list(adapter.ahead().states())
    assert adapter.missing_seq() is None


def test_the_bytes_of_a_window_are_counted_until_its_step_and_uncounted_when_withdrawn() -> None:
    adapter = adapter_with(FB)
    adapter.add(appending(2, FB))
    assert adapter.window_bytes == 20
    adapter.withdraw(adapter.operations[2])
    assert adapter.window_bytes == 10
    adapter.add(operation(2, STEP))
    assert adapter.window_bytes == 0


def test_readiness_of_an_adapter_with_ten_thousand_operations_reads_only_the_first_ones() -> None:
    adapter = adapter_with(*[FB] * 10_000)
    reads: list[int] = []
    operations = adapter.operations

    class Counting(dict[int, Operation]):
        def get(self, key: int, default: object = None) -> Operation | None:  # type: ignore[override]
            reads.append(key)
            return operations.get(key)

    adapter.operations = Counting(operations)
    assert adapter.is_ready()
    assert adapter.missing_seq() is None
    assert not adapter.ahead().is_replaying
    assert len(reads) < 20


@given(
    st.lists(st.sampled_from([FB, FORWARD, STEP, LOAD, SAVE, DISCARD]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["succeed", "fail", "lose", "quarantine", "begin", "gap"]), max_size=12),
)
@example([FB, FB], ["begin", "fail"])
def test_an_adapter_is_ready_exactly_if_one_of_its_operations_is_ready_or_decided(
    kinds: list[Kind], events: list[str]
) -> None:
    adapter = adapter_with(*kinds)
    for event in events:
        first = next(iter([*adapter.ahead().passes(), *adapter.ahead().states()]), None)
        match event:
            case "succeed" | "fail" if first is not None:
                run(adapter, first.seq, fail=(first.seq,) if event == "fail" else ())
            case "begin":
                for each in adapter.ahead().passes():
                    adapter.copy.start(each)
            case "quarantine" if first is not None:
                adapter.quarantine(first.seq, first.seq + 1)
            case "lose":
                adapter.lose_copy()
            case "gap":
                adapter.operations.pop(max(adapter.operations, default=0), None)
        is_ready = adapter.is_ready()
        ready = [*adapter.ahead().passes(), *adapter.ahead().states()]
        decided = adapter.take_decided()
        assert is_ready is bool(decided or ready)
        for each in decided:
            each.commit()


def test_ready_chunks_are_the_chunks_of_ready_passes_that_the_copy_has_not_run() -> None:
    adapter = adapter_with(FB, FORWARD, STEP, FB)
    adapter.operations[1].chunks = (Chunk(0, 1, 4), Chunk(1, 2, 5))
    assert list(adapter.ahead().chunks()) == [4, 5, 4]
    adapter.copy.add_result(adapter.operations[1], 0, ItemResult(op_id="a:1"))
    assert list(adapter.ahead().chunks()) == [5, 4]


def test_reinstalls_for_a_chunk_are_counted_until_the_next_result_or_the_loss_of_the_worker() -> None:
    adapter = adapter_with(FB)
    for count in (1, 2):
        adapter.place_copy("w0")
        adapter.lose_copy()
        assert adapter.copy.count_reinstall("a:1", 0) == count
    assert adapter.copy.count_reinstall("a:1", 1) == 1
    adapter.copy.add_result(adapter.operations[1], 0, ItemResult(op_id="a:1"))
    assert adapter.copy.count_reinstall("a:1", 0) == 1
    adapter.lose_worker()
    assert adapter.copy.count_reinstall("a:1", 0) == 1


def test_the_wait_for_a_missing_operation_begins_anew_when_its_append_fails() -> None:
    """Its client sends it, so it is not lost: the disk may be full, or the database locked, for minutes."""
    log = adapter_with()
    first = appending(1, FB)
    log.add(first)
    log.note_gap(5.0)
    log.withdraw(first)
    assert log.gap_since is None

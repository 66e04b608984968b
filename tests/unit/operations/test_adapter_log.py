"""One adapter's order in memory: what may run, what a closed window forbids, and what a lost copy changes."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.operations.adapter_log import ReadyChunks
from coordinator.operations.chunks import Chunk
from coordinator.operations.operation import Kind, Operation
from tests.support.adapter_logs import ERROR, FB, FORWARD, LOAD, SAVE, STEP, adapter_with, operation, run, seqs


def test_a_pass_takes_the_prefix_of_passes_and_nothing_behind_a_gap() -> None:
    adapter = adapter_with(FB, FORWARD, FB, STEP, FB)
    assert seqs(adapter.ready_passes()) == [1, 2, 3]
    assert not list(adapter.ready_states())
    del adapter.operations[2]
    assert seqs(adapter.ready_passes()) == [1]
    assert adapter.missing_seq() is None
    run(adapter, 1)
    assert adapter.missing_seq() == 2


def test_a_step_phase_takes_one_optimizer_step_with_the_saves_and_loads_around_it() -> None:
    assert seqs(adapter_with(STEP, LOAD, STEP, FB).ready_states()) == [1, 2]
    assert seqs(adapter_with(SAVE, STEP, SAVE, LOAD).ready_states()) == [1, 2, 3], "it may load what is being saved"
    assert seqs(adapter_with(STEP, SAVE, STEP).ready_states()) == [1, 2]
    assert seqs(adapter_with(LOAD, STEP).ready_states()) == [1], "should the load fail, the step must not have run"


def test_a_closed_window_stops_at_what_it_forbids_even_behind_a_save() -> None:
    adapter = adapter_with(FB, SAVE, STEP, STEP)
    run(adapter, 1, fail=[1])
    assert seqs(adapter.ready_states()) == [2]
    run(adapter, 2)
    assert seqs(adapter.decided) == [3]
    assert seqs(adapter.ready_states()) == [4]


def test_a_failed_pass_closes_its_window_up_to_and_including_the_step() -> None:
    adapter = adapter_with(FB, FB, FORWARD, FB, STEP, FB, STEP)
    run(adapter, 1, 2, fail=[2])
    assert seqs(adapter.ready_passes()) == [3], "a forward still runs"
    run(adapter, 3)
    assert seqs(adapter.decided) == [4, 5]
    assert all(each.outcome is not None and "a:2 failed" in each.outcome.error.message for each in adapter.decided)
    assert seqs(adapter.ready_passes()) == [6]
    assert adapter.must_drop_gradient


def test_a_load_opens_a_closed_window_and_closes_an_open_one_if_it_fails() -> None:
    for fails in (False, True):
        adapter = adapter_with(FB, LOAD, FB, STEP)
        run(adapter, 1, 2, fail=[2] if fails else [1])
        assert seqs(adapter.decided) == ([3, 4] if fails else [])


def test_a_copy_that_is_lost_is_rebuilt_from_what_changed_state() -> None:
    adapter = adapter_with(FB, FORWARD, FB, STEP, FB, STEP, SAVE, FB)
    run(adapter, 1, 2, 3, 4, 5, fail=[5])
    assert adapter.operations[6].is_failed
    run(adapter, 7)
    adapter.placed("w1")
    adapter.settle()
    assert adapter.is_replaying
    replayed = []
    while adapter.is_replaying:
        [first, *_] = [*adapter.ready_passes(), *adapter.ready_states()]
        replayed.append(first.seq)
        adapter.ran(first)
        adapter.settle()
    assert replayed == [1, 3, 4]
    assert adapter.placed_seq == 4
    assert seqs(adapter.ready_passes()) == [8]
    assert adapter.must_drop_gradient


def test_a_lost_copy_forgets_the_chunks_that_ran_on_it() -> None:
    adapter = adapter_with(FB)
    one = adapter.operations[1]
    one.next_chunk, one.is_running = 1, True
    adapter.lose_copy()
    assert (one.next_chunk, one.is_running, one.parts) == (0, False, [])


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
        ((FB, STEP), (2,), False),  # the gradient of a step that failed is dropped
    ],
)
def test_a_gradient_is_pending_from_a_pass_to_the_next_step_or_load(
    kinds: tuple[Kind, ...], failing: tuple[int, ...], is_pending: bool
) -> None:
    adapter = adapter_with(*kinds)
    run(adapter, *range(1, len(kinds) + 1), fail=failing)
    assert adapter.has_pending_gradient is is_pending


def test_an_append_that_fails_leaves_no_hole_for_the_next_place_that_the_server_gives() -> None:
    adapter = adapter_with(FB, STEP)
    for kind in (FB, STEP):
        adapter.add(operation(adapter.next_seq, kind))
    for seq in (3, 4):
        adapter.retract(adapter.operations[seq])
    assert adapter.next_seq == 3
    adapter.add(operation(9, FB))
    adapter.retract(adapter.operations[9])
    assert adapter.next_seq == 3


def test_retracting_what_a_worker_may_have_seen_gives_up_its_copy() -> None:
    adapter = adapter_with(FB, FB)
    adapter.placed("w0")
    run(adapter, 1)
    adapter.operations[2].is_running = True
    adapter.retract(adapter.operations[2])
    assert (adapter.worker_id, adapter.cursor) == ("", 0)


def test_a_snapshot_that_becomes_durable_after_its_copy_was_lost_is_where_the_order_goes_on() -> None:
    adapter = adapter_with(FB, STEP)
    adapter.placed("w0")
    run(adapter, 1, 2)
    adapter.lose_copy()
    adapter.covered(2, b"", 0.0)
    adapter.add(operation(3, FB))
    adapter.settle()
    assert adapter.missing_seq() is None
    assert seqs(adapter.ready_passes()) == [3]


def test_what_a_snapshot_covers_leaves_memory_and_nothing_else() -> None:
    adapter = adapter_with(FB, STEP, FB)
    run(adapter, 1, 2)
    adapter.covered(2, b"", 0.0)
    assert list(adapter.operations) == [3]
    assert adapter.applied_seq == 2


def test_an_adapter_that_cannot_be_rebuilt_fails_all_it_is_asked_and_is_never_ready_to_run() -> None:
    adapter = adapter_with(FB, STEP, FB)
    run(adapter, 1, 2)
    adapter.give_up(ERROR)
    assert seqs(adapter.decided) == [3]
    adapter.decided.clear()
    assert not adapter.is_ready()
    adapter.add(operation(4, STEP))
    assert adapter.is_ready()
    assert seqs(adapter.decided) == [4]
    assert not list(adapter.ready_passes())
    assert not list(adapter.ready_states())
    assert adapter.missing_seq() is None


def test_the_bytes_of_a_window_are_counted_until_its_step_and_uncounted_when_retracted() -> None:
    adapter = adapter_with(FB, FB)
    assert adapter.window_bytes == 20
    adapter.retract(adapter.operations[2])
    assert adapter.window_bytes == 10
    adapter.add(operation(2, STEP))
    assert adapter.window_bytes == 0


def test_a_thousand_queued_operations_do_not_make_looking_slow() -> None:
    """Readiness looks at the head of the queue only."""
    adapter = adapter_with(*[FB] * 10_000)
    looked: list[int] = []
    operations = adapter.operations

    class Counting(dict[int, Operation]):
        def get(self, key: int, default: object = None) -> Operation | None:  # type: ignore[override]
            looked.append(key)
            return operations.get(key)

    adapter.operations = Counting(operations)
    assert adapter.is_ready()
    assert adapter.missing_seq() is None
    adapter.settle()
    assert not adapter.is_replaying
    assert len(looked) < 20


@given(
    st.lists(st.sampled_from([FB, FORWARD, STEP, LOAD, SAVE]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["succeed", "fail", "lose", "suspect", "begin", "gap"]), max_size=12),
)
@example([FB, FB], ["begin", "fail"])
def test_an_adapter_is_ready_exactly_if_something_of_it_is(kinds: list[Kind], events: list[str]) -> None:
    adapter = adapter_with(*kinds)
    for event in events:
        adapter.settle()
        first = next(iter([*adapter.ready_passes(), *adapter.ready_states()]), None)
        match event:
            case "succeed" | "fail" if first is not None:
                run(adapter, first.seq, fail=(first.seq,) if event == "fail" else ())
            case "begin":
                for each in adapter.ready_passes():
                    each.is_running = True
            case "suspect" if first is not None:
                adapter.suspect(first.seq, first.seq + 1)
            case "lose":
                adapter.lose_copy()
            case "gap":
                adapter.operations.pop(max(adapter.operations, default=0), None)
        is_ready = adapter.is_ready()
        ready = [*adapter.decided, *adapter.ready_passes(), *adapter.ready_states()]
        assert is_ready is bool(ready)


def test_the_chunks_that_are_ready_are_those_of_the_ready_passes_from_where_the_copy_stands() -> None:
    adapter = adapter_with(FB, FORWARD, STEP, FB)
    adapter.operations[1].chunks = (Chunk(0, 1, 4), Chunk(1, 2, 5))
    assert list(ReadyChunks(adapter)) == [4, 5, 4]
    adapter.operations[1].next_chunk = 1
    assert list(ReadyChunks(adapter)) == [5, 4]


def test_copies_are_counted_where_they_live() -> None:
    one, other = adapter_with(FB), adapter_with(FB)
    other.residents = one.residents
    one.placed("w0")
    other.placed("w0")
    one.placed("w1")
    assert dict(one.residents) == {"w0": 1, "w1": 1}
    one.lose_copy()
    one.lose_copy()
    assert (one.residents["w0"], one.residents["w1"]) == (1, 0)

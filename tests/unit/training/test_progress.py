"""Progress of an adapter's copy on a worker: fences, chunks, failures and gradient windows."""

from __future__ import annotations

import pytest

from workers.contract.gradient_windows import GradientWindow
from workers.contract.messages import (
    UNMARKED,
    AdamParams,
    AdapterState,
    ErrorCode,
    ItemError,
    LoadItem,
    OptimStepItem,
    PassItem,
    RequestBatch,
    SaveItem,
)
from workers.training.progress import Progress

FAILURE = ItemError(code=ErrorCode.NON_FINITE, message="it overflowed")


def a_pass(
    seq: int,
    chunk: int = 0,
    num_chunks: int = 1,
    *,
    backward: bool = True,
    drop: bool = False,
    batch: RequestBatch = UNMARKED,
) -> PassItem:
    return PassItem(
        op_id="",
        adapter_id="a",
        prev_seq=seq - 1,
        seq=seq,
        drop_gradient=drop,
        chunk_index=chunk,
        num_chunks=num_chunks,
        data=(),
        loss_fn="",
        loss_config={},
        backward=backward,
        batch=batch,
    )


def a_step(seq: int, *, drop: bool = False) -> OptimStepItem:
    fields = {"op_id": "", "adapter_id": "a", "prev_seq": seq - 1, "seq": seq}
    return OptimStepItem(**fields, drop_gradient=drop, params=AdamParams())  # type: ignore[arg-type]


def done(progress: Progress, item: PassItem) -> None:
    assert progress.admit(item) is None
    assert progress.settle(item, None) is None


def failed(progress: Progress, item: PassItem) -> None:
    assert progress.admit(item) is None
    assert progress.settle(item, FAILURE) == FAILURE


def code(error: ItemError | None) -> ErrorCode | None:
    return None if error is None else error.code


def test_items_in_order_advance_the_copy() -> None:
    progress = Progress()
    done(progress, a_pass(1))
    assert progress.admit(a_step(2)) is None
    assert progress.applied_seq == 2


@pytest.mark.parametrize("seq", [1, 3, 7])
def test_item_at_another_seq_is_out_of_order_and_changes_nothing(seq: int) -> None:
    progress = Progress(applied_seq=1)
    before = repr(progress)
    for item in (a_pass(seq), a_step(seq)):
        assert code(progress.admit(item)) == ErrorCode.OUT_OF_ORDER
        assert repr(progress) == before


def test_chunks_run_in_order_once_each_and_the_seq_is_applied_with_the_last() -> None:
    progress = Progress()
    assert code(progress.admit(a_pass(1, 1, 3))) == ErrorCode.OUT_OF_ORDER
    done(progress, a_pass(1, 0, 3))
    assert progress.applied_seq == 0
    for wrong in (a_pass(1, 0, 3), a_pass(1, 2, 3), a_step(1), a_pass(2), a_pass(1)):
        assert code(progress.admit(wrong)) == ErrorCode.OUT_OF_ORDER
    done(progress, a_pass(1, 1, 3))
    done(progress, a_pass(1, 2, 3))
    assert progress.applied_seq == 1


def test_failed_chunk_consumes_the_seq_and_later_chunks_have_the_same_error() -> None:
    progress = Progress()
    first, second, third = (a_pass(1, chunk, 3) for chunk in range(3))
    for item in (first, second):
        assert progress.admit(item) is None
    assert progress.settle(first, None) is None
    assert progress.settle(second, FAILURE) == FAILURE
    assert progress.applied_seq == 1
    assert progress.admit(third) == FAILURE
    assert progress.applied_seq == 1


def test_chunk_that_ran_with_a_failed_one_has_the_same_error() -> None:
    progress = Progress()
    items = [a_pass(1, chunk, 3) for chunk in range(3)]
    assert [progress.admit(item) for item in items] == [None] * 3
    assert [progress.settle(item, FAILURE if i == 0 else None) for i, item in enumerate(items)] == [FAILURE] * 3


def test_failed_pass_closes_the_window_up_to_the_next_step() -> None:
    progress = Progress()
    failing, neighbour = a_pass(1), a_pass(2)
    assert progress.admit(failing) is None
    assert progress.admit(neighbour) is None
    assert progress.settle(failing, FAILURE) == FAILURE
    error = progress.settle(neighbour, None)
    assert error is not None
    assert FAILURE.message in error.message
    assert code(progress.admit(a_pass(3))) == FAILURE.code
    done(progress, a_pass(4, backward=False))
    assert code(progress.admit(a_step(5))) == FAILURE.code
    assert progress.num_datums == 0
    done(progress, a_pass(6))
    assert progress.admit(a_step(7)) is None
    assert progress.applied_seq == 7


def test_failed_forward_closes_no_window() -> None:
    progress = Progress()
    failed(progress, a_pass(1, backward=False))
    done(progress, a_pass(2))
    assert progress.admit(a_step(3)) is None


def test_drop_gradient_and_load_open_a_new_window() -> None:
    state = AdapterState(weights=b"", optimizer=None, num_steps=0, applied_seq=0, fingerprint="")
    load = LoadItem(op_id="", adapter_id="a", prev_seq=1, seq=2, state=state, with_optimizer=False)
    for opener in (a_pass(2, drop=True), a_step(2, drop=True), load):
        progress = Progress()
        failed(progress, a_pass(1))
        assert progress.admit(opener) is None


def test_failed_load_closes_the_window() -> None:
    state = AdapterState(weights=b"", optimizer=None, num_steps=0, applied_seq=0, fingerprint="")
    load = LoadItem(op_id="", adapter_id="a", prev_seq=0, seq=1, state=state, with_optimizer=False)
    progress = Progress()
    assert progress.admit(load) is None
    progress.fail(load, FAILURE)
    done(progress, a_pass(2, backward=False))
    assert code(progress.admit(a_pass(3))) == FAILURE.code
    done(progress, a_pass(4, drop=True))


def test_step_ends_a_window_whether_it_succeeds_or_fails() -> None:
    for is_failing in (False, True):
        progress = Progress()
        done(progress, a_pass(1))
        assert progress.admit(a_step(2)) is None
        if is_failing:
            progress.fail(a_step(2), FAILURE)
        else:
            assert progress.stepped() == 0
        done(progress, a_pass(3))


def test_save_runs_in_a_closed_window_and_at_the_current_seq() -> None:
    progress = Progress()
    failed(progress, a_pass(1))
    assert progress.admit(SaveItem(op_id="", adapter_id="a", prev_seq=1, seq=1, with_optimizer=True)) is None
    assert progress.admit(SaveItem(op_id="", adapter_id="a", prev_seq=1, seq=2, with_optimizer=True)) is None
    assert progress.applied_seq == 2


B, C = RequestBatch(1, 2), RequestBatch(3, 3)


def test_a_failed_batch_fails_its_rest_and_a_step_and_the_next_batch_begins_a_new_window() -> None:
    for behind in (a_pass(3, batch=C), a_step(3)):
        progress = Progress()
        failed(progress, a_pass(1, batch=B))
        assert code(progress.admit(a_pass(2, batch=B))) == FAILURE.code
        if isinstance(behind, PassItem):
            done(progress, behind)
            assert progress.window == GradientWindow(None, C)
        else:
            assert code(progress.admit(behind)) == FAILURE.code


def test_a_batch_that_ran_beside_a_failed_one_must_run_again_and_the_rest_of_the_failed_one_fails() -> None:
    progress = Progress()
    items = [a_pass(1, batch=B), a_pass(2, batch=B), a_pass(3, 0, 2, batch=C), a_pass(3, 1, 2, batch=C)]
    assert [progress.admit(item) for item in items] == [None] * 4
    assert not progress.must_run_again(items[0])
    assert progress.settle(items[0], FAILURE) == FAILURE
    assert not progress.must_run_again(items[1])
    assert code(progress.settle(items[1], None)) == FAILURE.code
    assert progress.must_run_again(items[2])
    assert not progress.must_run_again(items[2]), "its window has begun"
    assert [progress.settle(item, None) for item in items[2:]] == [None] * 2
    assert progress.admit(a_step(4)) is None


def test_no_pass_runs_again_in_a_window_that_had_other_gradient() -> None:
    progress = Progress()
    done(progress, a_pass(1, batch=RequestBatch(1, 1)))
    items = [a_pass(2, batch=RequestBatch(2, 2)), a_pass(3, batch=C)]
    assert [progress.admit(item) for item in items] == [None] * 2
    progress.settle(items[0], FAILURE)
    assert not progress.must_run_again(items[1])
    assert code(progress.settle(items[1], None)) == FAILURE.code
    assert code(progress.admit(a_step(4))) == FAILURE.code


@pytest.mark.parametrize(("held", "is_open"), [(B, True), (None, True), (UNMARKED, False), (RequestBatch(0, 0), False)])
def test_an_installed_gradient_belongs_to_the_batch_that_the_install_names(
    held: RequestBatch | None, is_open: bool
) -> None:
    state = AdapterState(weights=b"", optimizer=None, num_steps=0, applied_seq=1, fingerprint="", gradient=b"")
    progress = Progress.of(state, held)
    failed(progress, a_pass(2, batch=B))
    assert (progress.admit(a_pass(3, batch=C)) is None) is is_open

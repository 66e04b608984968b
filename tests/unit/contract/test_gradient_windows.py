"""The definition of gradient windows: row by row, and against a plain model of the rule."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.contract.gradient_windows import EMPTY, GradientWindow, WindowRole
from workers.contract.messages import UNMARKED, RequestBatch

NONE, ADD, STEP, RESET, DISCARD = WindowRole
B, C = RequestBatch(1, 3), RequestBatch(4, 4)


def closed(batch: RequestBatch) -> GradientWindow[str]:
    return GradientWindow("first", batch)


@pytest.mark.parametrize(
    ("role", "is_forbidden", "open_and_succeeded", "open_and_failed", "closed_and_failed"),
    [
        (NONE, False, EMPTY, EMPTY, closed(UNMARKED)),
        (ADD, True, GradientWindow(None, UNMARKED), GradientWindow("second", UNMARKED), closed(UNMARKED)),
        (STEP, True, EMPTY, EMPTY, EMPTY),
        (RESET, False, EMPTY, GradientWindow("second", UNMARKED), closed(UNMARKED)),
        (DISCARD, False, EMPTY, GradientWindow("second", UNMARKED), closed(UNMARKED)),
    ],
)
def test_an_operation_opens_keeps_or_closes_its_window(
    role: WindowRole,
    is_forbidden: bool,
    open_and_succeeded: GradientWindow[str],
    open_and_failed: GradientWindow[str],
    closed_and_failed: GradientWindow[str],
) -> None:
    window: GradientWindow[str] = EMPTY
    assert closed(UNMARKED).forbids(role, 5) is is_forbidden
    assert not window.forbids(role, 5)
    assert window.after(role, 5, None) == open_and_succeeded
    assert window.after(role, 5, "second") == open_and_failed
    assert closed(UNMARKED).after(role, 5, "second") == closed_and_failed
    assert role.leaves_gradient(has_failed=True) is (role is not NONE)
    assert role.leaves_gradient(has_failed=False) is (role is DISCARD), "no worker runs a discard"


@pytest.mark.parametrize("role", [RESET, DISCARD])
@pytest.mark.parametrize("batch", [UNMARKED, B])
def test_a_load_and_a_discard_open_a_closed_window(role: WindowRole, batch: RequestBatch) -> None:
    assert closed(batch).after(role, 5, None) == EMPTY


def test_a_failed_batch_is_closed_to_its_rest_and_to_a_step_but_not_to_the_next_batch() -> None:
    window: GradientWindow[str] = EMPTY
    window = window.after(ADD, 1, None, B).after(ADD, 2, "first", B)
    assert window == closed(B)
    assert [window.forbids(ADD, seq) for seq in (3, 4, 9)] == [True, False, False]
    assert [window.forbids(STEP, seq) for seq in (3, 4, 9)] == [True] * 3
    assert window.after(ADD, 3, "second", B) == window
    assert window.after(NONE, 4, None) == window, "a forward behind the batch begins no window"
    assert window.after(ADD, 4, None, C) == GradientWindow(None, C)
    assert window.after(ADD, 4, None) == GradientWindow(None, UNMARKED)
    assert window.after(ADD, 4, "second", C) == GradientWindow("second", C)
    assert window.after(STEP, 4, "second") == EMPTY


def test_a_failed_batch_in_a_window_with_other_gradient_closes_it_up_to_the_step() -> None:
    windows: list[GradientWindow[str]] = [GradientWindow(None, B), GradientWindow(None, UNMARKED)]
    for window in windows:
        after = window.after(ADD, 4, "first", C)
        assert after == closed(UNMARKED)
        assert after.forbids(ADD, 5)


def test_another_batch_within_the_seqs_of_a_failed_one_shows_wrong_marks_and_closes_the_window_up_to_the_step() -> None:
    for other in (UNMARKED, RequestBatch(3, 5)):
        assert closed(B).after(ADD, 3, "second", other) == closed(UNMARKED)


@dataclass
class PlainWindow:
    """The rule again, in sets: everything that has tried to add gradient since the window began."""

    batches: set[RequestBatch] = field(default_factory=set)
    first_failure: str | None = None

    def is_over(self, seq: int) -> bool:
        if self.first_failure is None or UNMARKED in self.batches or len(self.batches) > 1:
            return False
        [only] = self.batches
        return seq > only.last_seq

    def forbids(self, role: WindowRole, seq: int) -> bool:
        return self.first_failure is not None and (role is STEP or (role is ADD and not self.is_over(seq)))

    def apply(self, role: WindowRole, seq: int, failure: str | None, batch: RequestBatch) -> None:
        ends = role is STEP or (role in (RESET, DISCARD) and failure is None)
        if ends or (role is ADD and self.is_over(seq)):
            self.batches, self.first_failure = set(), None
        if role is ADD:
            self.batches.add(batch)
        if role in (RESET, DISCARD) and failure is not None:
            self.batches.add(UNMARKED)
        if role in (ADD, RESET, DISCARD):
            self.first_failure = self.first_failure or failure


marks = st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3)))
"""None: unmarked; otherwise how many seqs before and behind an operation its batch has."""


@given(st.lists(st.tuples(st.sampled_from(list(WindowRole)), marks, st.booleans()), max_size=14))
def test_a_window_is_closed_exactly_when_a_plain_model_says_so(
    operations: list[tuple[WindowRole, tuple[int, int] | None, bool]],
) -> None:
    window: GradientWindow[str] = EMPTY
    plain = PlainWindow()
    for seq, (role, mark, fails) in enumerate(operations, 1):
        for each in WindowRole:
            assert window.forbids(each, seq) is plain.forbids(each, seq)
        batch = UNMARKED if mark is None else RequestBatch(max(1, seq - mark[0]), seq + mark[1])
        failure = f"{seq}" if fails or plain.forbids(role, seq) else None
        window = window.after(role, seq, failure, batch)
        plain.apply(role, seq, failure, batch)
        assert window.closed_by == plain.first_failure
        assert window.has_gradient is (plain.first_failure is None and bool(plain.batches))

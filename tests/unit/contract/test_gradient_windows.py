"""The definition of gradient windows, row by row."""

from __future__ import annotations

import pytest

from workers.contract.gradient_windows import WindowRole


@pytest.mark.parametrize(
    ("role", "needs_open", "open_and_succeeded", "open_and_failed", "closed_and_failed"),
    [
        (WindowRole.NONE, False, None, None, "first"),
        (WindowRole.ADD, True, None, "second", "first"),
        (WindowRole.STEP, True, None, None, None),
        (WindowRole.RESET, False, None, "second", "first"),
        (WindowRole.DISCARD, False, None, "second", "first"),
    ],
)
def test_an_operation_opens_keeps_or_closes_its_window(
    role: WindowRole,
    needs_open: bool,
    open_and_succeeded: str | None,
    open_and_failed: str | None,
    closed_and_failed: str | None,
) -> None:
    assert role.needs_open_window is needs_open
    assert role.closed_by(None, None) == open_and_succeeded
    assert role.closed_by(None, "second") == open_and_failed
    assert role.closed_by("first", "second") == closed_and_failed
    assert role.leaves_gradient(has_failed=True) is (role is not WindowRole.NONE)
    assert role.leaves_gradient(has_failed=False) is (role is WindowRole.DISCARD), "no worker runs a discard"


@pytest.mark.parametrize("role", [WindowRole.RESET, WindowRole.DISCARD])
def test_a_load_and_a_discard_open_a_closed_window(role: WindowRole) -> None:
    assert role.closed_by("first", None) is None

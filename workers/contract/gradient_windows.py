"""Gradient windows: which operation of an adapter opens, uses and closes the window, and which fail in a closed one.

A gradient window holds the gradient that passes add up to the next optimizer step. A closed window holds none: it keeps
the failure that closed it, and every operation that needs an open window fails and names that failure. A step always
ends the window, whatever its outcome, so that the next one begins open and empty.

    operation           in an open window        in a closed window       if it fails itself
    forward, saves      runs                     runs                     the window stays as it is
    forward_backward    adds gradient            fails                    the window closes
    optim_step          uses the gradient up     fails                    the next window begins
    load_state          drops the gradient       opens the window         the window closes
    discard_gradient    drops the gradient       opens the window         the window closes

Main invariant: the rule is defined once, here. The coordinator's adapter log sends no operation that needs an open
window while the window is closed, and the worker's fence applies none.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from workers.contract.messages import Item, LoadItem, OptimStepItem, PassItem

F = TypeVar("F")
"""A failure, in the caller's own form."""


class WindowRole(Enum):
    """The effect of an operation on its adapter's gradient window."""

    NONE = "none"
    """Forward, saves: none."""
    ADD = "add"
    """Forward_backward: adds gradient."""
    STEP = "step"
    """Optim_step: ends the window."""
    RESET = "reset"
    """Load_state: drops the gradient and opens a window."""
    DISCARD = "discard"
    """Discard_gradient: drops the gradient and opens a window. No worker runs it: the next item carries the drop."""

    @property
    def needs_open_window(self) -> bool:
        """Whether the operation fails in a closed window."""
        return self in (WindowRole.ADD, WindowRole.STEP)

    def closed_by(self, before: F | None, failure: F | None) -> F | None:
        """Return the failure that closes the window after an operation of this role; None: the window is open.

        `before` is the failure that closed it before, `failure` that of the operation itself, None if it succeeded.
        """
        match self:
            case WindowRole.NONE:
                return before
            case WindowRole.ADD:
                return before or failure
            case WindowRole.STEP:
                return None
            case WindowRole.RESET | WindowRole.DISCARD:
                return None if failure is None else before or failure

    def leaves_gradient(self, *, has_failed: bool) -> bool:
        """Return whether a copy may hold gradient of an ended or closed window, to be dropped before the next item."""
        return self is WindowRole.DISCARD or (has_failed and self is not WindowRole.NONE)


def role_of(item: Item) -> WindowRole:
    """Return the role of a worker's item."""
    match item:
        case PassItem():
            return WindowRole.ADD if item.backward else WindowRole.NONE
        case OptimStepItem():
            return WindowRole.STEP
        case LoadItem():
            return WindowRole.RESET
    return WindowRole.NONE

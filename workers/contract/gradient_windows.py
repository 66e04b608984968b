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

How long it stays closed depends on what it held. A client may mark the forward_backwards of one batch. If one of them
fails, and the window held nothing but that batch, then the rest of the batch fails too, and so does a step behind it;
but a forward_backward behind the batch begins a new window at once, because nothing of the failed batch can be in it.
Otherwise the window stays closed up to the next step, load or discard: without a mark nobody could tell half a batch
from a whole one, and a window with gradient of several batches has lost some of them.

Main invariant: the rule is defined once, here, and both sides apply it to the same operations in the same order. The
coordinator's adapter log sends no operation that needs an open window while the window is closed, and the worker's
fence applies none. In between, when the operations behind a failure are on a worker already, both decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from workers.contract.messages import UNMARKED, Item, LoadItem, OptimStepItem, PassItem, RequestBatch

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

    def leaves_gradient(self, *, has_failed: bool) -> bool:
        """Return whether a copy may hold gradient of an ended or closed window, to be dropped before the next item."""
        return self is WindowRole.DISCARD or (has_failed and self is not WindowRole.NONE)


@dataclass(frozen=True, slots=True)
class GradientWindow(Generic[F]):
    """An adapter's gradient window between two of its operations."""

    closed_by: F | None = None
    """The failure that closed it; None: it is open."""
    batch: RequestBatch | None = None
    """Open: the batch whose gradient it holds, UNMARKED also for several batches; None: it is empty.

    Closed: never None; the batch up to whose last request it stays closed; UNMARKED: up to the next step, load or
    discard.
    """

    @property
    def has_gradient(self) -> bool:
        """Whether gradient is pending."""
        return self.closed_by is None and self.batch is not None

    def is_behind(self, seq: int) -> bool:
        """Return whether a forward_backward at `seq` is behind the batch that closed this window: it begins another."""
        return self.closed_by is not None and self.batch is not None and seq > self.batch.last_seq

    def forbids(self, role: WindowRole, seq: int) -> bool:
        """Return whether an operation fails because this window is closed."""
        if self.closed_by is None:
            return False
        return role is WindowRole.STEP or (role is WindowRole.ADD and not self.is_behind(seq))

    def after(self, role: WindowRole, seq: int, failure: F | None, batch: RequestBatch = UNMARKED) -> GradientWindow[F]:
        """Return the window after an operation; `failure` is None if it succeeded, `batch` the one that it is part of.

        An operation that is forbidden here must have failed.
        """
        match role:
            case WindowRole.ADD:
                return self._after_gradient(seq, failure, batch)
            case WindowRole.NONE:
                return self
            case WindowRole.STEP:
                return EMPTY
        if failure is None:
            return EMPTY
        return GradientWindow(failure if self.closed_by is None else self.closed_by, UNMARKED)

    def _after_gradient(self, seq: int, failure: F | None, batch: RequestBatch) -> GradientWindow[F]:
        before: GradientWindow[F] = EMPTY if self.is_behind(seq) else self
        closed_by = failure if before.closed_by is None else before.closed_by
        if before.batch == batch and before.closed_by is closed_by:
            return before
        return GradientWindow(closed_by, batch if before.batch is None or before.batch == batch else UNMARKED)


EMPTY: GradientWindow[Any] = GradientWindow()
"""An open window without gradient."""


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


def batch_of(item: Item) -> RequestBatch:
    """Return the batch that a worker's item is part of."""
    return item.batch if isinstance(item, PassItem) else UNMARKED

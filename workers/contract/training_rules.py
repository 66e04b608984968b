"""The rules of training operations that coordinator and worker both enforce: the inputs of losses, gradient windows.

Losses: names, defaults and shapes of their inputs and options, no formulas (`workers.training.losses`) and no arrays.

A gradient window holds the gradient that passes add up to the next optimizer step. A closed window holds none: it keeps
the failure that closed it, and every operation that needs an open window fails and names that failure. A step always
ends the window, whatever its outcome, so that the next one begins open and empty.

    operation           in an open window        in a closed window       if it fails itself
    forward, saves      runs                     runs                     the window stays as it is
    forward_backward    adds gradient            fails                    the window closes
    optim_step          uses the gradient up     fails                    the next window begins
    load_state          drops the gradient       opens the window         the window closes

Main invariant: each rule is defined once, here. Admission checks a datum's inputs and the worker checks them again. The
coordinator's adapter log sends no operation that needs an open window while the window is closed, and the worker's
fence applies none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from workers.contract.messages import Item, LoadItem, OptimStepItem, PassItem


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """The inputs and options of one loss. Inputs but `target_tokens` are float32, in the shape of the targets."""

    required: frozenset[str]
    """Inputs that every datum of a request has."""
    optional: frozenset[str] = frozenset()
    """Inputs that all datums of a request have, or none."""
    filled: Mapping[str, float] = field(default_factory=dict)
    """Inputs that a request may leave out: its payload then has this value for every target, so that a worker always
    receives them."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of a request (`loss_config`), finite numbers, with their defaults."""
    allows_many_targets: bool = False
    """`target_tokens` may be (n, k): k targets of each token. Otherwise (n,)."""

    @property
    def inputs(self) -> frozenset[str]:
        """Return the names of all inputs that a request may have."""
        return self.required | self.optional | self.filled.keys()


_POLICY = frozenset({"target_tokens", "logprobs", "advantages"})
CLIP_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
"""Bounds of the probability ratio: as options for all tokens, or as inputs for each."""
_CLIP = frozenset(CLIP_BOUNDS)


def _bounds(low: float, high: float) -> Mapping[str, float]:
    return dict(zip(CLIP_BOUNDS, (low, high), strict=True))


LOSS_RULES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(required=frozenset({"target_tokens"}), filled={"weights": 1.0}, allows_many_targets=True),
    "importance_sampling": LossRule(required=_POLICY),
    "ppo": LossRule(required=_POLICY, optional=_CLIP, options=_bounds(0.8, 1.2)),
    "cispo": LossRule(required=_POLICY, optional=_CLIP, options=_bounds(0.0, 4.0)),
    "dro": LossRule(required=_POLICY, options={"beta": 0.05}),
    "gspo": LossRule(required=_POLICY, optional=_CLIP | {"sequence_ratio_mask"}, options=_bounds(1 - 3e-4, 1 + 4e-4)),
}
"""By name, in the order that the capabilities list."""
IGNORED_INPUT = "mask"
"""An input that training recipes send and no loss reads: admission drops it."""


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
            case WindowRole.RESET:
                return None if failure is None else before or failure

    def leaves_gradient(self, *, has_failed: bool) -> bool:
        """Return whether a copy may hold gradient of an ended or closed window, to be dropped before the next item."""
        return has_failed and self is not WindowRole.NONE


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

"""The inputs and options of each loss: names, defaults, shapes. No formulas (`workers.training.losses`), no arrays.

Main invariant: they are defined once, here. Admission checks a datum's inputs, and the worker checks them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    recorded: frozenset[str] = frozenset()
    """Inputs that admission takes from the records of the samples that a datum's spans name. What a request sends under
    these names is ignored."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Options of a request (`loss_config`), finite numbers, with their defaults."""
    allows_many_targets: bool = False
    """`target_tokens` may be (n, k): k targets of each token. Otherwise (n,)."""

    @property
    def inputs(self) -> frozenset[str]:
        """Return the names of all inputs that a request may have."""
        return self.required | self.optional | self.recorded | self.filled.keys()


_POLICY = frozenset({"target_tokens", "logprobs", "advantages"})
CLIP_BOUNDS = ("clip_low_threshold", "clip_high_threshold")
"""Bounds of the probability ratio: as options for all tokens, or as inputs for each."""
_CLIP = frozenset(CLIP_BOUNDS)
TEMPERATURES = "temperatures"
"""The temperature that each token was drawn at, for a loss whose p is at it too; 0: the token was not drawn."""


def _bounds(low: float, high: float) -> Mapping[str, float]:
    return dict(zip(CLIP_BOUNDS, (low, high), strict=True))


LOSS_RULES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(required=frozenset({"target_tokens"}), filled={"weights": 1.0}, allows_many_targets=True),
    "importance_sampling": LossRule(required=_POLICY),
    "ppo": LossRule(required=_POLICY, optional=_CLIP, options=_bounds(0.8, 1.2)),
    "cispo": LossRule(required=_POLICY, optional=_CLIP, options=_bounds(0.0, 4.0)),
    "dro": LossRule(required=_POLICY, options={"beta": 0.05}),
    "gspo": LossRule(required=_POLICY, optional=_CLIP | {"sequence_ratio_mask"}, options=_bounds(1 - 3e-4, 1 + 4e-4)),
    "stable_reinforce": LossRule(
        required=frozenset({"target_tokens", "advantages"}), recorded=frozenset({"logprobs", TEMPERATURES})
    ),
}
"""By name, in the order that the capabilities list."""
IGNORED_INPUT = "mask"
"""An input that training recipes send and no loss reads: admission drops it."""

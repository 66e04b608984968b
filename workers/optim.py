"""AdamW on one adapter's row, with that step's own hyperparameters: one fused call over contiguous vectors.

Knows vectors of numbers; not which adapter or model they belong to.

Main invariant: a step reads and writes one row alone, and its bits depend on that row's length and values alone. If the
gradient, or what the weights would become, is not finite, nothing is written: an adapter's state is always finite.

Dimensions: P values of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.bank import Row
from workers.messages import AdamParams


class NonFiniteStepError(ArithmeticError):
    """The gradient's norm or the new weights are infinite or not a number; no step was taken. Says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNorms:
    """Euclidean norms over all of an adapter's values."""

    gradient: float
    """Before clipping."""
    update: float
    """Of the change of the weights."""
    adapter: float
    """Of the weights after the step."""


def check_params(params: AdamParams) -> None:
    """Raise ValueError, naming the field, unless a step with these is defined."""
    checks = {
        "learning_rate": (params.learning_rate, params.learning_rate >= 0, "at least 0"),
        "beta1": (params.beta1, 0 <= params.beta1 < 1, "at least 0 and below 1"),
        "beta2": (params.beta2, 0 <= params.beta2 < 1, "at least 0 and below 1"),
        "eps": (params.eps, params.eps > 0, "above 0"),
        "weight_decay": (params.weight_decay, params.weight_decay >= 0, "at least 0"),
        "grad_clip_norm": (params.grad_clip_norm, params.grad_clip_norm >= 0, "at least 0"),
    }
    for name, (value, is_valid, expected) in checks.items():
        if not (is_valid and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; expected a finite number, {expected}")


@torch.no_grad()
def adamw_step(row: Row, params: AdamParams, num_steps: int) -> StepNorms:
    """Take one step in place and make the gradient zero. `num_steps` counts this step too (bias correction).

    Same definition as `torch.optim.AdamW` after `torch.nn.utils.clip_grad_norm_`. Raises NonFiniteStepError.
    """
    weights, gradient = row.weights, row.grad
    assert gradient is not None
    assert row.exp_avg is not None
    assert row.exp_avg_sq is not None
    norm = _norm(gradient)
    if not math.isfinite(norm):
        raise NonFiniteStepError(f"the gradient's norm is {norm}")
    if 0 < params.grad_clip_norm < norm:
        gradient.mul_(params.grad_clip_norm / (norm + 1e-6))
    state = (weights, row.exp_avg, row.exp_avg_sq)
    before = [vector.clone() for vector in state]
    torch._fused_adamw_(
        [weights],
        [gradient],
        [row.exp_avg],
        [row.exp_avg_sq],
        [],
        [torch.tensor(float(num_steps), device=weights.device)],
        amsgrad=False,
        lr=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        weight_decay=params.weight_decay,
        eps=params.eps,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
    adapter_norm = _norm(weights)
    if not math.isfinite(adapter_norm):
        for vector, old in zip(state, before, strict=True):
            vector.copy_(old)
        raise NonFiniteStepError(f"the norm of the weights would be {adapter_norm}")
    gradient.zero_()
    return StepNorms(gradient=norm, update=_norm(before[0].sub_(weights)), adapter=adapter_norm)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))

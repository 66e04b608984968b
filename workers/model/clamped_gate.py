"""The gate of gpt-oss's experts: clamped, and with a backward written by hand.

With gates g and others u, alternating, clamped to at most L, and to between -L and L:

    y = (u + 1) g sigmoid(a g)

Nothing but the inputs is kept for the backward, and what is outside of the limits has no gradient.

Does not depend on experts, or on models beyond names of attributes. An experts' module whose own gate gives other
numbers keeps it.

Dimensions: P rows, F inner size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HELD_VALUES = 2
"""Values that the forward holds for each of y, besides y: the clamped gate, and its product with the sigmoid."""
_TRIED = 256


class ClampedGate:
    """Applies the gate with a limit L and a factor a."""

    def __init__(self, limit: float, alpha: float) -> None:
        self.limit, self.alpha = limit, alpha

    def __call__(self, gates: Tensor) -> Tensor:
        """Return y (P, F) of gates and others (P, 2 F)."""
        if not torch.is_grad_enabled():
            return _forward(gates, self.limit, self.alpha)
        out: Tensor = _ClampedGateFunction.apply(gates, self.limit, self.alpha)  # type: ignore[no-untyped-call]
        return out


@torch.no_grad()
def gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return the gate of an experts' module of transformers: ours if it computes the same, or else its own."""
    theirs: Callable[[Tensor], Tensor] = experts._apply_gate
    limit, alpha = getattr(experts, "limit", None), getattr(experts, "alpha", None)
    if limit is None or alpha is None:
        return theirs
    ours = ClampedGate(float(limit), float(alpha))
    tried = torch.arange(2 * _TRIED).sin().mul_(2 * ours.limit)[None]
    return ours if torch.allclose(ours(tried), theirs(tried)) else theirs


def _forward(gates: Tensor, limit: float, alpha: float) -> Tensor:
    gate = gates[..., ::2].clamp(max=limit)
    glu = (gate * alpha).sigmoid_().mul_(gate)
    return gates[..., 1::2].clamp(-limit, limit).add_(1).mul_(glu)


class _ClampedGateFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gates)
        ctx.limit, ctx.alpha = limit, alpha
        return _forward(gates, limit, alpha)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # With s = sigmoid(a g):  dg = dy (u + 1) s (1 + a g (1 - s)),  du = dy g s.
        (gates,) = ctx.saved_tensors
        limit, alpha = ctx.limit, ctx.alpha
        dgates = torch.empty_like(gates)
        dgate, dup = dgates[..., ::2], dgates[..., 1::2]
        gate = gates[..., ::2].clamp(max=limit)
        sigmoid = (gate * alpha).sigmoid_()
        torch.mul(gate, sigmoid, out=dup)
        dup.mul_(dy).masked_fill_(gates[..., 1::2].abs() > limit, 0)
        slope = gate.mul_(alpha).mul_(1 - sigmoid).add_(1).mul_(sigmoid)
        torch.mul(gates[..., 1::2].clamp(-limit, limit).add_(1).mul_(dy), slope, out=dgate)
        dgate.masked_fill_(gates[..., ::2] > limit, 0)
        return dgates, None, None

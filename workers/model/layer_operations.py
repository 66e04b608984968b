"""The elementwise chains of a decoder layer on a GPU, most for training, by kernels of our own: one launch each way.

Heads of joined projections are normalised and rotated (ten launches of torch each way), a gate is applied (two, and
four backward), and the gradient of a norm is added to that of the path around it (two). Nothing between is written to
memory: a backward computes it again. `rotated_heads` keeps its projections, if there are norms. Where adapters are
added around the gate, it is applied in their kernels instead (`gate_kernels`).

Defining the operations imports no Triton (`gpu_operations`). Does not depend on models, passes or attention.

Main invariant: a row's result, and its gradient, depend on that row only.

Dimensions: T rows of the pass, H query heads, K key-value heads, E head dimension (rotated in halves), F features of
the gate, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.model.fused_modules import HeadNorms
from workers.model.gpu_operations import define, dense

ROTATE_HEADS = (
    "rotate_heads(Tensor(a!) out, Tensor projected, Tensor cos, Tensor sin, "
    "Tensor? query_weight, Tensor? key_weight, float eps, int num_heads)"
)
"""Set out (T, H + K, E) to the queries and keys of projected (T, (H + 2 K) E), rotated by cos and sin (T, E).

Heads are normalised first if weights (E,) are given. All but projected, whose rows may have gaps, is contiguous.
"""
ROTATE_HEADS_BACKWARD = (
    "rotate_heads_backward(Tensor(a!) dprojected, Tensor dquery, Tensor dkey, Tensor dvalue, Tensor? projected, "
    "Tensor cos, Tensor sin, Tensor? query_weight, Tensor? key_weight, float eps)"
)
"""Set dprojected (T, (H + 2 K) E) from dquery (T, H, E), dkey and dvalue (T, K, E), whose rows and heads may have gaps.

`projected` is needed with weights alone. The others as in `ROTATE_HEADS`.
"""
GATE = "gate(Tensor(a!) out, Tensor gate_up)"
"""Set out (T, F) to silu(gate) * up of gate_up (T, 2 F), whose rows may have gaps."""
GATE_BACKWARD = "gate_backward(Tensor(a!) dgate_up, Tensor dout, Tensor gate_up)"
"""Set dgate_up (T, 2 F) from dout (T, F) and gate_up, whose rows may have gaps."""
ADD_NORM = (
    "add_norm(Tensor(a!) total, Tensor(b!) normalised, Tensor(c!) inverse, Tensor hidden, Tensor added, Tensor weight, "
    "float eps)"
)
"""Set total (T, D) to hidden + added, normalised (T, D) to its RMS normalisation, and inverse (T,), fp32, to 1 / rms.

Of total as it is rounded; weight (D,) is the norm's. Rows of hidden and added may have gaps.
"""
NORM_ADD_BACKWARD = (
    "norm_add_backward(Tensor(a!) dhidden, Tensor dnormalised, Tensor hidden, Tensor inverse, Tensor weight)"
)
"""Add to dhidden (T, D) what hidden (T, D) gets from dnormalised (T, D), the gradient of its RMS normalisation.

So dhidden comes with the gradient of the residual path, and goes with the sum of both paths. `inverse` (T,), fp32, and
weight (D,) as in `ADD_NORM`. Rows of the others may have gaps.
"""
define(
    "workers.model.layer_kernels", ROTATE_HEADS, ROTATE_HEADS_BACKWARD, GATE, GATE_BACKWARD, ADD_NORM, NORM_ADD_BACKWARD
)


class _RotatedHeads(torch.autograd.Function):
    """See `rotated_heads`."""

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, num_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = projected.unflatten(1, (-1, cos.shape[1]))  # (T, H + 2 K, E)
        num_rotated = (num_heads + heads.shape[1]) // 2
        out = torch.empty_like(heads[:, :num_rotated], memory_format=torch.contiguous_format)
        ctx.save_for_backward(None if norms is None else projected, cos, sin)
        ctx.norms = (None, None, 0.0) if norms is None else (norms.query, norms.key, norms.eps)
        torch.ops.tinkerpool.rotate_heads(out, projected, cos, sin, *ctx.norms, num_heads)
        return out[:, :num_heads], out[:, num_heads:], heads[:, num_rotated:]

    @staticmethod
    def backward(ctx: Any, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradients = [dense(rows) for rows in (dquery, dkey, dvalue)]
        num_rows, num_heads, head_dim = dquery.shape
        dprojected = dquery.new_empty(num_rows, (num_heads + 2 * dkey.shape[1]) * head_dim)
        torch.ops.tinkerpool.rotate_heads_backward(dprojected, *gradients, *ctx.saved_tensors, *ctx.norms)
        return dprojected, None, None, None, None


def rotated_heads(
    projected: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries (T, H, E), keys and values (T, K, E) of projected (T, (H + 2 K) E); H is `num_heads`.

    Queries and keys are normalised per head if there are norms, and rotated by cos and sin (T, E). Values are a view.
    """
    heads: tuple[Tensor, Tensor, Tensor] = _RotatedHeads.apply(projected, cos, sin, norms, num_heads)  # type: ignore[no-untyped-call]
    return heads


def gated(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (T, F) of gate_up (T, 2 F). Autograd does not see it."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    torch.ops.tinkerpool.gate(out, gate_up)
    return out


class _AddNorm(torch.autograd.Function):
    """See `add_norm`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normalised = torch.empty_like(hidden), torch.empty_like(hidden)
        inverse = hidden.new_empty(len(hidden), dtype=torch.float32)
        torch.ops.tinkerpool.add_norm(total, normalised, inverse, hidden, added, weight, eps)
        ctx.save_for_backward(total, inverse, weight)
        ctx.set_materialize_grads(False)
        return total, normalised

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dnormalised: Tensor | None) -> tuple[Tensor | None, ...]:
        total, inverse, weight = ctx.saved_tensors
        dhidden = torch.zeros_like(total) if dtotal is None else dense(dtotal)
        if dnormalised is not None:
            torch.ops.tinkerpool.norm_add_backward(dhidden, dense(dnormalised), total, inverse, weight)
        return dhidden, dhidden, None, None


def add_norm(hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return hidden + added (T, D) and its RMS normalisation (T, D) with a weight (D,).

    The backward writes to the gradient of the sum, which becomes that of both parts. So a caller whose sum and whose
    part have the same gradient must be done with the part's first.
    """
    both: tuple[Tensor, Tensor] = _AddNorm.apply(hidden, added, weight, eps)  # type: ignore[no-untyped-call]
    return both

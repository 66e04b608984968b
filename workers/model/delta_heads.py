"""The heads of linear attention on a GPU, by kernels of our own: one launch each way for queries, keys or values.

By operations of torch a convolution goes through memory for each of its weights, then SiLU, the length of a head and
its transposition do. The kernels read each value once in the model's dtype, and write heads as the rule takes them
(`delta_rule.Convolve`); the backward reads the rows again instead of keeping what is between.

Defining the operations imports no Triton (`gpu_operations`). Does not depend on models or passes.

Main invariant: a chunk's heads, and their gradients, depend on that chunk only.

Dimensions: N chunks, C tokens of a chunk, W = 4 weights of a convolution, H heads of E values, K = H E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workers.model.delta_rule import DeltaShape
from workers.model.fused_runs import can_run
from workers.model.gpu_operations import define, dense

CONVOLVE = "convolve(Tensor(a!) heads, Tensor inputs, Tensor conv, float length)"
"""Set heads (N, H, C, E), fp32, to those of inputs (N, C + W - 1, K) and conv (W, K), fp32: see `delta_rule.Convolve`.

`length` 0: each head keeps its own. All but inputs, whose chunks and tokens may have gaps, is contiguous.
"""
CONVOLVE_BACKWARD = "convolve_backward(Tensor(a!) dinputs, Tensor dheads, Tensor inputs, Tensor conv, float length)"
"""Set dinputs (N, C + W - 1, K) from dheads (N, H, C, E), fp32, whose chunks, heads and tokens may have gaps.

The others as in `CONVOLVE`.
"""
define("workers.model.delta_head_kernels", CONVOLVE, CONVOLVE_BACKWARD)

TOKENS = 32
"""Of a program. More of them would read fewer rows twice, the three before its first token, and be fewer programs."""
HISTORY = 3
"""Tokens before a token that the kernels read: W - 1, as of every hybrid so far."""


def can_convolve(device: torch.device, dtype: torch.dtype, shape: DeltaShape) -> bool:
    """Return whether the kernels take the chunks of a model in this dtype on this device."""
    return can_run(device, dtype) and shape.history == HISTORY


class _Heads(torch.autograd.Function):
    """See `convolved_by_kernels`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, num_heads: int, length: float) -> Tensor:
        num_chunks, num_rows, width = rows.shape
        heads = weights.new_empty(num_chunks, num_heads, num_rows - HISTORY, width // num_heads)
        torch.ops.tinkerpool.convolve(heads, rows, weights, length)
        ctx.save_for_backward(rows, weights)
        ctx.length = length
        return heads

    @staticmethod
    def backward(ctx: Any, dheads: Tensor) -> tuple[Tensor, None, None, None]:
        rows, weights = ctx.saved_tensors
        drows = torch.empty_like(rows, memory_format=torch.contiguous_format)
        torch.ops.tinkerpool.convolve_backward(drows, dense(dheads), rows, weights, ctx.length)
        return drows, None, None, None


def convolved_by_kernels(rows: Tensor, weights: Tensor, num_heads: int, length: float | None) -> Tensor:
    """Implement `delta_rule.Convolve` for convolutions that `can_convolve` takes."""
    heads: Tensor = _Heads.apply(rows, weights, num_heads, length or 0.0)  # type: ignore[no-untyped-call]
    return heads

"""Trial of batching: whether segments of several adapters, computed as one batch, have the bits of each segment solo.

Depends on the segments' products in `model.lora`; not on the bank.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from workers.model.lora.products import backward_segments, forward_segments
from workers.model.lora.segments import Run
from workers.rows import AdapterViews, GroupViews
from workers.selftest.kernels import Kernel, is_large

BATCHED_SEGMENTS = 5


@torch.no_grad()
def can_batch_segments(weights: Iterable[Tensor], rows_min: int) -> bool:
    """Return whether segments computed as one batch have the bits of each segment solo, at any first row."""
    weights = list(weights)
    kernel = Kernel.of(weights[0])
    shapes = dict.fromkeys((weight.shape[0], weight.shape[1]) for weight in weights)
    return all(
        _batch_equals_singles(kernel, *shape, rank, length)
        for shape in shapes
        for rank in ((8,) if is_large(*shape) else (8, 32))
        for length in (rows_min, rows_min + 1, *(() if is_large(*shape) else (3 * rows_min + 5, 128)))
    )


@cache
def _batch_equals_singles(kernel: Kernel, d_out: int, d_in: int, rank: int, length: int) -> bool:
    aligned = -(-d_out // 16) * 16  # as logits are
    num = BATCHED_SEGMENTS
    x = kernel.values(num * length + 1, d_in)
    dy = kernel.values(num * length + 1, aligned)[:, :d_out]
    As, Bs = (kernel.values(num * rank, width).view(num, rank, width) for width in (d_in, aligned))
    adapters = [AdapterViews((), (), slot, 2.0) for slot in range(num)]

    def compute(start: int, segments: slice) -> list[Tensor]:
        """Return y, dx, dA, dB of some segments, whose rows begin at `start`."""
        run = Run(start, length, adapters[segments])
        B = Bs[segments, :, :d_out].squeeze(0)
        views = GroupViews(A=As[segments].squeeze(0), Bs=(B,), A_grad=None, B_grads=())
        y, dx = dy.clone(), x.clone()
        xa = forward_segments(run.rows(x), [run.rows(y)], views, 2.0)
        dA, (dB,) = backward_segments(run.rows(x), [run.rows(dy)], run.rows(dx), xa, views, 2.0)
        return [result.view(len(run.adapters), *result.shape[-2:]) for result in (run.rows(y), run.rows(dx), dA, dB)]

    for start in (0, 1):
        together = compute(start, slice(0, num))
        for slot in range(num):
            alone = compute(start + slot * length, slice(slot, slot + 1))
            if not all(torch.equal(whole[slot], part[0]) for whole, part in zip(together, alone, strict=True)):
                return False
    return True

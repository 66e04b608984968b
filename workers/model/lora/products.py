"""The small products of segments with their adapters, forward and backward.

For a row x of segment s:  y += scaling_s (x A_s^T) B_s^T.

Does not depend on passes, models or the bank.

Main invariant: a segment has the same bits as a matrix of its own or as one of a batch; `selftest.batch_invariance`
tries that.

Dimensions: N rows of a segment, S segments of a batch, D inputs, F outputs, R padded rank, G linears in a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.rows import GroupViews


def forward_segments(x: Tensor, ys: Sequence[Tensor], views: GroupViews, scaling: float) -> Tensor:
    """Add scaling x A_i^T B_i^T to ys[i] (N, F) in place; return the scaled x A^T (N, G * R).

    Or the same for S segments, with S as the first dimension of everything.
    """
    num_linears = len(ys)
    xa = x.new_empty(*x.shape[:-1], views.A.shape[-2])
    _multiply(xa, x, views.A.transpose(-2, -1), scaling)
    parts = (xa,) if num_linears == 1 else xa.chunk(num_linears, dim=-1)  # (N, R) each
    for y, part, B in zip(ys, parts, views.Bs, strict=True):
        _add_product(y, part, B)
    return xa


def backward_segments(
    x: Tensor, dys: Sequence[Tensor], dx: Tensor | None, xa: Tensor, views: GroupViews, scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """Return dA (G * R, D) and per linear dB^T (R, F), and add to dx (N, D) if given; shapes as `forward_segments`.

    With y = s x A^T B^T:  dB^T = (s x A^T)^T dy,  dA = (s dy B)^T x,  dx = (s dy B) A.
    """
    rank = views.Bs[0].shape[-2]
    parts = (xa,) if len(dys) == 1 else xa.split(rank, dim=-1)  # (N, R) each
    dparts, dBs = [], []
    for dy, part, B in zip(dys, parts, views.Bs, strict=True):
        dpart = dy.new_empty(part.shape)  # (N, R)
        _multiply(dpart, dy, B.transpose(-2, -1), scaling)
        dparts.append(dpart)
        dBs.append(part.transpose(-2, -1) @ dy)
    dxa = dparts[0] if len(dparts) == 1 else torch.cat(dparts, dim=-1)  # (N, G * R)
    dA = dxa.transpose(-2, -1) @ x
    if dx is not None:
        _add_product(dx, dxa, views.A)
    return dA, dBs


def _multiply(out: Tensor, left: Tensor, right: Tensor, scaling: float) -> None:
    """Set out = scaling left right, of matrices or batches of them."""
    multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
    multiply(out, left, right, beta=0, alpha=scaling, out=out)


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Set out += left right, of matrices or batches of them."""
    if out.ndim == 2:
        out.addmm_(left, right)
    else:
        out.baddbmm_(left, right)

"""Products with frozen weights over blocks of exactly so many rows: exact mode's way to bits that no neighbour changes.

A library chooses a kernel, and with it the order in which a product's terms are summed, by the number of rows. Here
every call has the same number, whatever is in the pass: the last block is filled up with zeros.

Knows matrices; not whose rows they are.

Main invariant: a row's result depends on that row, the weights and the size of a block alone, provided that a kernel
treats all rows of a block alike, which a trial checks with the very weights in use when a model is loaded.

Dimensions: N rows, D inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ROWS = 256
"""On an H200 a product with bf16 weights is bound by arithmetic from 184 rows on; larger blocks waste more on zeros."""


def linear(x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor | None, block_rows: int) -> Tensor:
    """x (N, D) times weight_t (D, F), plus bias (F,) if given; written to `out` (N, F) if given, and returned."""
    y = x.new_empty(x.shape[0], weight_t.shape[1]) if out is None else out
    for rows in _blocks(len(x), block_rows):
        block, target = _filled_up(x[rows], block_rows), _whole(y[rows], block_rows)
        if bias is None:
            torch.mm(block, weight_t, out=target)
        else:
            torch.addmm(bias, block, weight_t, out=target)
        _keep(target, y[rows])
    return y


def add_up(dys: Sequence[Tensor], weights: Sequence[Tensor], block_rows: int) -> Tensor:
    """The sum over i, in order, of dys[i] (N, F) times weights[i] (F, D)."""
    dx = dys[0].new_empty(len(dys[0]), weights[0].shape[1])
    for rows in _blocks(len(dx), block_rows):
        target = _whole(dx[rows], block_rows)
        torch.mm(_filled_up(dys[0][rows], block_rows), weights[0], out=target)
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            target.addmm_(_filled_up(dy[rows], block_rows), weight)
        _keep(target, dx[rows])
    return dx


def _blocks(num_rows: int, block_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + block_rows, num_rows)) for start in range(0, num_rows, block_rows))


def _filled_up(rows: Tensor, block_rows: int) -> Tensor:
    missing = block_rows - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _whole(rows: Tensor, block_rows: int) -> Tensor:
    """Where a block's result goes: the rows themselves, or something as wide for those that are too few."""
    return rows if len(rows) == block_rows else rows.new_empty(block_rows, rows.shape[1])


def _keep(target: Tensor, rows: Tensor) -> None:
    if len(rows) < len(target):
        rows.copy_(target[: len(rows)])

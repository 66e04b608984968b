"""Exact mode: products with frozen weights in row blocks of one fixed size, so that co-batched rows change no bits.

A library chooses a kernel, and with it the order of a product's sums, by the number of rows. Here every call has the
same number of rows; the last block is padded with zeros.

Does not depend on adapters or passes.

Main invariant: a row's result depends only on that row, the weights and the size of a block, provided that a kernel
treats all rows of a block alike. A trial checks that with the weights in use when a model is loaded.

Dimensions: N rows, D inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_ROWS = 256
"""On an H200 arithmetic bounds a product with bf16 weights from 184 rows on; larger blocks compute more padding."""


def linear(x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor | None, block_rows: int) -> Tensor:
    """Return x (N, D) times weight_t (D, F), plus bias (F,) if given; in `out` (N, F) if given."""
    y = x.new_empty(x.shape[0], weight_t.shape[1]) if out is None else out
    for rows in _blocks(len(x), block_rows):
        block, target = _padded(x[rows], block_rows), _target(y[rows], block_rows)
        if bias is None:
            torch.mm(block, weight_t, out=target)
        else:
            torch.addmm(bias, block, weight_t, out=target)
        _copy_back(target, y[rows])
    return y


def sum_products(dys: Sequence[Tensor], weights: Sequence[Tensor], block_rows: int) -> Tensor:
    """Return the sum over i, in order, of dys[i] (N, F) times weights[i] (F, D)."""
    dx = dys[0].new_empty(len(dys[0]), weights[0].shape[1])
    for rows in _blocks(len(dx), block_rows):
        target = _target(dx[rows], block_rows)
        torch.mm(_padded(dys[0][rows], block_rows), weights[0], out=target)
        for dy, weight in zip(dys[1:], weights[1:], strict=True):
            target.addmm_(_padded(dy[rows], block_rows), weight)
        _copy_back(target, dx[rows])
    return dx


def _blocks(num_rows: int, block_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + block_rows, num_rows)) for start in range(0, num_rows, block_rows))


def _padded(rows: Tensor, block_rows: int) -> Tensor:
    missing = block_rows - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _target(rows: Tensor, block_rows: int) -> Tensor:
    """Return the target of a block's product: the rows themselves, or a temporary block if there are too few."""
    return rows if len(rows) == block_rows else rows.new_empty(block_rows, rows.shape[1])


def _copy_back(target: Tensor, rows: Tensor) -> None:
    if len(rows) < len(target):
        rows.copy_(target[: len(rows)])

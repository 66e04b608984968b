"""Products with frozen weights in tiles of one size, in Triton: exact mode on a GPU.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. The operation is described in
`frozen_products`. A library chooses tiles, and whether to split sums, by the number of rows; this kernel does not.

Does not depend on models.

Main invariant: the order of a row's sums depends on the length of the sums alone.

Dimensions: N rows, D summed, F columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.frozen_products import TILE_COLUMNS, TILE_ROWS
from workers.model.gpu_operations import blocks_of

DEPTH = 64
"""What one product sums."""
WARPS, STAGES = 8, 3
GROUP = 8
"""Rows of tiles that are computed column by column, so that what they read stays in the cache."""


@triton.jit
def _multiply(
    out, left, right, bias, num_rows, d_out, d_in, out_stride, left_stride, right_depth_stride, right_column_stride,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, WIDENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Set a tile of out to left times right, plus the bias or the values in out. Grid: tiles."""
    across = tl.cdiv(d_out, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    group_rows = min(tl.cdiv(num_rows, ROWS) - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    rows = ((group * GROUP + place % group_rows) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = ((place // group_rows) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    is_row, is_column = rows < num_rows, columns < d_out
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, d_in, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_summed = depth < d_in
        lefts = tl.load(
            left + rows[:, None] * left_stride + depth[None, :], mask=is_row[:, None] & is_summed[None, :], other=0.0
        )
        rights = tl.load(
            right + depth[:, None].to(tl.int64) * right_depth_stride + columns[None, :] * right_column_stride,
            mask=is_summed[:, None] & is_column[None, :],
            other=0.0,
        )
        if WIDENS:
            lefts, rights = lefts.to(tl.float32), rights.to(tl.float32)
        total = tl.dot(lefts, rights, total)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    target = out + rows[:, None] * out_stride + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    if ADDS:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def multiply(out: Tensor, left: Tensor, right: Tensor, bias: Tensor | None = None, is_added: bool = False) -> None:
    """See `frozen_products.MULTIPLY`."""
    (num_rows, length), num_columns = left.shape, right.shape[1]
    _multiply[blocks_of(num_rows, TILE_ROWS) * blocks_of(num_columns, TILE_COLUMNS),](
        out, left, right, out if bias is None else bias, num_rows, num_columns, length,
        out.stride(0), left.stride(0), *right.stride(),
        HAS_BIAS=bias is not None, ADDS=is_added, WIDENS=bool(triton.knobs.runtime.interpret),
        ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS, DEPTH=DEPTH, GROUP=GROUP, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip

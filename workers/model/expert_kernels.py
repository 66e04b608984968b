"""What adapters add to a layer of experts on a GPU, in Triton: an adapter's matrix of each expert on the rows that the
adapter sends there.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. The operations are described in
`expert_groups`. Matrices are reached by address, so adapters of any ranks, in any slabs, are one launch. How many rows
a group has is known on the device alone: a program finds its group's rows, and goes through them tile by tile. Most
programs of a decode step find none.

Does not depend on runs, the bank or models.

Main invariants: a program reads the rows of one group and the matrix of its adapter and expert. The order of a row's
sums depends on F and the padded ranks only. A gradient is written by one program, which sums over each segment, and
adds the sums in the order of the adapter's segments. Products of fp32 round both sides to TF32, which keeps ten bits,
except in Triton's interpreter.

Dimensions: T rows of the pass, P rows of all experts, E experts, N segments, S adapters, F values of a row, R padded
rank, G matrices of an adapter and expert (1 or 2), M the largest G * R.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.expert_groups import COLUMNS
from workers.model.gpu_operations import GRADIENT_ROWS, TILE_ROWS, blocks_of, power_of_two

FEW_ROWS_DEPTH, DEPTH = 64, 32
"""Values that one product of `shrink_experts` sums, with few rows of a tile and with many."""
GRADIENT_DEPTH = 32
"""Rows that one product of a gradient sums."""
ALIGNED_BYTES = tl.constexpr(16)
"""Matrices of an expert begin at multiples of it: of a slab's by `rows.ALIGNMENT`, and each has whole rows of eight
values."""
EXPAND_ROWS = 32
"""Rows of a tile of `expand_experts` at most: with more, three programs of rank 128 would not share a processor."""
RANK_MIN = 16
"""The least depth of a product on tensor cores; smaller ranks are filled up with zeros."""


@triton.jit
def _expand_experts(
    y0, y1, y_stride, y_column_stride, d_out, blocks, xa, rows, num_rows, xa_stride,
    addresses, addresses_stride, lasts, owners, ranks, num_segments,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add xa M to y_i[rows of a group, some columns]. Grid: experts' segments, columns of all matrices."""
    group, block = tl.program_id(0), tl.program_id(1)
    expert, segment = group // num_segments, group % num_segments
    y, linear = y0, 0
    if block >= blocks:
        y, linear, block = y1, 1, block - blocks
    begin, end = tl.load(lasts + 2 * group) + 1, tl.load(lasts + 2 * group + 1) + 1
    adapter = tl.load(owners + segment)
    address = tl.load(addresses + adapter * addresses_stride + linear)
    rank = tl.load(ranks + adapter)
    if (address != 0) & (begin < end):
        matrix = address.to(tl.pointer_type(y0.dtype.element_ty)) + expert.to(tl.int64) * rank * d_out
        depth, columns = tl.arange(0, RANK), block * COLUMNS + tl.arange(0, COLUMNS)
        is_rank, is_column = depth < rank, columns < d_out
        values = tl.load(
            tl.multiple_of(matrix, ALIGNED_BYTES) + depth[:, None] * d_out + columns[None, :],
            mask=is_rank[:, None] & is_column[None, :],
            other=0.0,
        ).to(tl.float32)
        for first in range(begin, end, ROWS):
            places = (first + tl.arange(0, ROWS)).to(tl.int64)
            is_row = places < end
            of_pass = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
            own = tl.zeros((ROWS, RANK), tl.float32)
            for part in tl.static_range(PARTS):
                own += tl.load(
                    xa + (part * num_rows + of_pass[:, None]) * xa_stride + linear * rank + depth[None, :],
                    mask=is_row[:, None] & is_rank[None, :],
                    other=0.0,
                )
            added = tl.dot(own, values)
            out = y + places[:, None] * y_stride + columns[None, :] * y_column_stride
            mask = is_row[:, None] & is_column[None, :]
            tl.store(out, (tl.load(out, mask=mask, other=0.0) + added).to(y0.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_experts(
    xa, xa_stride, y0, y1, y_stride, y_column_stride, d_out,
    addresses, addresses_stride, lasts, owners, ranks, scalings, num_segments,
    ROWS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Set xa[rows of a group, ranks of a matrix] to scaling y_i M^T. Grid: experts' segments, matrices."""
    group, linear = tl.program_id(0), tl.program_id(1)
    expert, segment = group // num_segments, group % num_segments
    y = y0
    if linear == 1:
        y = y1
    begin, end = tl.load(lasts + 2 * group) + 1, tl.load(lasts + 2 * group + 1) + 1
    adapter = tl.load(owners + segment)
    address = tl.load(addresses + adapter * addresses_stride + linear)
    rank = tl.load(ranks + adapter)
    if (address != 0) & (begin < end):
        matrix = address.to(tl.pointer_type(y0.dtype.element_ty)) + expert.to(tl.int64) * rank * d_out
        matrix = tl.multiple_of(matrix, ALIGNED_BYTES)
        columns = tl.arange(0, RANK)
        is_column = columns < rank
        for first in range(begin, end, ROWS):
            places = (first + tl.arange(0, ROWS)).to(tl.int64)
            is_row = places < end
            total = tl.zeros((ROWS, RANK), tl.float32)
            for start in range(0, d_out, DEPTH):
                depth = start + tl.arange(0, DEPTH)
                is_output = depth < d_out
                own = tl.load(
                    y + places[:, None] * y_stride + depth[None, :] * y_column_stride,
                    mask=is_row[:, None] & is_output[None, :],
                    other=0.0,
                )
                values = tl.load(
                    matrix + columns[None, :] * d_out + depth[:, None],
                    mask=is_column[None, :] & is_output[:, None],
                    other=0.0,
                )
                total += tl.dot(own.to(tl.float32), values.to(tl.float32))
            out = xa + places[:, None] * xa_stride + linear * rank + columns[None, :]
            tl.store(out, total * tl.load(scalings + adapter), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_expert_gradients(
    dy0, dy1, dy_stride, dy_column_stride, d_out, blocks, xa, xa_stride, rows, row_weights,
    gradients, gradients_stride, lasts, firsts, ranks, num_segments, num_adapters,
    HAS_WEIGHTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add xa_i^T dy_i of each segment, in order, to some rows and columns of one gradient of an adapter and expert.

    Grid: experts' adapters, columns of all matrices, rows.
    """
    group, block = tl.program_id(0), tl.program_id(1)
    expert, adapter = group // num_adapters, group % num_adapters
    dy, linear = dy0, 0
    if block >= blocks:
        dy, linear, block = dy1, 1, block - blocks
    address = tl.load(gradients + adapter * gradients_stride + linear)
    rank = tl.load(ranks + adapter)
    first_segment, end_segment = tl.load(firsts + adapter), tl.load(firsts + adapter + 1)
    of_expert = lasts + 2 * expert * num_segments
    count = first_segment - first_segment
    for segment in range(first_segment, end_segment):
        count += tl.load(of_expert + 2 * segment + 1) - tl.load(of_expert + 2 * segment)
    if (address != 0) & (count > 0) & (tl.program_id(2) * ROWS < rank):
        own_rows, columns = tl.program_id(2) * ROWS + tl.arange(0, ROWS), block * COLUMNS + tl.arange(0, COLUMNS)
        is_own, is_column = own_rows < rank, columns < d_out
        gradient = address.to(tl.pointer_type(tl.float32)) + expert.to(tl.int64) * rank * d_out
        out = tl.multiple_of(gradient, ALIGNED_BYTES) + own_rows[:, None] * d_out + columns[None, :]
        mask = is_own[:, None] & is_column[None, :]
        sums = tl.load(out, mask=mask, other=0.0)
        for segment in range(first_segment, end_segment):
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            begin = tl.load(of_expert + 2 * segment) + 1
            end = tl.load(of_expert + 2 * segment + 1) + 1
            for first in range(begin, end, DEPTH):
                places = (first + tl.arange(0, DEPTH)).to(tl.int64)
                is_row = places < end
                of_pass = tl.load(rows + places, mask=is_row, other=0).to(tl.int64)
                lefts = tl.load(
                    xa + of_pass[None, :] * xa_stride + linear * rank + own_rows[:, None],
                    mask=is_row[None, :] & is_own[:, None],
                    other=0.0,
                )
                if HAS_WEIGHTS:
                    lefts *= tl.load(row_weights + places, mask=is_row, other=0.0).to(tl.float32)[None, :]
                rights = tl.load(
                    dy + places[:, None] * dy_stride + columns[None, :] * dy_column_stride,
                    mask=is_row[:, None] & is_column[None, :],
                    other=0.0,
                )
                total += tl.dot(lefts, rights.to(tl.float32))
            sums += total
        tl.store(out, sums, mask=mask)


def expand_experts(
    y0: Tensor,
    y1: Tensor | None,
    xa: Tensor,
    rows: Tensor,
    addresses: Tensor,
    lasts: Tensor,
    owners: Tensor,
    ranks: Tensor,
    tile_rows: int,
) -> None:
    """See `expert_groups.EXPAND_EXPERTS`."""
    num_linears = 1 if y1 is None else 2
    num_parts, num_rows, width = xa.shape
    blocks = blocks_of(y0.shape[1], COLUMNS)
    _expand_experts[len(lasts) * len(owners), num_linears * blocks](
        y0, y0 if y1 is None else y1, *y0.stride(), y0.shape[1], blocks, xa, rows, num_rows, width,
        addresses, addresses.stride(0), lasts, owners, ranks, len(owners),
        ROWS=min(tile_rows, EXPAND_ROWS), COLUMNS=COLUMNS, RANK=_padded_rank(width // num_linears), PARTS=num_parts,
    )  # fmt: skip


def shrink_experts(
    xa: Tensor,
    y0: Tensor,
    y1: Tensor | None,
    addresses: Tensor,
    lasts: Tensor,
    owners: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    tile_rows: int,
) -> None:
    """See `expert_groups.SHRINK_EXPERTS`."""
    num_linears = 1 if y1 is None else 2
    _shrink_experts[len(lasts) * len(owners), num_linears](
        xa, xa.stride(0), y0, y0 if y1 is None else y1, *y0.stride(), y0.shape[1],
        addresses, addresses.stride(0), lasts, owners, ranks, scalings, len(owners),
        ROWS=tile_rows, RANK=_padded_rank(xa.shape[1] // num_linears),
        DEPTH=FEW_ROWS_DEPTH if tile_rows == TILE_ROWS else DEPTH,
    )  # fmt: skip


def add_expert_gradients(
    dy0: Tensor,
    dy1: Tensor | None,
    xa: Tensor,
    rows: Tensor,
    row_weights: Tensor | None,
    gradients: Tensor,
    lasts: Tensor,
    firsts: Tensor,
    ranks: Tensor,
) -> None:
    """See `expert_groups.ADD_EXPERT_GRADIENTS`."""
    num_linears = 1 if dy1 is None else 2
    rank, blocks = xa.shape[1] // num_linears, blocks_of(dy0.shape[1], COLUMNS)
    num_rows = min(GRADIENT_ROWS, _padded_rank(rank))
    _add_expert_gradients[len(lasts) * len(ranks), num_linears * blocks, blocks_of(rank, num_rows)](
        dy0, dy0 if dy1 is None else dy1, *dy0.stride(), dy0.shape[1], blocks, xa, xa.stride(0), rows,
        dy0 if row_weights is None else row_weights, gradients, gradients.stride(0), lasts, firsts, ranks,
        lasts.shape[1], len(ranks),
        HAS_WEIGHTS=row_weights is not None, ROWS=num_rows, COLUMNS=COLUMNS, DEPTH=GRADIENT_DEPTH,
    )  # fmt: skip


def _padded_rank(rank: int) -> int:
    """Return the ranks of a program: those of the largest adapter."""
    padded: int = power_of_two(rank)
    return max(RANK_MIN, padded)

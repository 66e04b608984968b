"""Many adapters' products on a GPU, in Triton: two kernels in the forward of the linears that read one input, three in
the backward.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. Matrices are reached by address, so adapters
of any ranks, in any slabs, are one launch. `shrink` cuts each sum over D into parts, which `expand` adds up in order.
So a few rows keep many processors busy, without atomic additions. Products are of TF32, which bf16 fits into; of x A^T
it keeps ten bits.

Does not depend on runs, the bank or models.

Main invariants: a program reads the rows and the matrices of one adapter. The order of a row's sums depends on D, F
and the padded ranks only, so a row's bits do not depend on the other rows of a pass. A gradient is summed over each
segment, and the sums are added in the order of the adapter's segments: so it does not matter which of them are in one
pass.

Dimensions: T rows of the pass, N rows of a tile, L tiles, S adapters, D inputs, F outputs, R padded rank of an adapter,
G linears, M the largest G * R, P parts of D.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import (
    GRADIENT_COLUMNS,
    GRADIENT_ROWS,
    TILE_ROWS,
    expand_columns,
    shrink_columns,
)

SHRINK_DEPTH, TRAINING_DEPTH = 128, 32
"""Inputs that one product of `shrink` sums, with few rows of a tile and with many."""
RANK_DEPTH = 32
"""Of the ranks of all linears, what one product of `expand_inputs` sums."""
GRADIENT_DEPTH = 32
"""Rows that one product of a gradient sums."""
GRADIENT_WARPS = 8
"""Of a program: with four, the sums of a gradient and of a segment would not fit into registers."""
ALIGNED_BYTES = tl.constexpr(16)
"""Matrices begin at multiples of it (`rows.ALIGNMENT`), so that a thread loads so many bytes at once."""
RANK_MIN = 16
"""The least depth of a product on tensor cores; smaller ranks are filled up with zeros."""


@triton.jit
def _shrink(
    xa, x, addresses, tiles, ranks, scalings, num_rows, d_in, x_stride, xa_stride, depth_of_part,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Set xa[part, rows of a tile, some columns] to scaling x A^T over one part of D. Grid: tiles, columns, parts."""
    tile, part = tl.program_id(0), tl.program_id(2)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = G * tl.load(ranks + adapter)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if (address != 0) & (count > 0):
        A = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < width
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(part * depth_of_part, (part + 1) * depth_of_part, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_input = depth < d_in
            own = tl.load(
                x + rows[:, None] * x_stride + depth[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            matrix = tl.load(
                A + columns[None, :] * d_in + depth[:, None], mask=is_column[None, :] & is_input[:, None], other=0.0
            )
            total += tl.dot(own.to(tl.float32), matrix.to(tl.float32))
        out = xa + (part * num_rows + rows[:, None]) * xa_stride + columns[None, :]
        tl.store(out, total * tl.load(scalings + adapter), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _expand(
    y0, y1, y2, stride0, stride1, stride2, d_out0, d_out1, d_out2, blocks0, blocks1,
    xa, addresses, tiles, ranks, num_rows, xa_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add xa B^T to y_i[rows of a tile, some columns]. Grid: tiles, columns of all linears."""
    tile, block = tl.program_id(0), tl.program_id(1)
    y, y_stride, d_out, linear = y0, stride0, d_out0, 0
    if block >= blocks0 + blocks1:
        y, y_stride, d_out, linear, block = y2, stride2, d_out2, 2, block - blocks0 - blocks1
    elif block >= blocks0:
        y, y_stride, d_out, linear, block = y1, stride1, d_out1, 1, block - blocks0
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter + 1 + linear)
    rank = tl.load(ranks + adapter)
    if (address != 0) & (count > 0):
        B = tl.multiple_of(address.to(tl.pointer_type(y0.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        depth, columns = tl.arange(0, RANK), block * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_rank, is_column = tl.arange(0, ROWS) < count, depth < rank, columns < d_out
        own = tl.zeros((ROWS, RANK), tl.float32)
        for part in tl.static_range(PARTS):
            own += tl.load(
                xa + (part * num_rows + rows[:, None]) * xa_stride + linear * rank + depth[None, :],
                mask=is_row[:, None] & is_rank[None, :],
                other=0.0,
            )
        matrix = tl.load(
            B + depth[:, None] * d_out + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
        )
        added = tl.dot(own, matrix.to(tl.float32))
        out = y + rows[:, None] * y_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, (tl.load(out, mask=mask, other=0.0) + added).to(y0.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_outputs(
    dxa, dy0, dy1, dy2, stride0, stride1, stride2, d_out0, d_out1, d_out2,
    addresses, tiles, ranks, scalings, dxa_stride,
    ROWS: tl.constexpr, RANK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Set dxa[rows of a tile, ranks of a linear] to scaling dy_i B_i. Grid: tiles, linears."""
    tile, linear = tl.program_id(0), tl.program_id(1)
    dy, dy_stride, d_out = dy0, stride0, d_out0
    if linear == 1:
        dy, dy_stride, d_out = dy1, stride1, d_out1
    elif linear == 2:
        dy, dy_stride, d_out = dy2, stride2, d_out2
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter + 1 + linear)
    rank = tl.load(ranks + adapter)
    if (address != 0) & (count > 0):
        B = tl.multiple_of(address.to(tl.pointer_type(dy0.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.arange(0, RANK)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < rank
        total = tl.zeros((ROWS, RANK), tl.float32)
        for first in range(0, d_out, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_output = depth < d_out
            own = tl.load(
                dy + rows[:, None] * dy_stride + depth[None, :], mask=is_row[:, None] & is_output[None, :], other=0.0
            )
            matrix = tl.load(
                B + columns[None, :] * d_out + depth[:, None], mask=is_column[None, :] & is_output[:, None], other=0.0
            )
            total += tl.dot(own.to(tl.float32), matrix.to(tl.float32))
        out = dxa + rows[:, None] * dxa_stride + linear * rank + columns[None, :]
        tl.store(out, total * tl.load(scalings + adapter), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _expand_inputs(
    dx, dxa, addresses, tiles, ranks, d_in, dx_stride, dxa_stride,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add dxa A to dx[rows of a tile, some columns]. Grid: tiles, columns."""
    tile = tl.program_id(0)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = G * tl.load(ranks + adapter)
    if (address != 0) & (count > 0):
        A = tl.multiple_of(address.to(tl.pointer_type(dx.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < d_in
        added = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, width, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_rank = depth < width
            own = tl.load(
                dxa + rows[:, None] * dxa_stride + depth[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0
            )
            matrix = tl.load(
                A + depth[:, None] * d_in + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
            )
            added += tl.dot(own, matrix.to(tl.float32))
        out = dx + rows[:, None] * dx_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, (tl.load(out, mask=mask, other=0.0) + added).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _add_gradients(
    x, dy0, dy1, dy2, x_stride, stride0, stride1, stride2, d_in, d_out0, d_out1, d_out2, blocks, blocks0, blocks1,
    xa, dxa, xa_stride, gradients, segments, firsts, ranks,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add left^T right of each segment, in order, to some rows and columns of one gradient of an adapter.

    Grid: adapters, columns, rows. The columns are of A (`blocks` of them) and of the B^T of each linear, one after
    another.
    """
    adapter, block = tl.program_id(0), tl.program_id(1)
    rank = tl.load(ranks + adapter)
    left, right, right_stride, width, height, first_column, matrix = dxa, x, x_stride, d_in, G * rank, 0, 0
    if block >= blocks + blocks0 + blocks1:
        left, right, right_stride, width, height = xa, dy2, stride2, d_out2, rank
        first_column, matrix, block = 2 * rank, 3, block - blocks - blocks0 - blocks1
    elif block >= blocks + blocks0:
        left, right, right_stride, width, height = xa, dy1, stride1, d_out1, rank
        first_column, matrix, block = rank, 2, block - blocks - blocks0
    elif block >= blocks:
        left, right, right_stride, width, height = xa, dy0, stride0, d_out0, rank
        matrix, block = 1, block - blocks
    address = tl.load(gradients + 4 * adapter + matrix)
    own_rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if (address != 0) & (tl.program_id(2) * ROWS < height):
        columns = block * COLUMNS + tl.arange(0, COLUMNS)
        mask = (own_rows < height)[:, None] & (columns < width)[None, :]
        gradient = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGNED_BYTES)
        out = gradient + own_rows[:, None].to(tl.int64) * width + columns[None, :]
        sums = tl.load(out, mask=mask, other=0.0)
        for segment in range(tl.load(firsts + adapter), tl.load(firsts + adapter + 1)):
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            start, count = tl.load(segments + 2 * segment), tl.load(segments + 2 * segment + 1)
            for first in range(0, count, DEPTH):
                number = first + tl.arange(0, DEPTH)
                rows = (start + number).to(tl.int64)
                is_row = number < count
                lefts = tl.load(
                    left + rows[None, :] * xa_stride + first_column + own_rows[:, None],
                    mask=is_row[None, :] & (own_rows < height)[:, None],
                    other=0.0,
                )
                rights = tl.load(
                    right + rows[:, None] * right_stride + columns[None, :],
                    mask=is_row[:, None] & (columns < width)[None, :],
                    other=0.0,
                )
                total += tl.dot(lefts, rights.to(tl.float32))
            sums += total
        tl.store(out, sums, mask=mask)


def shrink(
    xa: Tensor,
    x: Tensor,
    addresses: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    num_linears: int,
    tile_rows: int,
) -> None:
    """See `gpu_operations.SHRINK`."""
    num_parts, num_rows, width = xa.shape
    columns, step = shrink_columns(width, tile_rows), SHRINK_DEPTH if tile_rows == TILE_ROWS else TRAINING_DEPTH
    depth = triton.cdiv(triton.cdiv(x.shape[1], step), num_parts) * step
    _shrink[len(tiles), triton.cdiv(width, columns), num_parts](
        xa, x, addresses, tiles, ranks, scalings, num_rows, x.shape[1], x.stride(0), width, depth,
        G=num_linears, ROWS=tile_rows, COLUMNS=columns, DEPTH=step,
    )  # fmt: skip


def expand(
    y0: Tensor,
    y1: Tensor | None,
    y2: Tensor | None,
    xa: Tensor,
    addresses: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    tile_rows: int,
) -> None:
    """See `gpu_operations.EXPAND`."""
    ys = [y for y in (y0, y1, y2) if y is not None]
    num_parts, num_rows, width = xa.shape
    filled, strides, widths = _filled(ys)
    columns = expand_columns(tile_rows)
    blocks = [triton.cdiv(y.shape[1], columns) for y in ys]
    _expand[len(tiles), sum(blocks)](
        *filled, *strides, *widths, *[*blocks, 0][:2], xa, addresses, tiles, ranks, num_rows, width,
        ROWS=tile_rows, COLUMNS=columns, PARTS=num_parts, RANK=_padded_rank(width, len(ys)),
    )  # fmt: skip


def shrink_outputs(
    dxa: Tensor,
    dy0: Tensor,
    dy1: Tensor | None,
    dy2: Tensor | None,
    addresses: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    scalings: Tensor,
    tile_rows: int,
) -> None:
    """See `gpu_operations.SHRINK_OUTPUTS`."""
    dys = [dy for dy in (dy0, dy1, dy2) if dy is not None]
    filled, strides, widths = _filled(dys)
    _shrink_outputs[len(tiles), len(dys)](
        dxa, *filled, *strides, *widths, addresses, tiles, ranks, scalings, dxa.stride(0),
        ROWS=tile_rows, RANK=_padded_rank(dxa.shape[1], len(dys)), DEPTH=TRAINING_DEPTH,
    )  # fmt: skip


def expand_inputs(
    dx: Tensor, dxa: Tensor, addresses: Tensor, tiles: Tensor, ranks: Tensor, num_linears: int, tile_rows: int
) -> None:
    """See `gpu_operations.EXPAND_INPUTS`."""
    columns = expand_columns(tile_rows)
    _expand_inputs[len(tiles), triton.cdiv(dx.shape[1], columns)](
        dx, dxa, addresses, tiles, ranks, dx.shape[1], dx.stride(0), dxa.stride(0),
        G=num_linears, ROWS=tile_rows, COLUMNS=columns, DEPTH=RANK_DEPTH,
    )  # fmt: skip


def add_gradients(
    x: Tensor,
    dy0: Tensor,
    dy1: Tensor | None,
    dy2: Tensor | None,
    xa: Tensor,
    dxa: Tensor,
    gradients: Tensor,
    segments: Tensor,
    firsts: Tensor,
    ranks: Tensor,
) -> None:
    """See `gpu_operations.ADD_GRADIENTS`."""
    dys = [dy for dy in (dy0, dy1, dy2) if dy is not None]
    filled, strides, widths = _filled(dys)
    blocks = [triton.cdiv(each.shape[1], GRADIENT_COLUMNS) for each in (x, *dys)]
    _add_gradients[len(ranks), sum(blocks), triton.cdiv(dxa.shape[1], GRADIENT_ROWS)](
        x, *filled, x.stride(0), *strides, x.shape[1], *widths, *[*blocks, 0][:3],
        xa, dxa, dxa.stride(0), gradients, segments, firsts, ranks,
        G=len(dys), ROWS=GRADIENT_ROWS, COLUMNS=GRADIENT_COLUMNS, DEPTH=GRADIENT_DEPTH, num_warps=GRADIENT_WARPS,
    )  # fmt: skip


def _filled(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Return one to three tensors (T, F), filled up to three with the first; their strides and their widths."""
    filled = [*tensors, tensors[0], tensors[0]][:3]
    return filled, [tensor.stride(0) for tensor in filled], [tensor.shape[1] for tensor in filled]


def _padded_rank(width: int, num_linears: int) -> int:
    """Return the ranks of a program for one linear: of the largest adapter."""
    rank: int = triton.next_power_of_2(width // num_linears)
    return max(RANK_MIN, rank)

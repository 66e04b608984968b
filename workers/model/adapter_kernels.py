"""Many adapters' products on a GPU, in Triton: two kernels in the forward of the linears that read one input, three in
the backward.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. Matrices are reached by address, so adapters
of any ranks, in any slabs, are one launch. Long sums, over D or F, are cut into parts, a program each, so that few rows
keep many processors busy. Parts are added up in order, without atomic additions: by `expand` in a pass without a
backward, otherwise by the program that finishes its part last. Products are of bf16, added up in fp32: what is in fp32
(x A^T, dy B) is two summands of bf16, which keep sixteen bits.

Does not depend on runs, the bank or models.

Main invariants: a program reads the rows and the matrices of one adapter. The order of a row's sums depends on D, F
and the padded ranks only, so a row's bits do not depend on the other rows of a pass. A gradient is summed over each
segment, and the sums are added in the order of the adapter's segments: so it does not matter which of them are in one
pass.

Dimensions: T rows of the pass, N rows of a tile, L tiles, S adapters, D inputs, F outputs, R padded rank of an adapter,
G linears, M the largest G * R, P parts of a sum over D or F.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import (
    GRADIENT_COLUMNS,
    GRADIENT_DEPTH,
    GRADIENT_ROWS,
    TILE_ROWS,
    blocks_of,
    expand_columns,
    gradient_rows,
    power_of_two,
    shrink_columns,
)

SHRINK_DEPTH, TRAINING_DEPTH = 128, 64
"""Values that one product of `shrink` and of `shrink_outputs` sums, with few rows of a tile and with many."""
SHRINK_STAGES = 4
"""Of a sum with many rows: so many loads less one are under way while a product is computed."""
RANK_DEPTH = 32
"""Of the ranks of all linears, what one product of `expand_inputs` sums."""
ALIGNED_BYTES = tl.constexpr(16)
"""Matrices begin at multiples of it (`rows.ALIGNMENT`), so that a thread loads so many bytes at once."""
RANK_MULTIPLE = tl.constexpr(8)
"""Padded ranks are multiples of it."""
PARTS_AT_ONCE = tl.constexpr(8)
"""Parts of a sum that are read at once, if there are no more: for more, a program has too few registers."""
WIDENS = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether products are of fp32: Triton's interpreter has no others."""
RANK_MIN = 16
"""The least depth of a product on tensor cores; smaller ranks are filled up with zeros."""


@triton.jit
def plus_product(total, left, right):
    """Return total + left right, in fp32; one in fp32 is split into two summands in the dtype of the other."""
    if left.dtype != right.dtype:
        if right.dtype == tl.float32:
            high = right.to(left.dtype)
            total = plus_product(total, left, (right - high.to(tl.float32)).to(left.dtype))
            right = high
        else:
            high = left.to(right.dtype)
            total = plus_product(total, (left - high.to(tl.float32)).to(right.dtype), right)
            left = high
    if WIDENS:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def add_parts(summed, parts, arrivals, rows, columns, mask, num_rows, stride, PARTS: tl.constexpr):
    """Set summed[rows, columns] to the sum of the parts in order, in the last program of them to come here.

    `arrivals` counts these programs, from 0 and back to 0.
    """
    tl.debug_barrier()  # every thread's values are written before the program is counted
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == PARTS - 1:
        sums = tl.zeros(mask.shape, tl.float32)
        for part in tl.range(0, PARTS, loop_unroll_factor=PARTS if PARTS <= PARTS_AT_ONCE else 1):
            own = parts + (part * num_rows + rows[:, None]) * stride + columns[None, :]
            sums += tl.load(own, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(summed + rows[:, None] * stride + columns[None, :], sums, mask=mask)
        tl.store(arrivals, 0)


@triton.jit
def _shrink(
    xa, summed, arrivals, x, addresses, tiles, ranks, scalings, num_rows, d_in, x_stride, xa_stride, depth_of_part,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, IS_SUMMED: tl.constexpr,
):  # fmt: skip
    """Set xa[part, rows of a tile, some columns] to scaling x A^T over one part of D. Grid: tiles, columns, parts."""
    tile, part = tl.program_id(0), tl.program_id(2)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = G * tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if (address != 0) & (count > 0):
        A = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < width
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(part * depth_of_part, (part + 1) * depth_of_part, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_input = depth < d_in
            own = tl.load(
                x + rows[:, None] * x_stride + depth[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
            )
            matrix = tl.load(
                A + columns[None, :] * d_in + depth[:, None], mask=is_column[None, :] & is_input[:, None], other=0.0
            )
            sums = plus_product(sums, own, matrix)
        out = xa + (part * num_rows + rows[:, None]) * xa_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, sums * tl.load(scalings + adapter), mask=mask)
        if IS_SUMMED:
            arrivals += tile * tl.num_programs(1) + tl.program_id(1)
            add_parts(summed, xa, arrivals, rows, columns, mask, num_rows, xa_stride, PARTS)


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
    rank = tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
    if (address != 0) & (count > 0):
        B = tl.multiple_of(address.to(tl.pointer_type(y0.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        depth, columns = tl.arange(0, RANK), block * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_rank, is_column = tl.arange(0, ROWS) < count, depth < rank, columns < d_out
        out = y + rows[:, None] * y_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(out, mask=mask, other=0.0)
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
        added = plus_product(tl.zeros((ROWS, COLUMNS), tl.float32), own, matrix)
        tl.store(out, (before + added).to(y0.dtype.element_ty), mask=mask)


@triton.jit
def _shrink_outputs(
    dxa, summed, arrivals, dy0, dy1, dy2, stride0, stride1, stride2, d_out0, d_out1, d_out2,
    addresses, tiles, ranks, scalings, num_rows, dxa_stride,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PARTS: tl.constexpr, IS_SUMMED: tl.constexpr,
):  # fmt: skip
    """Set dxa[part, rows of a tile, some ranks of a linear] to scaling dy_i B_i over one part of F.

    Grid: tiles, blocks of ranks of all linears, parts.
    """
    tile, linear, part = tl.program_id(0), tl.program_id(1) // BLOCKS, tl.program_id(2)
    dy, dy_stride, d_out = dy0, stride0, d_out0
    if linear == 1:
        dy, dy_stride, d_out = dy1, stride1, d_out1
    elif linear == 2:
        dy, dy_stride, d_out = dy2, stride2, d_out2
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter + 1 + linear)
    rank = tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
    if (address != 0) & (count > 0):
        B = tl.multiple_of(address.to(tl.pointer_type(dy0.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < rank
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        depth_of_part = tl.cdiv(tl.cdiv(d_out, DEPTH), PARTS) * DEPTH
        for first in range(part * depth_of_part, (part + 1) * depth_of_part, DEPTH):
            depth = first + tl.arange(0, DEPTH)
            is_output = depth < d_out
            own = tl.load(
                dy + rows[:, None] * dy_stride + depth[None, :], mask=is_row[:, None] & is_output[None, :], other=0.0
            )
            matrix = tl.load(
                B + columns[None, :] * d_out + depth[:, None], mask=is_column[None, :] & is_output[:, None], other=0.0
            )
            sums = plus_product(sums, own, matrix)
        out = dxa + (part * num_rows + rows[:, None]) * dxa_stride + linear * rank + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        tl.store(out, sums * tl.load(scalings + adapter), mask=mask)
        if IS_SUMMED:
            arrivals += tile * tl.num_programs(1) + tl.program_id(1)
            add_parts(summed, dxa, arrivals, rows, linear * rank + columns, mask, num_rows, dxa_stride, PARTS)


@triton.jit
def times_matrix(
    dxa, dxa_stride, A, rows, is_row, columns, is_column, width, d_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return dxa A[rows of a tile, some columns] in fp32, of `width` ranks."""
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_rank = depth < width
        own = tl.load(
            dxa + rows[:, None] * dxa_stride + depth[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0
        )
        matrix = tl.load(
            A + depth[:, None] * d_in + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
        )
        product = plus_product(product, own, matrix)
    return product


@triton.jit
def _expand_inputs(
    dx, dxa, addresses, tiles, ranks, d_in, dx_stride, dxa_stride,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add dxa A to dx[rows of a tile, some columns]. Grid: tiles, columns."""
    tile = tl.program_id(0)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = G * tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
    if (address != 0) & (count > 0):
        A = tl.multiple_of(address.to(tl.pointer_type(dx.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = tl.arange(0, ROWS) < count, columns < d_in
        out = dx + rows[:, None] * dx_stride + columns[None, :]
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(out, mask=mask, other=0.0)
        added = times_matrix(
            dxa, dxa_stride, A, rows, is_row, columns, is_column, width, d_in, ROWS, COLUMNS, DEPTH
        )  # fmt: skip
        tl.store(out, (before + added).to(dx.dtype.element_ty), mask=mask)


@triton.jit
def _add_gradients(
    x, dy0, dy1, dy2, x_stride, stride0, stride1, stride2, d_in, d_out0, d_out1, d_out2, blocks, blocks0, blocks1,
    xa, dxa, xa_stride, gradients, pieces, firsts, ranks, are_set,
    G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, CAN_SET: tl.constexpr,
):  # fmt: skip
    """Add left^T right of each segment, in order, to some rows and columns of one gradient of an adapter.

    Or to zeros, where the adapter's gradients are set.

    Grid: adapters, columns, rows. The columns are of A (`blocks` of them) and of the B^T of each linear, one after
    another. Products are right^T left: tensor cores take the operand of the pass as it was loaded.
    """
    adapter, block = tl.program_id(0), tl.program_id(1)
    rank = tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
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
        is_own, is_column = own_rows < height, columns < width
        mask = is_column[:, None] & is_own[None, :]
        gradient = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGNED_BYTES)
        out = gradient + own_rows[None, :].to(tl.int64) * width + columns[:, None]
        is_read = mask
        if CAN_SET:
            num_read = tl.where(tl.load(are_set + adapter) == 0, height, 0)
            is_read = is_column[:, None] & (own_rows < num_read)[None, :]
        sums = tl.load(out, mask=is_read, other=0.0)
        total = tl.zeros((COLUMNS, ROWS), tl.float32)
        number = tl.arange(0, DEPTH)
        for piece in range(tl.load(firsts + adapter), tl.load(firsts + adapter + 1)):
            start, count = tl.load(pieces + 3 * piece), tl.load(pieces + 3 * piece + 1)
            rows, is_row = (start + number).to(tl.int64), number < count
            lefts = tl.load(
                left + rows[:, None] * xa_stride + first_column + own_rows[None, :],
                mask=is_row[:, None] & is_own[None, :],
                other=0.0,
            )
            rights = tl.load(
                right + rows[:, None] * right_stride + columns[None, :],
                mask=is_row[:, None] & is_column[None, :],
                other=0.0,
            )
            total = plus_product(total, tl.trans(rights), lefts)
            is_end = tl.load(pieces + 3 * piece + 2) != 0
            sums += tl.where(is_end, total, 0.0)
            total = tl.where(is_end, 0.0, total)
        tl.store(out, sums, mask=mask)


def shrink(
    xa: Tensor,
    summed: Tensor | None,
    arrivals: Tensor | None,
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
    depth = blocks_of(blocks_of(x.shape[1], step), num_parts) * step
    _shrink[len(tiles), blocks_of(width, columns), num_parts](
        *_written(xa, summed, arrivals), x, addresses, tiles, ranks, scalings,
        num_rows, x.shape[1], x.stride(0), width, depth,
        G=num_linears, ROWS=tile_rows, COLUMNS=columns, DEPTH=step, PARTS=num_parts, IS_SUMMED=summed is not None,
        num_stages=SHRINK_STAGES,
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
    blocks = [blocks_of(y.shape[1], columns) for y in ys]
    _expand[len(tiles), sum(blocks)](
        *filled, *strides, *widths, *[*blocks, 0][:2], xa, addresses, tiles, ranks, num_rows, width,
        ROWS=tile_rows, COLUMNS=columns, PARTS=num_parts, RANK=padded_rank(width, len(ys)),
    )  # fmt: skip


def shrink_outputs(
    dxa: Tensor,
    summed: Tensor | None,
    arrivals: Tensor | None,
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
    num_parts, num_rows, width = dxa.shape
    columns = shrink_columns(width // len(dys), tile_rows)
    blocks = blocks_of(width // len(dys), columns)
    _shrink_outputs[len(tiles), len(dys) * blocks, num_parts](
        *_written(dxa, summed, arrivals), *filled, *strides, *widths, addresses, tiles, ranks, scalings,
        num_rows, width,
        BLOCKS=blocks, ROWS=tile_rows, COLUMNS=columns, DEPTH=TRAINING_DEPTH,
        PARTS=num_parts, IS_SUMMED=summed is not None, num_stages=SHRINK_STAGES,
    )  # fmt: skip


def expand_inputs(
    dx: Tensor, dxa: Tensor, addresses: Tensor, tiles: Tensor, ranks: Tensor, num_linears: int, tile_rows: int
) -> None:
    """See `gpu_operations.EXPAND_INPUTS`."""
    columns = expand_columns(tile_rows)
    _expand_inputs[len(tiles), blocks_of(dx.shape[1], columns)](
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
    pieces: Tensor,
    firsts: Tensor,
    ranks: Tensor,
    are_set: Tensor | None,
    num_set: int,
) -> None:
    """See `gpu_operations.ADD_GRADIENTS`."""
    dys = [dy for dy in (dy0, dy1, dy2) if dy is not None]
    filled, strides, widths = _filled(dys)
    blocks = [blocks_of(each.shape[1], GRADIENT_COLUMNS) for each in (x, *dys)]
    rows = gradient_rows(dxa.shape[1] // len(dys))
    _add_gradients[len(ranks), sum(blocks), blocks_of(dxa.shape[1], rows)](
        x, *filled, x.stride(0), *strides, x.shape[1], *widths, *[*blocks, 0][:3],
        xa, dxa, dxa.stride(0), gradients, pieces, firsts, ranks, ranks if are_set is None else are_set,
        G=len(dys), ROWS=rows, COLUMNS=GRADIENT_COLUMNS, DEPTH=GRADIENT_DEPTH, CAN_SET=are_set is not None,
        **gradient_options(rows),
    )  # fmt: skip


def gradient_options(rows: int) -> dict[str, int]:
    """Return the options of a program of a gradient: four warps cannot hold the sums of many rows in their registers.

    Rows are loaded by pieces, which are loaded too: of the stages, half are of rows.
    """
    return {"num_warps": 4, "num_stages": 5} if rows < GRADIENT_ROWS else {"num_warps": 8, "num_stages": 3}


def _written(parts: Tensor, summed: Tensor | None, arrivals: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors that a kernel of parts writes; parts in place of those that it does not."""
    return parts, parts if summed is None else summed, parts if arrivals is None else arrivals


def _filled(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int], list[int]]:
    """Return one to three tensors (T, F), filled up to three with the first; their strides and their widths."""
    filled = [*tensors, tensors[0], tensors[0]][:3]
    return filled, [tensor.stride(0) for tensor in filled], [tensor.shape[1] for tensor in filled]


def padded_rank(width: int, num_linears: int) -> int:
    """Return the ranks of a program for one linear: of the largest adapter."""
    rank: int = power_of_two(width // num_linears)
    return max(RANK_MIN, rank)

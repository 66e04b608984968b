"""The forward of many adapters' products on a GPU: two kernels in Triton for the linears that read one input.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. Matrices are reached by address, so adapters
of any ranks, in any slabs, are one launch. `shrink` cuts each sum over D into parts, which `expand` adds up in order.
So a few rows keep many processors busy, without atomic additions. Products are of TF32, which bf16 fits into; of x A^T
it keeps ten bits.

Does not depend on runs, the bank or models.

Main invariants: a program reads the rows and the matrices of one adapter. The order of a row's sums depends on D and
the padded ranks only, so a row's bits do not depend on the other rows of a pass.

Dimensions: T rows of the pass, N rows of a tile, L tiles, S adapters, D inputs, F outputs, R padded rank of an adapter,
G linears, M the largest G * R, P parts of D.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import EXPAND_COLUMNS, SHRINK_COLUMNS, TILE_ROWS

SHRINK_DEPTH = 128
"""Inputs that one product of `shrink` sums."""
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


def shrink(
    xa: Tensor, x: Tensor, addresses: Tensor, tiles: Tensor, ranks: Tensor, scalings: Tensor, num_linears: int
) -> None:
    """See `gpu_operations.SHRINK`."""
    num_parts, num_rows, width = xa.shape
    depth = triton.cdiv(triton.cdiv(x.shape[1], SHRINK_DEPTH), num_parts) * SHRINK_DEPTH
    _shrink[len(tiles), triton.cdiv(width, SHRINK_COLUMNS), num_parts](
        xa, x, addresses, tiles, ranks, scalings, num_rows, x.shape[1], x.stride(0), width, depth,
        G=num_linears, ROWS=TILE_ROWS, COLUMNS=SHRINK_COLUMNS, DEPTH=SHRINK_DEPTH,
    )  # fmt: skip


def expand(
    y0: Tensor, y1: Tensor | None, y2: Tensor | None, xa: Tensor, addresses: Tensor, tiles: Tensor, ranks: Tensor
) -> None:
    """See `gpu_operations.EXPAND`."""
    ys = [y for y in (y0, y1, y2) if y is not None]
    num_parts, num_rows, width = xa.shape
    filled = [*ys, y0, y0][:3]
    blocks = [triton.cdiv(y.shape[1], EXPAND_COLUMNS) for y in ys]
    _expand[len(tiles), sum(blocks)](
        *filled, *(y.stride(0) for y in filled), *(y.shape[1] for y in filled), *[*blocks, 0][:2],
        xa, addresses, tiles, ranks, num_rows, width,
        ROWS=TILE_ROWS, COLUMNS=EXPAND_COLUMNS, PARTS=num_parts,
        RANK=max(RANK_MIN, triton.next_power_of_2(width // len(ys))),
    )  # fmt: skip

"""Products of few rows with frozen weights, in Triton; the operation is described in `few_rows`.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton.

Does not depend on models.

Main invariants: a program has all rows and some columns of the result, or the rows of one adapter and some of its
ranks. The order of a row's sums depends on the length of the sums alone.

Dimensions: N rows, D summed, F columns of the result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.adapter_kernels import ALIGNED_BYTES, RANK_MULTIPLE, plus_product
from workers.model.few_rows import DEPTH, RANKS, columns_of
from workers.model.gpu_operations import TILE_ROWS, blocks_of, power_of_two
from workers.model.layer_kernels import gated

PIPELINE_BYTES, STAGES_MAX = 160 << 10, 8
"""Shared memory of a program at most, of one that has a processor to itself. Its stages less one are being read while a
product is computed: memory takes as long to answer as it takes to send so much."""
COLUMNS_OF_FOUR = 64
"""That four warps can hold."""


@triton.jit
def _sums(
    left, left_stride, rows, is_row, norm_weight, eps, matrix, columns, is_column, d_in,
    HAS_NORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return some rows of left times some rows of a matrix (F, D), in fp32; normalised rows, if there is a norm."""
    sums, squares = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, DEPTH), tl.float32)
    for first in range(0, d_in, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        is_input = depth < d_in
        own = tl.load(
            left + rows[:, None] * left_stride + depth[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        if HAS_NORM:
            wide = own.to(tl.float32)
            squares += wide * wide
            own = (wide * tl.load(norm_weight + depth, mask=is_input, other=0.0).to(tl.float32)).to(own.dtype)
        values = tl.load(
            matrix + columns[None, :] * d_in + depth[:, None], mask=is_column[None, :] & is_input[:, None], other=0.0
        )
        sums = plus_product(sums, own, values)
    if HAS_NORM:
        sums *= (1 / tl.sqrt(tl.sum(squares, 1) / d_in + eps))[:, None]
    return sums


@triton.jit
def _set_ranks(
    place, xa, left, norm_weight, eps, addresses, tiles, ranks, scalings, d_in, left_stride, xa_stride, rank_blocks,
    G: tl.constexpr, HAS_NORM: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Set xa[rows of a tile, some ranks of its adapter] to scaling x A^T."""
    tile = place // rank_blocks
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = G * tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE)
    if (address != 0) & (count > 0):
        A = tl.multiple_of(address.to(tl.pointer_type(left.dtype.element_ty)), ALIGNED_BYTES)
        rows, numbers = start + tl.arange(0, TILE), place % rank_blocks * RANKS + tl.arange(0, RANKS)
        is_row, is_rank = tl.arange(0, TILE) < count, numbers < width
        sums = _sums(
            left, left_stride, rows, is_row, norm_weight, eps, A, numbers, is_rank, d_in, HAS_NORM, TILE, RANKS, DEPTH
        )  # fmt: skip
        target = xa + rows[:, None] * xa_stride + numbers[None, :]
        tl.store(target, sums * tl.load(scalings + adapter), mask=is_row[:, None] & is_rank[None, :])


@triton.jit
def _set_columns(
    place, out, left, weight, bias, norm_weight, eps, num_rows, d_out, d_in, out_stride, left_stride,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, IS_GATED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Set some columns of out, of all rows."""
    SHOWN: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    rows, number = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    columns = place * SHOWN + number % SHOWN
    is_row, is_column = rows < num_rows, columns < d_out
    columns += tl.where(number < SHOWN, 0, d_out)  # gates, and behind them their ups
    sums = _sums(
        left, left_stride, rows, is_row, norm_weight, eps, weight, columns, is_column, d_in,
        HAS_NORM, ROWS, COLUMNS, DEPTH,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if IS_GATED:
        rounded = sums.to(out.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(rounded, (ROWS, 2, SHOWN)), (0, 2, 1)))
        sums = gated(gate, up)
    shown = place * SHOWN + tl.arange(0, SHOWN)
    target = out + rows[:, None] * out_stride + shown[None, :]
    mask = is_row[:, None] & (shown < d_out)[None, :]
    if ADDS:
        sums += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_shrinking", "rank_blocks"])  # or many buckets would compile it again
def _multiply_few(
    out, xa, left, weight, bias, norm_weight, eps, addresses, tiles, ranks, scalings,
    num_rows, d_out, d_in, out_stride, left_stride, xa_stride, num_shrinking, rank_blocks,
    G: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, IS_GATED: tl.constexpr,
    SHRINKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Set some columns of out, or some ranks of xa. Grid: tiles by blocks of ranks, then columns of out."""
    place = tl.program_id(0)
    if SHRINKS:
        if place < num_shrinking:
            _set_ranks(
                place, xa, left, norm_weight, eps, addresses, tiles, ranks, scalings, d_in, left_stride, xa_stride,
                rank_blocks, G, HAS_NORM, DEPTH, TILE, RANKS,
            )  # fmt: skip
        else:
            _set_columns(
                place - num_shrinking, out, left, weight, bias, norm_weight, eps, num_rows, d_out, d_in, out_stride,
                left_stride, HAS_NORM, HAS_BIAS, ADDS, IS_GATED, ROWS, COLUMNS, DEPTH,
            )  # fmt: skip
    else:
        _set_columns(
            place, out, left, weight, bias, norm_weight, eps, num_rows, d_out, d_in, out_stride,
            left_stride, HAS_NORM, HAS_BIAS, ADDS, IS_GATED, ROWS, COLUMNS, DEPTH,
        )  # fmt: skip


def multiply_few(
    out: Tensor,
    xa: Tensor,
    left: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    is_added: bool,
    is_gated: bool,
    addresses: Tensor | None,
    tiles: Tensor | None,
    ranks: Tensor | None,
    scalings: Tensor | None,
    num_linears: int,
) -> None:
    """See `few_rows.MULTIPLY_FEW`."""
    num_rows, d_out = out.shape
    rows, columns = max(TILE_ROWS, power_of_two(num_rows)), columns_of(len(weight))
    num_columns = blocks_of(d_out, columns // 2 if is_gated else columns)
    rank_blocks = blocks_of(xa.shape[2], RANKS)
    num_shrinking = 0 if tiles is None else len(tiles) * rank_blocks
    _multiply_few[num_shrinking + num_columns,](
        out, xa, left, weight, bias, norm_weight, eps, addresses, tiles, ranks, scalings,
        num_rows, d_out, left.shape[1], out.stride(0), left.stride(0), xa.shape[2],
        num_shrinking, rank_blocks,
        G=num_linears, HAS_NORM=norm_weight is not None, HAS_BIAS=bias is not None, ADDS=is_added, IS_GATED=is_gated,
        SHRINKS=tiles is not None, ROWS=rows, COLUMNS=columns, DEPTH=DEPTH, TILE=TILE_ROWS, RANKS=RANKS,
        **options_of(rows, columns),
    )  # fmt: skip


def options_of(rows: int, columns: int) -> dict[str, int]:
    """Return the options of a program of so many rows and columns: four warps cannot hold 128 columns in registers."""
    num_stages = min(STAGES_MAX, PIPELINE_BYTES // (2 * DEPTH * (rows + columns)))
    return {"num_stages": num_stages, "num_warps": 8 if columns > COLUMNS_OF_FOUR else 4}

"""A gate joined with the sums of the adapters around it on a GPU, in Triton: one kernel each way.

In the forward the adapters of gate and up are added where the gate is applied; in the backward those of the next linear
where its gradient goes through the gate. So of what frozen products have written, gate and up are read once and written
once, and the gradient of the gate's output is read once. Imported by the first launch alone (`gpu_operations`): a CPU
has no Triton.

Does not depend on runs, the bank or models.

Main invariants: the bits are those of `expand` and then `gate`, and of `expand_inputs` and then `gate_backward`: what
these write between is rounded as they round it. A program reads the rows and the matrices of one adapter, or of a tile
without one, whose number of rows is negative: these rows go through the gate, too.

Dimensions: T rows of the pass, N rows of a tile, L tiles, S adapters, F features of the gate, R padded rank of an
adapter, M the ranks of all linears of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.adapter_kernels import (
    ALIGNED_BYTES,
    RANK_DEPTH,
    RANK_MULTIPLE,
    padded_rank,
    plus_product,
    times_matrix,
)
from workers.model.gpu_operations import EXPAND_GATE_COLUMNS, blocks_of
from workers.model.layer_kernels import gate_gradients, gated


@triton.jit
def _adapted(before, xa, address, rank, rows, is_row, columns, is_column, xa_stride, d_out, RANK: tl.constexpr):
    """Return before + xa B^T, rounded; before, if the address of B^T or the rank is 0."""
    B = tl.multiple_of(address.to(tl.pointer_type(before.dtype)), ALIGNED_BYTES)
    depth, rank = tl.arange(0, RANK), tl.where(address != 0, rank, 0)
    is_rank = depth < rank
    own = tl.load(xa + rows[:, None] * xa_stride + depth[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
    matrix = tl.load(
        B + depth[:, None] * d_out + columns[None, :], mask=is_rank[:, None] & is_column[None, :], other=0.0
    )
    added = plus_product(tl.zeros(before.shape, tl.float32), own, matrix)
    return tl.where(rank != 0, (before + added).to(before.dtype), before)


@triton.jit
def _expand_gate(
    out, gate_up, gate_up_stride, xa, addresses, tiles, ranks, xa_stride, d_out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Add xa B^T to gate and up[rows of a tile, some columns], and apply the gate. Grid: tiles, columns."""
    tile = tl.program_id(0)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    rank = tl.where(count > 0, tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE), 0)
    if count != 0:
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = tl.arange(0, ROWS) < tl.abs(count), columns < d_out
        mask = is_row[:, None] & is_column[None, :]
        source = gate_up + rows[:, None] * gate_up_stride + columns[None, :]
        gate = _adapted(
            tl.load(source, mask=mask, other=0.0), xa, tl.load(addresses + 4 * adapter + 1), rank,
            rows, is_row, columns, is_column, xa_stride, d_out, RANK,
        )  # fmt: skip
        tl.store(source, gate, mask=mask)
        up = _adapted(
            tl.load(source + d_out, mask=mask, other=0.0), xa + rank, tl.load(addresses + 4 * adapter + 2), rank,
            rows, is_row, columns, is_column, xa_stride, d_out, RANK,
        )  # fmt: skip
        tl.store(source + d_out, up, mask=mask)
        target = out + rows[:, None] * d_out + columns[None, :]
        tl.store(target, gated(gate.to(tl.float32), up.to(tl.float32)).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expand_gate_backward(
    dgate_up, dout, gate_up, dout_stride, gate_up_stride, dxa, addresses, tiles, ranks, dxa_stride, d_in,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Set the gradients of gate and up[rows of a tile, some columns] from dout + dxa A. Grid: tiles, columns."""
    tile = tl.program_id(0)
    start, count, adapter = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    address = tl.load(addresses + 4 * adapter)
    width = tl.where((address != 0) & (count > 0), tl.multiple_of(tl.load(ranks + adapter), RANK_MULTIPLE), 0)
    if count != 0:
        A = tl.multiple_of(address.to(tl.pointer_type(dout.dtype.element_ty)), ALIGNED_BYTES)
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = tl.arange(0, ROWS) < tl.abs(count), columns < d_in
        mask = is_row[:, None] & is_column[None, :]
        before = tl.load(dout + rows[:, None] * dout_stride + columns[None, :], mask=mask, other=0.0)
        added = times_matrix(
            dxa, dxa_stride, A, rows, is_row, columns, is_column, width, d_in, ROWS, COLUMNS, DEPTH
        )  # fmt: skip
        dy = tl.where(width != 0, (before + added).to(before.dtype), before).to(tl.float32)
        source = gate_up + rows[:, None] * gate_up_stride + columns[None, :]
        gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(source + d_in, mask=mask, other=0.0).to(tl.float32)
        dgate, dup = gate_gradients(dy, gate, up)
        target = dgate_up + rows[:, None] * (2 * d_in) + columns[None, :]
        tl.store(target, dgate.to(dgate_up.dtype.element_ty), mask=mask)
        tl.store(target + d_in, dup.to(dgate_up.dtype.element_ty), mask=mask)


def expand_gate(
    out: Tensor, gate_up: Tensor, xa: Tensor, addresses: Tensor, tiles: Tensor, ranks: Tensor, tile_rows: int
) -> None:
    """See `gpu_operations.EXPAND_GATE`."""
    d_out = out.shape[1]
    _expand_gate[len(tiles), blocks_of(d_out, EXPAND_GATE_COLUMNS)](
        out, gate_up, gate_up.stride(0), xa, addresses, tiles, ranks, xa.shape[2], d_out,
        ROWS=tile_rows, COLUMNS=EXPAND_GATE_COLUMNS, RANK=padded_rank(xa.shape[2], 2),
    )  # fmt: skip


def expand_gate_backward(
    dgate_up: Tensor,
    dout: Tensor,
    gate_up: Tensor,
    dxa: Tensor,
    addresses: Tensor,
    tiles: Tensor,
    ranks: Tensor,
    tile_rows: int,
) -> None:
    """See `gpu_operations.EXPAND_GATE_BACKWARD`."""
    d_in = dout.shape[1]
    _expand_gate_backward[len(tiles), blocks_of(d_in, EXPAND_GATE_COLUMNS)](
        dgate_up, dout, gate_up, dout.stride(0), gate_up.stride(0), dxa, addresses, tiles, ranks, dxa.stride(0), d_in,
        ROWS=tile_rows, COLUMNS=EXPAND_GATE_COLUMNS, DEPTH=RANK_DEPTH,
    )  # fmt: skip

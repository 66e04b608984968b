"""The elementwise chains of a decoder layer on a GPU, forward and backward: kernels in Triton.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. The operations are described in
`layer_operations`. Each reads its operands once, computes in fp32 and rounds once.

Does not depend on models or passes.

Main invariants: a program reads and writes one row, or columns of one. The order of a row's sums depends on its
features and on alignment alone, so a row's bits do not depend on the other rows of a pass.

Dimensions: T rows of the pass, H query heads, K key-value heads, E head dimension (rotated in halves), F features of
the gate, D hidden size.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import blocks_of, power_of_two

TILE_PAIRS = 1024
"""Values of a first half, and as many of a second, that a program of heads has at a time, in as many heads as fit."""
GATE_COLUMNS = 1024
"""Columns of a program of the gate."""
NORM_COLUMNS, NORM_WARPS = 256, 16
"""Columns of a row for each of its warps, so that a thread loads 16 bytes at a time; and the most warps of a row."""


@triton.jit
def _halves(pointer, is_value, half):
    """Return the two halves of heads in fp32; zeros where a head has no value."""
    first = tl.load(pointer, mask=is_value, other=0.0)
    second = tl.load(pointer + half, mask=is_value, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _store_halves(pointer, first, second, is_value, half):
    """Round the two halves of heads, and store them."""
    tl.store(pointer, first.to(pointer.dtype.element_ty), mask=is_value)
    tl.store(pointer + half, second.to(pointer.dtype.element_ty), mask=is_value)


@triton.jit
def _inverse(x_first, x_second, eps, E: tl.constexpr):
    """Return 1 / rms (heads, 1) of heads."""
    squares = tl.sum(x_first * x_first, 1) + tl.sum(x_second * x_second, 1)
    return (1 / tl.sqrt(squares / E + eps))[:, None]


@triton.jit
def _rotate_group(
    out, source, weight, cos_first, cos_second, sin_first, sin_second, eps,
    COUNT: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate all query heads of a row, or all key heads, some at a time."""
    half: tl.constexpr = E // 2
    place = tl.arange(0, HALF)[None, :]
    w_first, w_second = 1.0, 1.0
    if HAS_NORMS:
        w_first, w_second = _halves(weight + place, place < half, half)
    for start in range(0, COUNT, TILE):
        heads = start + tl.arange(0, TILE)[:, None]
        is_value = (heads < COUNT) & (place < half)
        x_first, x_second = _halves(source + heads * E + place, is_value, half)
        if HAS_NORMS:
            inverse = _inverse(x_first, x_second, eps, E)
            x_first *= inverse * w_first
            x_second *= inverse * w_second
        y_first = x_first * cos_first - x_second * sin_first
        y_second = x_second * cos_second + x_first * sin_second
        _store_halves(out + heads * E + place, y_first, y_second, is_value, half)


@triton.jit
def _rotate_heads(
    out, projected, cos, sin, query_weight, key_weight, eps, row_stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the queries and keys of a row. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = E // 2
    place = tl.arange(0, HALF)[None, :]
    cos_first, cos_second = _halves(cos + row * E + place, place < half, half)
    sin_first, sin_second = _halves(sin + row * E + place, place < half, half)
    source, target = projected + row * row_stride, out + row * ((H + K) * E)
    _rotate_group(
        target, source, query_weight, cos_first, cos_second, sin_first, sin_second, eps,
        H, E, HALF, QUERY_TILE, HAS_NORMS,
    )  # fmt: skip
    _rotate_group(
        target + H * E, source + H * E, key_weight, cos_first, cos_second, sin_first, sin_second, eps,
        K, E, HALF, KEY_TILE, HAS_NORMS,
    )  # fmt: skip


@triton.jit
def _rotate_group_backward(
    dx, dy, dy_head_stride, source, weight, cos_first, cos_second, sin_first, sin_second, eps,
    COUNT: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Set the gradients of all query heads of a row as projected, or of all key heads, some at a time."""
    half: tl.constexpr = E // 2
    place = tl.arange(0, HALF)[None, :]
    w_first, w_second = 1.0, 1.0
    if HAS_NORMS:
        w_first, w_second = _halves(weight + place, place < half, half)
    for start in range(0, COUNT, TILE):
        heads = start + tl.arange(0, TILE)[:, None]
        is_value = (heads < COUNT) & (place < half)
        dy_first, dy_second = _halves(dy + heads * dy_head_stride + place, is_value, half)
        dx_first = dy_first * cos_first + dy_second * sin_second
        dx_second = dy_second * cos_second - dy_first * sin_first
        if HAS_NORMS:
            # With u = x * inverse:  dx = inverse * (w dy - u * mean(u * w dy)).
            x_first, x_second = _halves(source + heads * E + place, is_value, half)
            inverse = _inverse(x_first, x_second, eps, E)
            dx_first, dx_second = dx_first * w_first, dx_second * w_second
            total = (tl.sum(dx_first * x_first, 1) + tl.sum(dx_second * x_second, 1))[:, None]
            share = total * inverse * inverse / E
            dx_first = (dx_first - x_first * share) * inverse
            dx_second = (dx_second - x_second * share) * inverse
        _store_halves(dx + heads * E + place, dx_first, dx_second, is_value, half)


@triton.jit
def _rotate_heads_backward(
    dprojected, dquery, dkey, dvalue, projected, cos, sin, query_weight, key_weight, eps,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, row_stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr,
    QUERY_TILE: tl.constexpr, KEY_TILE: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Set the gradients of a row's projections. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = E // 2
    place = tl.arange(0, HALF)[None, :]
    cos_first, cos_second = _halves(cos + row * E + place, place < half, half)
    sin_first, sin_second = _halves(sin + row * E + place, place < half, half)
    source, target = projected + row * row_stride, dprojected + row * ((H + 2 * K) * E)
    _rotate_group_backward(
        target, dquery + row * query_stride, query_head_stride, source, query_weight,
        cos_first, cos_second, sin_first, sin_second, eps, H, E, HALF, QUERY_TILE, HAS_NORMS,
    )  # fmt: skip
    _rotate_group_backward(
        target + H * E, dkey + row * key_stride, key_head_stride, source + H * E, key_weight,
        cos_first, cos_second, sin_first, sin_second, eps, K, E, HALF, KEY_TILE, HAS_NORMS,
    )  # fmt: skip
    for start in range(0, K, KEY_TILE):
        heads = start + tl.arange(0, KEY_TILE)[:, None]
        is_value = (heads < K) & (place < half)
        first, second = _halves(dvalue + row * value_stride + heads * value_head_stride + place, is_value, half)
        _store_halves(target + (H + K + heads) * E + place, first, second, is_value, half)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)); the exponential never overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1 + small)


@triton.jit
def gated(gate, up):
    """Return silu(gate) * up."""
    return gate * sigmoid(gate) * up


@triton.jit
def gate_gradients(dy, gate, up):
    """Return the gradients of gate and up from that of `gated`."""
    share = sigmoid(gate)
    return dy * up * share * (1 + gate * (1 - share)), dy * gate * share


@triton.jit
def _gate(out, gate_up, row_stride, F: tl.constexpr, COLUMNS: tl.constexpr):
    """Set some columns of a row to silu(gate) * up. Grid: rows, columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < F
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * F + column, gated(gate, up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _gate_backward(dgate_up, dout, gate_up, dout_stride, row_stride, F: tl.constexpr, COLUMNS: tl.constexpr):
    """Set the gradients of some columns of a row's gate, and of the same of its up. Grid: rows, columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < F
    source = gate_up + row * row_stride + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=is_column, other=0.0).to(tl.float32)
    dy = tl.load(dout + row * dout_stride + column, mask=is_column, other=0.0).to(tl.float32)
    dgate, dup = gate_gradients(dy, gate, up)
    target = dgate_up + row * (2 * F) + column
    tl.store(target, dgate.to(dgate_up.dtype.element_ty), mask=is_column)
    tl.store(target + F, dup.to(dgate_up.dtype.element_ty), mask=is_column)


@triton.jit
def _add_norm(
    total, normalised, inverse, hidden, added, weight, eps, hidden_stride, added_stride,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add two rows, and normalise the sum. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_column = column < D
    x = tl.load(hidden + row * hidden_stride + column, mask=is_column, other=0.0).to(tl.float32)
    x += tl.load(added + row * added_stride + column, mask=is_column, other=0.0).to(tl.float32)
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * D + column, rounded, mask=is_column)
    x = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(x * x, 0) / D + eps)
    tl.store(inverse + row, scale)
    w = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normalised + row * D + column, (x * scale * w).to(normalised.dtype.element_ty), mask=is_column)


@triton.jit
def _norm_add_backward(
    dhidden, dnormalised, hidden, inverse, weight, dhidden_stride, dnormalised_stride, hidden_stride,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a row as normalised to its other one. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    is_column = column < D
    target = dhidden + row * dhidden_stride + column
    dx = tl.load(dnormalised + row * dnormalised_stride + column, mask=is_column, other=0.0).to(tl.float32)
    x = tl.load(hidden + row * hidden_stride + column, mask=is_column, other=0.0).to(tl.float32)
    dx *= tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    before = tl.load(target, mask=is_column, other=0.0).to(tl.float32)
    # As for heads:  dx = inverse * (w dy - u * mean(u * w dy)).
    scale = tl.load(inverse + row)
    share = tl.sum(dx * x, 0) * scale * scale / D
    tl.store(target, (before + (dx - x * share) * scale).to(dhidden.dtype.element_ty), mask=is_column)


def _sizes(num_heads: int, num_keys: int, head_dim: int) -> dict[str, int]:
    """Return the constants of the kernels of heads."""
    half = power_of_two(head_dim // 2)
    query_tile, key_tile = (min(max(TILE_PAIRS // half, 1), power_of_two(count)) for count in (num_heads, num_keys))
    return {
        "H": num_heads, "K": num_keys, "E": head_dim, "HALF": half, "QUERY_TILE": query_tile, "KEY_TILE": key_tile,
    }  # fmt: skip


def rotate_heads(
    out: Tensor,
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    num_heads: int,
) -> None:
    """See `layer_operations.ROTATE_HEADS`."""
    num_rows, num_rotated, head_dim = out.shape
    weights = (projected, projected) if query_weight is None or key_weight is None else (query_weight, key_weight)
    _rotate_heads[num_rows,](
        out, projected, cos, sin, *weights, eps, projected.stride(0),
        **_sizes(num_heads, num_rotated - num_heads, head_dim), HAS_NORMS=query_weight is not None,
    )  # fmt: skip


def rotate_heads_backward(
    dprojected: Tensor,
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
    projected: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> None:
    """See `layer_operations.ROTATE_HEADS_BACKWARD`."""
    num_rows, num_heads, head_dim = dquery.shape
    source, weights = dprojected, (dprojected, dprojected)  # neither is read without norms
    if has_norms := query_weight is not None and key_weight is not None:
        assert projected is not None, "a norm's gradient needs what was normalised"
        source, weights = projected, (query_weight, key_weight)
    strides = [stride for rows in (dquery, dkey, dvalue) for stride in rows.stride()[:2]]
    _rotate_heads_backward[num_rows,](
        dprojected, dquery, dkey, dvalue, source, cos, sin, *weights, eps, *strides, source.stride(0),
        **_sizes(num_heads, dkey.shape[1], head_dim), HAS_NORMS=has_norms,
    )  # fmt: skip


def gate(out: Tensor, gate_up: Tensor) -> None:
    """See `layer_operations.GATE`."""
    num_rows, width = out.shape
    _gate[num_rows, blocks_of(width, GATE_COLUMNS)](
        out, gate_up, gate_up.stride(0), F=width, COLUMNS=GATE_COLUMNS
    )  # fmt: skip


def gate_backward(dgate_up: Tensor, dout: Tensor, gate_up: Tensor) -> None:
    """See `layer_operations.GATE_BACKWARD`."""
    num_rows, width = dout.shape
    _gate_backward[num_rows, blocks_of(width, GATE_COLUMNS)](
        dgate_up, dout, gate_up, dout.stride(0), gate_up.stride(0), F=width, COLUMNS=GATE_COLUMNS
    )  # fmt: skip


def add_norm(
    total: Tensor, normalised: Tensor, inverse: Tensor, hidden: Tensor, added: Tensor, weight: Tensor, eps: float
) -> None:
    """See `layer_operations.ADD_NORM`."""
    num_rows, num_columns = hidden.shape
    width = power_of_two(num_columns)
    _add_norm[num_rows,](
        total, normalised, inverse, hidden, added, weight, eps, hidden.stride(0), added.stride(0),
        D=num_columns, WIDTH=width, num_warps=norm_warps(width),
    )  # fmt: skip


def norm_add_backward(dhidden: Tensor, dnormalised: Tensor, hidden: Tensor, inverse: Tensor, weight: Tensor) -> None:
    """See `layer_operations.NORM_ADD_BACKWARD`."""
    num_rows, num_columns = hidden.shape
    width = power_of_two(num_columns)
    _norm_add_backward[num_rows,](
        dhidden, dnormalised, hidden, inverse, weight, dhidden.stride(0), dnormalised.stride(0), hidden.stride(0),
        D=num_columns, WIDTH=width, num_warps=norm_warps(width),
    )  # fmt: skip


def norm_warps(width: int) -> int:
    """Return the warps of a row of so many columns, a power of two."""
    return min(max(width // NORM_COLUMNS, 1), NORM_WARPS)

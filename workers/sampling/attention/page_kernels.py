"""What surrounds attention over pages on a GPU: two kernels in Triton, one program for each row and head.

Imported by the first launch alone (`workers.model.gpu_operations`): a CPU has no Triton. The operations are described
in `pages`.

Main invariant: a program reads and writes one head of one row.

Dimensions: T rows of the pass, D next tokens, H query heads, K key-value heads, G query heads per key-value head, E
head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import power_of_two


@triton.jit
def _rotate(
    query, keys, values, projected, cos, sin, query_weight, key_weight, slots, num_next, eps, row_stride,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate a head of a row, and write it where it belongs. Grid: rows, H + 2 K heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = E // 2
    place = tl.arange(0, HALF)
    is_place = place < half
    source = projected + row * row_stride + head * E + place
    first = tl.load(source, mask=is_place, other=0.0)
    second = tl.load(source + half, mask=is_place, other=0.0)
    if head >= H + K:
        target = values + tl.load(slots + row) * (K * E) + (head - H - K) * E + place
        tl.store(target, first, mask=is_place)
        tl.store(target + half, second, mask=is_place)
    else:
        x_first, x_second = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORMS:
            squares = tl.sum(x_first * x_first, 0) + tl.sum(x_second * x_second, 0)
            inverse = 1 / tl.sqrt(squares / E + eps)
            weight = query_weight
            if head >= H:
                weight = key_weight
            x_first *= inverse * tl.load(weight + place, mask=is_place, other=0.0).to(tl.float32)
            x_second *= inverse * tl.load(weight + half + place, mask=is_place, other=0.0).to(tl.float32)
        angle = row * E + place
        cos_first = tl.load(cos + angle, mask=is_place, other=0.0).to(tl.float32)
        cos_second = tl.load(cos + angle + half, mask=is_place, other=0.0).to(tl.float32)
        sin_first = tl.load(sin + angle, mask=is_place, other=0.0).to(tl.float32)
        sin_second = tl.load(sin + angle + half, mask=is_place, other=0.0).to(tl.float32)
        new_first = x_first * cos_first - x_second * sin_first
        new_second = x_second * cos_second + x_first * sin_second
        if head < H:
            number = head
            if row < num_next:  # as G rows of K heads
                number = head % (H // K) * K + head // (H // K)
            target = query + row * (H * E) + number * E + place
        else:
            target = keys + tl.load(slots + row) * (K * E) + (head - H) * E + place
        tl.store(target, new_first.to(query.dtype.element_ty), mask=is_place)
        tl.store(target + half, new_second.to(query.dtype.element_ty), mask=is_place)


@triton.jit
def _join(
    out, first, first_sums, second, second_sums, num_rows,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add two results of a head, each with the share of all weights that it had. Grid: rows, H heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = H // K
    group_row, key_head = row * G + head % G, head // G
    place = tl.arange(0, WIDTH)
    is_place = place < E
    sums = key_head * num_rows * G + group_row
    share = 1 / (1 + tl.exp(tl.load(second_sums + sums) - tl.load(first_sums + sums)))
    source = (group_row * K + key_head) * E + place
    one = tl.load(first + source, mask=is_place, other=0.0).to(tl.float32)
    other = tl.load(second + source, mask=is_place, other=0.0).to(tl.float32)
    tl.store(out + row * (H * E) + head * E + place, (other + share * (one - other)).to(out.dtype.element_ty), is_place)


def rotate(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    projected: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    slots: Tensor,
    num_next: int,
    eps: float,
) -> None:
    """See `pages.ROTATE`."""
    num_rows, num_heads, head_dim = query.shape
    num_keys = keys.shape[-2]
    weights = (projected, projected) if query_weight is None or key_weight is None else (query_weight, key_weight)
    _rotate[num_rows, num_heads + 2 * num_keys](
        query, keys, values, projected, cos, sin, *weights, slots, num_next, eps, projected.stride(0),
        H=num_heads, K=num_keys, E=head_dim, HALF=power_of_two(head_dim // 2),
        HAS_NORMS=query_weight is not None, num_warps=1,
    )  # fmt: skip


def join(out: Tensor, first: Tensor, first_sums: Tensor, second: Tensor, second_sums: Tensor) -> None:
    """See `pages.JOIN`."""
    num_rows, num_heads, head_dim = out.shape
    _join[num_rows, num_heads](
        out, first, first_sums, second, second_sums, num_rows,
        H=num_heads, K=first.shape[1], E=head_dim, WIDTH=power_of_two(head_dim), num_warps=1,
    )  # fmt: skip

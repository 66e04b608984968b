"""The heads of linear attention on a GPU, in Triton. Imported by the first launch alone (`gpu_operations`).

The operations are described in `delta_heads`. A program walks over some tokens of a chunk, for one head, and has the
four rows of a convolution in registers. Everything is computed in fp32 and rounded once, at the end.

Main invariant: a program reads and writes one head of one chunk, and the order of its sums depends on the sizes of a
head alone. So a chunk's bits do not depend on the others of a pass, and what is not finite stays in it.

Dimensions as in `delta_heads`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.delta_heads import TOKENS
from workers.model.delta_rule import UNIT_EPS
from workers.model.gpu_operations import blocks_of, power_of_two
from workers.model.layer_kernels import sigmoid

WARP_VALUES = 128
"""Of a head, those of a warp: 4 in each thread, which loads 8 bytes of a row at a time."""


@triton.jit
def _row(source, place, token, stride, num_rows, E: tl.constexpr):
    """Return a head's values of a row in fp32; zeros where there is none."""
    is_value = place < tl.where(token < num_rows, E, 0)
    return tl.load(source + token * stride + place, mask=is_value, other=0.0).to(tl.float32)


@triton.jit
def _weights(of_head, is_value, width):
    """Return the four weights of a head's channels, the oldest token's first."""
    w0 = tl.load(of_head, mask=is_value, other=0.0)
    w1 = tl.load(of_head + width, mask=is_value, other=0.0)
    w2 = tl.load(of_head + 2 * width, mask=is_value, other=0.0)
    return w0, w1, w2, tl.load(of_head + 3 * width, mask=is_value, other=0.0)


@triton.jit
def _convolve(
    heads, inputs, conv, length, eps, chunk_stride, token_stride, num_tokens,
    H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, IS_UNIT: tl.constexpr,
):  # fmt: skip
    """Set some tokens of a head. Grid: chunks, heads, blocks of tokens."""
    chunk, head, begin = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TOKENS
    place = tl.arange(0, WIDTH)
    num_rows = num_tokens + 3
    source = inputs + chunk * chunk_stride + head * E
    target = heads + (chunk * H + head) * num_tokens * E + place
    w0, w1, w2, w3 = _weights(conv + head * E + place, place < E, H * E)
    x0 = _row(source, place, begin, token_stride, num_rows, E)
    x1 = _row(source, place, begin + 1, token_stride, num_rows, E)
    x2 = _row(source, place, begin + 2, token_stride, num_rows, E)
    for token in range(begin, tl.minimum(begin + TOKENS, num_tokens)):
        x3 = _row(source, place, token + 3, token_stride, num_rows, E)
        total = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        y = total * sigmoid(total)
        if IS_UNIT:
            y *= length / tl.sqrt(tl.sum(y * y, 0) + eps)
        tl.store(target + token * E, y, mask=place < E)
        x0, x1, x2 = x1, x2, x3


@triton.jit
def _convolve_backward(
    dinputs, dheads, inputs, conv, length, eps, dheads_chunk_stride, dheads_head_stride, dheads_token_stride,
    chunk_stride, token_stride, num_tokens,
    H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, IS_UNIT: tl.constexpr,
):  # fmt: skip
    """Set the gradients of some rows of a head, each of which the three tokens before it have a part in.

    Grid: chunks, heads, blocks of tokens; the last block has the three rows behind the last token's, too.
    """
    chunk, head, begin = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * TOKENS
    place = tl.arange(0, WIDTH)
    num_rows = num_tokens + 3
    end = tl.where(begin + TOKENS < num_tokens, begin + TOKENS, num_rows)
    first = tl.maximum(begin - 3, 0)
    source = inputs + chunk * chunk_stride + head * E
    target = dinputs + chunk * num_rows * (H * E) + head * E + place
    gradient = dheads + chunk * dheads_chunk_stride + head * dheads_head_stride
    w0, w1, w2, w3 = _weights(conv + head * E + place, place < E, H * E)
    x0 = _row(source, place, first, token_stride, num_rows, E)
    x1 = _row(source, place, first + 1, token_stride, num_rows, E)
    x2 = _row(source, place, first + 2, token_stride, num_rows, E)
    d1, d2, d3 = tl.zeros_like(x0), tl.zeros_like(x0), tl.zeros_like(x0)  # of one, two and three tokens before
    for token in range(first, end):
        x3 = _row(source, place, token + 3, token_stride, num_rows, E)
        total = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        share = sigmoid(total)
        dy = _row(gradient, place, token, dheads_token_stride, num_tokens, E)
        if IS_UNIT:
            # With u = y * inverse:  dy = length * inverse * (du - u * sum(u * du)).
            y = total * share
            inverse = 1 / tl.sqrt(tl.sum(y * y, 0) + eps)
            along = tl.sum(dy * y, 0) * inverse * inverse
            dy = (dy - y * along) * (inverse * length)
        d0 = tl.where(token < num_tokens, dy * share * (1 + total * (1 - share)), 0.0)
        dx = d0 * w0 + d1 * w1 + d2 * w2 + d3 * w3
        tl.store(target + token * (H * E), dx.to(dinputs.dtype.element_ty), mask=place < tl.where(token < begin, 0, E))
        x0, x1, x2 = x1, x2, x3
        d1, d2, d3 = d0, d1, d2


def convolve(heads: Tensor, inputs: Tensor, conv: Tensor, length: float) -> None:
    """See `delta_heads.CONVOLVE`."""
    _convolve[_grid(heads)](
        heads, inputs, conv, length, UNIT_EPS, *inputs.stride()[:2], heads.shape[2],
        **_sizes(heads, is_unit=length > 0),
    )  # fmt: skip


def convolve_backward(dinputs: Tensor, dheads: Tensor, inputs: Tensor, conv: Tensor, length: float) -> None:
    """See `delta_heads.CONVOLVE_BACKWARD`."""
    _convolve_backward[_grid(dheads)](
        dinputs, dheads, inputs, conv, length, UNIT_EPS, *dheads.stride()[:3], *inputs.stride()[:2], dheads.shape[2],
        **_sizes(dheads, is_unit=length > 0),
    )  # fmt: skip


def _grid(heads: Tensor) -> tuple[int, int, int]:
    return heads.shape[0], heads.shape[1], blocks_of(heads.shape[2], TOKENS)


def _sizes(heads: Tensor, *, is_unit: bool) -> dict[str, int]:
    """Return the constants of a launch, and its warps: 128 values in each."""
    width = power_of_two(heads.shape[3])
    constants = {"H": heads.shape[1], "E": heads.shape[3], "WIDTH": width, "TOKENS": TOKENS, "IS_UNIT": is_unit}
    return constants | {"num_warps": max(1, width // WARP_VALUES)}

"""The backward of causal attention over packed short sequences on a GPU: a kernel in Triton.

Imported by the first launch alone (`gpu_operations`): a CPU has no Triton. The operation is described in
`gpu_attention`. A program has a tile of a sequence's keys, or of its queries, with all query heads that share a key
head. It computes the weights again from the log-sum-exps of the forward, in fp32, and multiplies them as the library
does, rounded to the inputs' dtype. Sums stay in registers, so nothing is padded, zeroed or added in memory.

Does not depend on models or passes.

Main invariant: a sequence's gradients depend only on its own rows, and on whether they fit into one tile: there are no
atomic additions, and tiles begin with their sequence.

Dimensions: T rows of the pass, H query heads, K key-value heads, G query heads per key-value head, E head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_attention import tile_tokens
from workers.model.gpu_operations import blocks_of, power_of_two

PART = 32
"""Tokens of the other side that a product of a tile has."""
WARPS, STAGES = 8, 1
"""Two sums of a tile and two products stay in registers: few for each thread. Short sequences have few tiles to read
ahead."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _loaded(pointer, row_stride, tokens, length, E: tl.constexpr, WIDTH: tl.constexpr, WIDENS: tl.constexpr):
    """Return the values (tokens, WIDTH) of a head, zeros behind a sequence's end."""
    place = tl.arange(0, WIDTH)[None, :]
    rows = pointer + tokens.to(tl.int64)[:, None] * row_stride + place
    values = tl.load(rows, mask=(tokens < length)[:, None] & (place < E), other=0.0)
    return values.to(tl.float32) if WIDENS else values


@triton.jit
def _stored(pointer, row_stride, tokens, length, values, E: tl.constexpr, WIDTH: tl.constexpr):
    """Round the values (tokens, WIDTH) of a head, and store those of the sequence."""
    place = tl.arange(0, WIDTH)[None, :]
    rows = pointer + tokens.to(tl.int64)[:, None] * row_stride + place
    is_stored = (tokens < length)[:, None] & (place < E)
    tl.store(rows, values.to(pointer.dtype.element_ty), mask=is_stored)


@triton.jit
def _query_side(
    query, dout, out, log_sums, query_stride, H, tokens, length,
    E: tl.constexpr, WIDTH: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """Return queries and gradients (tokens, WIDTH) of a head, its log-sum-exps, and sum(dout * out) of each token."""
    own = _loaded(query, query_stride, tokens, length, E, WIDTH, WIDENS)
    down = _loaded(dout, H * E, tokens, length, E, WIDTH, WIDENS)
    result = _loaded(out, H * E, tokens, length, E, WIDTH, WIDENS)
    sums = tl.load(log_sums + tokens, mask=tokens < length, other=0.0)
    return own, down, sums, tl.sum(down.to(tl.float32) * result.to(tl.float32), 1)


@triton.jit
def _weights(keys, values, own, down, sums, deltas, key_tokens, tokens, length, scaling, window, dtype: tl.constexpr):
    """Return weights and gradients of scores / scaling, (keys, queries), rounded: zeros where a query sees no key."""
    scores = tl.dot(keys, tl.trans(own), input_precision="ieee")
    is_seen = (key_tokens[:, None] <= tokens[None, :]) & (tokens < length)[None, :]
    is_seen &= key_tokens[:, None] + window > tokens[None, :]
    weights = tl.where(is_seen, tl.exp2((scores * scaling - sums[None, :]) * LOG2_E), 0.0)
    dweights = tl.dot(values, tl.trans(down), input_precision="ieee")
    dscores = tl.where(is_seen, weights * (dweights - deltas[None, :]), 0.0)
    return weights.to(dtype).to(own.dtype), dscores.to(dtype).to(own.dtype)


@triton.jit
def _attention_gradients(
    dquery, dkey, dvalue, dout, query, key, value, out, log_sums, ends, num_rows, num_tiles,
    query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, scaling, window,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
    WIDENS: tl.constexpr,
):  # fmt: skip
    """Set the gradients of a tile of keys and values, or of queries. Grid: both tiles, key heads, sequences.

    A sequence of one tile has all its gradients from the program of its keys.
    """
    sequence, head, tile = tl.program_id(2), tl.program_id(1).to(tl.int64), tl.program_id(0)
    G: tl.constexpr = H // K
    start = tl.load(ends + sequence).to(tl.int64)
    length = (tl.load(ends + sequence + 1) - start).to(tl.int32)
    begin = tile % num_tiles * TILE
    dtype: tl.constexpr = query.dtype.element_ty
    query += start * query_stride + head * G * query_head_stride
    key += start * key_stride + head * key_head_stride
    value += start * value_stride + head * value_head_stride
    of_heads = (start * H + head * G) * E
    of_keys = (start * K + head) * E
    log_sums += head * G * num_rows + start
    own_tokens = begin + tl.arange(0, TILE)
    if (tile < num_tiles) & (begin < length):
        keys = _loaded(key, key_stride, own_tokens, length, E, WIDTH, WIDENS)
        values = _loaded(value, value_stride, own_tokens, length, E, WIDTH, WIDENS)
        dkeys, dvalues = tl.zeros((TILE, WIDTH), tl.float32), tl.zeros((TILE, WIDTH), tl.float32)
        last = tl.minimum(length, begin + TILE - 1 + window)  # the first query that sees none of these keys
        for group in range(G):
            of_head = of_heads + group * E
            for first in range(begin, last, PART):
                tokens = first + tl.arange(0, PART)
                own, down, sums, deltas = _query_side(
                    query + group * query_head_stride, dout + of_head, out + of_head, log_sums + group * num_rows,
                    query_stride, H, tokens, length, E, WIDTH, WIDENS,
                )  # fmt: skip
                weights, dscores = _weights(
                    keys, values, own, down, sums, deltas, own_tokens, tokens, length, scaling, window, dtype
                )
                dvalues = tl.dot(weights, down, dvalues, input_precision="ieee")
                dkeys = tl.dot(dscores, own, dkeys, input_precision="ieee")
                if length <= TILE:
                    only = tl.dot(tl.trans(dscores), keys, input_precision="ieee") * scaling
                    _stored(dquery + of_head, H * E, tokens, length, only, E, WIDTH)
        _stored(dkey + of_keys, K * E, own_tokens, length, dkeys * scaling, E, WIDTH)
        _stored(dvalue + of_keys, K * E, own_tokens, length, dvalues, E, WIDTH)
    elif (length > TILE) & (begin < length):
        nearest = tl.maximum(begin + 1 - window, 0) // PART * PART
        for group in range(G):
            of_head = of_heads + group * E
            own, down, sums, deltas = _query_side(
                query + group * query_head_stride, dout + of_head, out + of_head, log_sums + group * num_rows,
                query_stride, H, own_tokens, length, E, WIDTH, WIDENS,
            )  # fmt: skip
            dqueries = tl.zeros((TILE, WIDTH), tl.float32)
            for first in range(nearest, begin + TILE, PART):
                tokens = first + tl.arange(0, PART)
                keys = _loaded(key, key_stride, tokens, length, E, WIDTH, WIDENS)
                values = _loaded(value, value_stride, tokens, length, E, WIDTH, WIDENS)
                _, dscores = _weights(
                    keys, values, own, down, sums, deltas, tokens, own_tokens, length, scaling, window, dtype
                )
                dqueries = tl.dot(tl.trans(dscores), keys, dqueries, input_precision="ieee")
            _stored(dquery + of_head, H * E, own_tokens, length, dqueries * scaling, E, WIDTH)


def attention_gradients(
    dquery: Tensor,
    dkey: Tensor,
    dvalue: Tensor,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    ends: Tensor,
    longest: int,
    scaling: float,
    window: int,
) -> None:
    """See `gpu_attention.ATTENTION_GRADIENTS`."""
    num_rows, num_heads, head_dim = query.shape
    num_keys = key.shape[1]
    num_tiles = blocks_of(longest, tile_tokens(head_dim))
    _attention_gradients[num_tiles * (1 if num_tiles == 1 else 2), num_keys, len(ends) - 1](
        dquery, dkey, dvalue, dout, query, key, value, out, log_sums, ends, num_rows, num_tiles,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], scaling, window,
        **_sizes(num_heads, num_keys, head_dim), WIDENS=bool(triton.knobs.runtime.interpret),
    )  # fmt: skip


def _sizes(num_heads: int, num_keys: int, head_dim: int) -> dict[str, int]:
    """Return the constants of a launch, its warps and its stages."""
    heads = {"H": num_heads, "K": num_keys, "E": head_dim, "WIDTH": max(16, power_of_two(head_dim))}
    return heads | {"TILE": tile_tokens(head_dim), "PART": PART, "num_warps": WARPS, "num_stages": STAGES}

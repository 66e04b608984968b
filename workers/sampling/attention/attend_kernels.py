"""Attention over pages of keys and values, in Triton: for builds of torch whose own kernel takes no table of pages.

Imported by the first launch alone (`workers.model.gpu_operations`): a CPU has no Triton. The operation is described in
`pages`. A program has some query rows of one sequence, with all query heads that share a key head as rows of one
product, and goes over the sequence's keys in tiles. Products have keys, or values of a head, for rows, and queries for
columns: tensor cores take 64 rows and as few as 8 columns, and a next token has few queries and many keys. Softmax is
of powers of two, in fp32.

Does not depend on models.

Main invariants: the order of a row's sums depends on its keys alone, because tiles and parts of keys begin at multiples
of their size, and tiles of queries have one size for next tokens and one for chunks. A key that a row does not see adds
zero, and a part without keys nothing. A program reads no key beyond its sequence's length.

Dimensions: S sequences, H query heads, K key-value heads, G query heads per key-value head, E head dimension, N query
rows of a program, times heads, W pages of the longest sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from workers.model.gpu_operations import blocks_of, power_of_two
from workers.sampling.attention.pages import PART_KEYS, TILE_VALUES, tile_rows

KEYS = 64
"""Of a tile: as many as a product of four warps has rows."""
WARPS, STAGES = 4, 3


@triton.jit
def _attend_pages(
    out, log_sums, query, keys, values, ends, lengths, table, behinds, num_rows, row_stride, head_stride, table_width,
    scaling, window,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, IS_CAUSAL: tl.constexpr, WIDENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BEHINDS: tl.constexpr,
):  # fmt: skip
    """Attend from some query rows of a sequence, all heads of a key head, to one part of its keys.

    Grid: tiles of rows, key heads of all parts, sequences. The last part has all keys behind it. A window begins with
    the tile that has its first key: the tiles before would add zero.
    """
    sequence, part, head = tl.program_id(2), tl.program_id(1) // K, tl.program_id(1) % K
    is_last = tl.program_id(1) + K >= tl.num_programs(1)
    G: tl.constexpr = H // K
    start, stop = tl.load(ends + sequence), tl.load(ends + sequence + 1)
    begin, count = tl.program_id(0) * ROWS, (stop - start) * G
    if begin < count:
        length = tl.load(lengths + sequence)
        query_place, key_place, place = begin + tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, WIDTH)
        is_query, is_place = query_place < count, place < E
        rows, heads = (start + query_place // G).to(tl.int64), head * G + query_place % G
        sum_of_row = log_sums + (part * H + heads) * num_rows + rows
        if part * PART >= length:
            tl.store(sum_of_row, tl.full((ROWS,), float("-inf"), tl.float32), mask=is_query)
        else:
            own = tl.load(
                query + rows[None, :] * row_stride + heads[None, :] * head_stride + place[:, None],
                mask=is_query[None, :] & is_place[:, None],
                other=0.0,
            )  # (E, N)
            seen, last = tl.full((ROWS,), 0, tl.int32) + length, length
            if IS_CAUSAL:
                seen = length - (stop - start) + 1 + query_place // G
                last = min(length, length - (stop - start) + 1 + (begin + ROWS - 1) // G)
            if not is_last:
                last = min(last, (part + 1) * PART)
            from_key, behind = part * PART, seen
            if HAS_WINDOW:
                if HAS_BEHINDS:
                    behind = tl.load(behinds + rows, mask=is_query, other=0)
                nearest = tl.min(tl.where(is_query, behind, length + window), 0) - window
                from_key = tl.maximum(from_key, tl.maximum(nearest, 0) // KEYS * KEYS)
            if WIDENS:
                own = own.to(tl.float32)
            scale = scaling * 1.4426950408889634  # log2(e)
            most = tl.full((ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            result = tl.zeros((WIDTH, ROWS), tl.float32)
            for first in range(from_key, last, KEYS):
                page = tl.load(table + sequence * table_width + first // PAGE).to(tl.int64)
                source = (page * PAGE + first % PAGE) * (K * E) + head * E
                source += key_place[:, None] * (K * E) + place[None, :]
                is_read = (first + key_place < length)[:, None] & is_place[None, :]
                own_keys = tl.load(keys + source, mask=is_read, other=0.0)
                own_values = tl.load(values + source, mask=is_read, other=0.0)
                if WIDENS:
                    own_keys, own_values = own_keys.to(tl.float32), own_values.to(tl.float32)
                scores = tl.dot(own_keys, own, input_precision="ieee")  # (keys, N)
                is_seen = (first + key_place)[:, None] < seen[None, :]
                if HAS_WINDOW:
                    is_seen &= (first + key_place + window)[:, None] >= behind[None, :]
                scores = tl.where(is_seen, scores, float("-inf"))
                new_most = tl.maximum(most, tl.max(scores, 0))
                base = new_most
                if HAS_WINDOW:
                    base = tl.where(new_most == float("-inf"), 0.0, new_most)  # no key of the row so far
                weights = tl.exp2(scores * scale - (base * scale)[None, :])
                kept = tl.exp2((most - base) * scale)
                total = total * kept + tl.sum(weights, 0)
                weights = weights.to(keys.dtype.element_ty).to(own_values.dtype)
                result = tl.dot(tl.trans(own_values), weights, result * kept[None, :], input_precision="ieee")
                most = new_most
            target = out + (part * num_rows + rows[None, :]) * (H * E) + heads[None, :] * E + place[:, None]
            divisor = total
            if HAS_WINDOW:
                divisor = tl.where(total == 0, 1.0, total)
            result = (result / divisor[None, :]).to(out.dtype.element_ty)
            tl.store(target, result, mask=is_query[None, :] & is_place[:, None])
            tl.store(sum_of_row, most * scaling + tl.log(divisor), mask=is_query)


@triton.jit
def _join_parts(
    out, log_sums, parts, part_sums, num_parts, num_rows, H: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Add the results of a head's parts, in order, each with the share of all weights it had. Grid: rows, heads."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, WIDTH)
    is_place = place < E
    own_sums = part_sums + head * num_rows + row
    most = tl.load(own_sums)
    for part in range(1, num_parts):
        most = tl.maximum(most, tl.load(own_sums + part * (H * num_rows)))
    base = tl.where(most == float("-inf"), 0.0, most)  # a window may have no key
    total = 0.0
    result = tl.zeros((WIDTH,), tl.float32)
    for part in range(num_parts):
        log_sum = tl.load(own_sums + part * (H * num_rows))
        share = tl.exp(log_sum - base)
        is_read = place < tl.where(log_sum == float("-inf"), 0, E)  # nothing is written of a part without keys
        source = parts + (part * num_rows + row) * (H * E) + head * E + place
        result += share * tl.load(source, mask=is_read, other=0.0)
        total += share
    divisor = tl.where(total == 0, 1.0, total)
    tl.store(out + row * (H * E) + head * E + place, (result / divisor).to(out.dtype.element_ty), mask=is_place)
    tl.store(log_sums + head * num_rows + row, most + tl.log(divisor))


def attend_pages(
    out: Tensor,
    log_sums: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ends: Tensor,
    lengths: Tensor,
    table: Tensor,
    behinds: Tensor | None,
    most_queries: int,
    is_causal: bool,
    scaling: float,
    window: int,
) -> None:
    """See `pages.ATTEND_PAGES`."""
    num_heads, num_keys = query.shape[1], keys.shape[2]
    sizes = _sizes(num_heads, *keys.shape[1:], is_causal=is_causal, has_window=window > 0)
    num_tiles = blocks_of(most_queries * num_heads // num_keys, sizes["ROWS"])
    _attend_pages[num_tiles, num_keys * len(out), len(lengths)](
        out, log_sums, query, keys, values, ends, lengths, table, behinds,
        len(query), *query.stride()[:2], table.shape[1], scaling, window,
        **sizes, PART=PART_KEYS, WIDENS=bool(triton.knobs.runtime.interpret),
        HAS_BEHINDS=behinds is not None,
    )  # fmt: skip


def join_parts(out: Tensor, log_sums: Tensor, parts: Tensor, part_sums: Tensor) -> None:
    """See `pages.JOIN_PARTS`."""
    num_rows, num_heads, head_dim = out.shape
    _join_parts[num_rows, num_heads](
        out, log_sums, parts, part_sums, len(parts), num_rows,
        H=num_heads, E=head_dim, WIDTH=power_of_two(head_dim), num_warps=1,
    )  # fmt: skip


def _sizes(
    num_heads: int, page_tokens: int, num_keys: int, head_dim: int, *, is_causal: bool, has_window: bool = False
) -> dict[str, int]:
    """Return the constants of a launch, its warps and its stages."""
    width = max(16, power_of_two(head_dim))
    heads = {"H": num_heads, "K": num_keys, "E": head_dim, "PAGE": page_tokens, "WIDTH": width}
    tiles = {
        "ROWS": tile_rows(head_dim, is_causal=is_causal, has_window=has_window),
        "KEYS": min(KEYS, TILE_VALUES // width),
    }
    return heads | tiles | {"IS_CAUSAL": is_causal, "HAS_WINDOW": has_window, "num_warps": WARPS, "num_stages": STAGES}

"""The products of attention over blocks of keys, and how their results are put together.

Knows tensors; not sequences, prompts or who looks at what.

Main invariant: a query row's result for a block depends on that row, the block and its mask alone, so parts may be
computed in any company and order; `find_rows_multiple` finds the numbers of rows for which that is so. Sums over parts
are added one by one.

Dimensions: N blocks of the memory, B tokens of a block, P parts (a block, and who looks at it), n groups of query rows,
K key-value heads, G query heads per key-value head, S sequences, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_MULTIPLES = (4, 8, 16, 32)
"""What the query rows of a product are tried to be a multiple of. Libraries have kernels apart for 1, 2 and 3 rows."""
TRIED_PARTS = 7
PARTS_PER_CALL = 5
"""Parts whose blocks can be copied beside each other in the time that a call takes on its own."""
HIDDEN = -1e30
"""Added to the score of a key that a query does not see. Finite, so that a row which sees nothing of a block is finite
too; its weight is zero all the same."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks and who looks at them, in the order in which they are computed; all with as many query rows."""

    looks: Tensor
    """(P * places,) rows of the pass, one for each place of a part."""
    num_rows: int
    """Query rows of a part's product: G for each place, and the rest is filled up with zeros."""
    blocks: Tensor
    """(P,)"""
    runs: list[tuple[int, int, int]]
    """First block, first part, and number of parts that are blocks beside each other in memory."""
    mask: Tensor
    """(P, 1, 1 or num_rows, B)"""


def mask_of(is_hidden: Tensor, like: Tensor) -> Tensor:
    """What is added to scores, in the dtype of the queries."""
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, HIDDEN).to(like.device, like.dtype)


def attend_to_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, parts: Parts, scaling: float
) -> tuple[Tensor, Tensor]:
    """Queries (T, H, E), keys (N, K, E, B), values (N, K, B, E) -> results (P * places, K, G, E), and log-sum-exps of
    scores (P * places, K, G)."""
    num_parts, num_keys = len(parts.blocks), values.shape[1]
    rows = queries.index_select(0, parts.looks).view(
        num_parts, -1, num_keys, queries.shape[1] // num_keys, values.shape[3]
    )
    num_places, heads_per_key = rows.shape[1], rows.shape[3]
    rows = rows.transpose(1, 2).flatten(2, 3)  # (P, K, places * G, E)
    num_filled = rows.shape[2]
    if num_filled < parts.num_rows:
        rows = F.pad(rows, (0, 0, 0, parts.num_rows - num_filled))
    if len(parts.runs) * PARTS_PER_CALL > num_parts:
        result, log_sum_exp = attend_rows(rows, keys[parts.blocks], values[parts.blocks], parts.mask, scaling)
    else:
        results = []
        for block, part, count in parts.runs:
            memory, mine = slice(block, block + count), slice(part, part + count)
            results.append(attend_rows(rows[mine], keys[memory], values[memory], parts.mask[mine], scaling))
        result, log_sum_exp = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    shape = (num_places, heads_per_key)
    result, log_sum_exp = (
        tensor[:, :, :num_filled].unflatten(2, shape).transpose(1, 2) for tensor in (result, log_sum_exp)
    )
    return result.flatten(0, 1), log_sum_exp.flatten(0, 1)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Query (P, K, rows, E), key (P, K, E, B), value (P, K, B, E), mask (P, 1, rows or 1, B) -> result as query, and
    the log-sum-exp of scores (P, K, rows), fp32. For few rows; a kernel for long sequences takes three times as long.
    """
    scores = (query @ key).float().mul_(scaling).add_(mask)
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum(exp(score - largest score)): two cheap maxima in place of another exponential.
    return weights.to(value.dtype) @ value, scores.amax(-1).sub_(weights.amax(-1).log_())


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Query (1, K, rows, E), key and value (1, K, L, E), mask (1, 1, rows, L) -> result as query; for many rows."""
    if query.device.type == "cpu":
        # Named, because the choice of `scaled_dot_product_attention` depends on the shape of the whole batch.
        result: Tensor
        result, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p=0.0, is_causal=False, attn_mask=mask, scale=scaling
        )
        return result
    result, _ = attend_rows(query, key.transpose(-2, -1), value, mask, scaling)
    return result


@cache
@torch.no_grad()
def find_rows_multiple(head_dim: int, num_tokens: int, num_threads: int) -> int | None:
    """What the number of query rows must be a multiple of, on a CPU in fp32, so that a row's bits are its own.

    Tries `attend_rows` over blocks of `num_tokens` tokens with the number of threads in use, which `num_threads` says.
    """
    assert torch.get_num_threads() == num_threads
    generator = torch.Generator().manual_seed(head_dim)
    shapes = ((2 * ROWS_MULTIPLES[-1], head_dim), (head_dim, num_tokens), (num_tokens, head_dim))
    query, key, value = (torch.randn(TRIED_PARTS, 1, *shape, generator=generator) for shape in shapes)
    mask = mask_of(torch.rand(TRIED_PARTS, 1, 1, num_tokens, generator=generator) < 1 / 2, query)
    whole = attend_rows(query, key, value, mask, 0.125)

    def keeps_bits(num_rows: int, parts: slice) -> bool:
        some = attend_rows(query[parts, :, :num_rows], key[parts], value[parts], mask[parts], 0.125)
        return all(torch.equal(left, right[parts, :, :num_rows]) for left, right in zip(some, whole, strict=True))

    for multiple in ROWS_MULTIPLES:
        counts = range(multiple, 2 * ROWS_MULTIPLES[-1] + 1, multiple)
        if all(keeps_bits(count, parts) for count in counts for parts in (slice(1), slice(2, 3), slice(1, None))):
            return multiple
    return None


def put_together(results: Tensor, log_sum_exps: Tensor, owners: Tensor, levels: Sequence[tuple[int, int]]) -> Tensor:
    """Results (M, K, G, E) and log-sum-exps (M, K, G) of parts -> attention over the parts of each (S, K, G, E), fp32.

    First those of everybody's first part, then of the second, ...: `levels` says where each begins and how many there
    are, which falls; `owners` (M,) whose each is. `results` is overwritten.
    """
    (_, num_owners), *further = levels
    largest = log_sum_exps[:num_owners].clone()
    for start, count in further:
        torch.maximum(largest[:count], log_sum_exps[start : start + count], out=largest[:count])
    weights = (log_sum_exps - largest[owners]).exp_()
    results *= weights.unsqueeze(-1)
    joined, total = results[:num_owners], weights[:num_owners]
    for start, count in further:
        joined[:count] += results[start : start + count]
        total[:count] += weights[start : start + count]
    return joined / total.unsqueeze(-1)

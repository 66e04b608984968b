"""The products of attention over key-value blocks, and the sum of their results.

Does not depend on sequences, prompts, or on the choice of blocks for a query.

Main invariant: a query row's result for a block depends only on that row, the block and its mask, so reads of blocks
may be computed in any batch and order; `find_rows_multiple` finds the numbers of rows for which that holds. The results
of one query are added in the order of its blocks.

Dimensions: T rows of the pass, N blocks of the memory, B tokens of a block, P reads (a block and the queries that
attend to it), Q queries of a read, M = P * Q results, K key-value heads, H query heads, G query heads per key-value
head, R query rows of a product (at least Q * G), S sequences, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device

ROWS_MULTIPLES = (4, 8, 16, 32)
"""Candidates for what R must be a multiple of. Libraries have separate kernels for 1, 2 and 3 rows."""
TRIED_READS = 7
READS_PER_CALL = 5
"""Reads whose blocks can be gathered in the time that one call costs by itself."""
HIDDEN = -1e30
"""Added to the score of a hidden key. Finite, so that a row which sees no key of a block is finite too; its weight is
zero all the same."""


@dataclass(frozen=True, slots=True)
class BlockReads:
    """Blocks and the queries that attend to them, in the order of computation; all with equally many query rows."""

    queries: Tensor
    """(P * Q,) rows of the pass."""
    num_rows: int
    """R; rows beyond Q * G are zeros."""
    blocks: Tensor
    """(P,)"""
    runs: list[tuple[int, int, int]]
    """First block, first read, and number of reads whose blocks are adjacent in memory."""
    mask: Tensor
    """(P, 1, 1 or R, B)"""


def score_mask(is_hidden: Tensor, like: Tensor) -> Tensor:
    """Return the addend of scores for hidden keys, in the dtype and on the device of `like`."""
    return on_device(torch.zeros(is_hidden.shape).masked_fill_(is_hidden, HIDDEN), like.device, like.dtype)


def attend_to_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, reads: BlockReads, scaling: float
) -> tuple[Tensor, Tensor]:
    """Attend from queries (T, H, E) to keys (N, K, E, B) and values (N, K, B, E).

    Return results (P * Q, K, G, E), and the log-sum-exps of their scores (P * Q, K, G).
    """
    num_reads, num_keys = len(reads.blocks), values.shape[1]
    rows = queries.index_select(0, reads.queries).view(
        num_reads, -1, num_keys, queries.shape[1] // num_keys, values.shape[3]
    )  # (P, Q, K, G, E)
    num_queries, heads_per_key = rows.shape[1], rows.shape[3]
    rows = rows.transpose(1, 2).flatten(2, 3)  # (P, K, Q * G, E)
    num_filled = rows.shape[2]
    if num_filled < reads.num_rows:
        rows = F.pad(rows, (0, 0, 0, reads.num_rows - num_filled))  # (P, K, R, E)
    if len(reads.runs) * READS_PER_CALL > num_reads:
        result, log_sum_exp = attend_rows(rows, keys[reads.blocks], values[reads.blocks], reads.mask, scaling)
    else:
        results = []
        for block, read, count in reads.runs:
            memory, own = slice(block, block + count), slice(read, read + count)
            results.append(attend_rows(rows[own], keys[memory], values[memory], reads.mask[own], scaling))
        result, log_sum_exp = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    shape = (num_queries, heads_per_key)
    result, log_sum_exp = (
        tensor[:, :, :num_filled].unflatten(2, shape).transpose(1, 2) for tensor in (result, log_sum_exp)
    )
    return result.flatten(0, 1), log_sum_exp.flatten(0, 1)


def attend_rows(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attend from few rows: query (P, K, R, E), key (P, K, E, B), value (P, K, B, E), mask (P, 1, R or 1, B).

    Return the result, shaped like query, and the log-sum-exp of its scores (P, K, R), fp32. A kernel for long sequences
    takes three times as long.
    """
    scores = (query @ key).float().mul_(scaling).add_(mask)
    weights = scores.softmax(-1)
    # The largest weight is 1 / sum(exp(score - largest score)): two cheap maxima in place of another exponential.
    return weights.to(value.dtype) @ value, scores.amax(-1).sub_(weights.amax(-1).log_())


def attend_prompt(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Attend from many rows: query (1, K, R, E), key and value (1, K, L, E), mask (1, 1, R, L).

    Return the result, shaped like query, and the log-sum-exp of its scores (1, K, R), fp32.
    """
    if query.device.type == "cpu":
        # Called by name, because `scaled_dot_product_attention` chooses a kernel by the shape of the whole batch.
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p=0.0, is_causal=False, attn_mask=mask, scale=scaling
        )
        return result
    return attend_rows(query, key.transpose(-2, -1), value, mask, scaling)


@cache
@torch.no_grad()
def find_rows_multiple(head_dim: int, num_tokens: int, num_threads: int) -> int | None:
    """Return what R must be a multiple of, on a CPU in fp32, so that a row's bits do not depend on the others.

    Tries `attend_rows` over blocks of `num_tokens` tokens with the threads in use, which must be `num_threads`. None if
    no candidate passes.
    """
    assert torch.get_num_threads() == num_threads
    generator = torch.Generator().manual_seed(head_dim)
    shapes = ((2 * ROWS_MULTIPLES[-1], head_dim), (head_dim, num_tokens), (num_tokens, head_dim))
    query, key, value = (torch.randn(TRIED_READS, 1, *shape, generator=generator) for shape in shapes)
    mask = score_mask(torch.rand(TRIED_READS, 1, 1, num_tokens, generator=generator) < 1 / 2, query)
    whole = attend_rows(query, key, value, mask, 0.125)

    def keeps_bits(num_rows: int, reads: slice) -> bool:
        some = attend_rows(query[reads, :, :num_rows], key[reads], value[reads], mask[reads], 0.125)
        return all(torch.equal(left, right[reads, :, :num_rows]) for left, right in zip(some, whole, strict=True))

    for multiple in ROWS_MULTIPLES:
        counts = range(multiple, 2 * ROWS_MULTIPLES[-1] + 1, multiple)
        if all(keeps_bits(count, reads) for count in counts for reads in (slice(1), slice(2, 3), slice(1, None))):
            return multiple
    return None


def combine(
    results: Tensor,
    log_sum_exps: Tensor,
    owners: Tensor,
    levels: Sequence[tuple[int, int]],
    sinks: Tensor | None = None,
) -> Tensor:
    """Combine results (M, K, G, E) and log-sum-exps (M, K, G) of reads to the attention of each sequence over all its
    blocks, (S, K, G, E), fp32.

    The results of every sequence's first block come first, then those of the second blocks, and so on: `levels` has the
    first index and the count of each, and counts never rise. `owners` (M,) are the sequences. `sinks` (K, G) are scores
    of one more key of each sequence, whose value is zero. Overwrites `results`.
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
    if sinks is not None:
        total += (sinks - largest).exp_()
    return joined / total.unsqueeze(-1)

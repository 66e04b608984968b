"""The products of attention over blocks of keys, and how their results are put together.

Knows tensors; not sequences, prompts or who looks at what.

Main invariant: a part's result depends on its own query rows, keys and mask alone, which always have the same shape; so
parts may be computed in any company and order. Sums over parts are added one by one.

Dimensions: N blocks of the memory, B tokens of a block, P parts (a block, and who looks at it), n groups of query rows,
K key-value heads, G query heads per key-value head, S sequences, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_MULTIPLE = 8
"""Query rows of a product are padded to this multiple. With others the scratch memory of the CPU kernel's second thread
is not aligned to 64 bytes, as the first one's is, and bits may depend on which of them computes a part."""
HIDDEN = -1e30
"""Added to the score of a key that a query does not see. Finite, so that a row which sees nothing of a block is finite
too; its weight is zero all the same."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Blocks and who looks at them, in the order in which they are computed."""

    looks: Tensor
    """(P,) which of the queries."""
    blocks: Tensor
    """(P,)"""
    runs: list[tuple[int, int, int]]
    """First block, first part, and number of parts that are blocks beside each other in memory."""
    mask: Tensor
    """(P, 1, 1 or rows, B)"""


def mask_of(is_hidden: Tensor, like: Tensor) -> Tensor:
    """What is added to scores, in the dtype of the queries."""
    return torch.zeros(is_hidden.shape).masked_fill_(is_hidden, HIDDEN).to(like.device, like.dtype)


def attend_to_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, parts: Parts, scaling: float
) -> tuple[Tensor, Tensor]:
    """Queries (n, K, rows, E), keys and values (N, K, B, E) -> results (P, K, rows, E), log-sum-exps (P, K, rows)."""
    num_rows = queries.shape[2]
    rows = F.pad(queries, (0, 0, 0, -num_rows % ROWS_MULTIPLE))[parts.looks]
    mask = parts.mask
    if mask.shape[2] > 1:
        mask = F.pad(mask, (0, 0, 0, -num_rows % ROWS_MULTIPLE))
    if rows.device.type != "cpu":
        result, log_sum_exp = attend(rows, keys[parts.blocks], values[parts.blocks], mask, scaling)
        return result[:, :, :num_rows], log_sum_exp[:, :, :num_rows]
    results = []
    for block, part, count in parts.runs:
        memory, mine = slice(block, block + count), slice(part, part + count)
        results.append(attend(rows[mine], keys[memory], values[memory], mask[mine], scaling))
    result, log_sum_exp = (torch.cat(tensors) for tensors in zip(*results, strict=True))
    return result[:, :, :num_rows], log_sum_exp[:, :, :num_rows]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Query (P, K, rows, E), key and value (P, K, L, E), mask (P or 1, 1, rows or 1, L) -> result as query, and the
    log-sum-exp of scores (P, K, rows)."""
    if query.device.type == "cpu":
        # Named, because the choice of `scaled_dot_product_attention` depends on the shape of the whole batch.
        result, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p=0.0, is_causal=False, attn_mask=mask, scale=scaling
        )
        return result, log_sum_exp
    scores = (query @ key.transpose(-2, -1)).float() * scaling + mask
    return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)


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

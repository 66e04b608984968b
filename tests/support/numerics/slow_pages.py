"""Attention over pages, slowly, on any device: what the GPU's kernel is compared with, and what stands in for it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from workers.sampling.attention.pages import PageReads


def slow_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Implements `PageKernel`: softmax of all scores, one query row at a time, as its bits depend on no other row."""
    ends, lengths = reads.ends.tolist(), reads.lengths.tolist()
    assert reads.most_queries >= max(stop - start for start, stop in pairwise(ends))
    assert reads.most_keys >= max(lengths)
    out, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for (start, stop), length, pages in zip(pairwise(ends), lengths, reads.table, strict=True):
        own_keys, own_values = (memory[pages].flatten(0, 1)[:length] for memory in (keys, values))  # (length, K, E)
        own_keys, own_values = (  # (length, H, E)
            memory.repeat_interleave(query.shape[1] // keys.shape[2], dim=1) for memory in (own_keys, own_values)
        )
        for row in range(start, stop):
            num_seen = length - (stop - 1 - row if reads.is_causal else 0)
            behind = num_seen if reads.behinds is None else int(reads.behinds[row])
            seen = slice(0 if window is None else max(0, behind - window), num_seen)
            scores = (query[row].float() * own_keys[seen].float()).sum(-1) * scaling  # (seen, H)
            out[row] = (scores.softmax(0).unsqueeze(-1) * own_values[seen].float()).sum(0)
            sums[:, row] = scores.logsumexp(0)
    return out, sums

"""Sequences over pages with random values, and NaN in all slots that none of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.sampling.attention.pages import PageReads
from workers.sampling.kv_cache import PAGE_TOKENS


@dataclass(frozen=True)
class RandomPages:
    """What a `PageKernel` takes, of all sequences."""

    query: Tensor
    keys: Tensor
    values: Tensor
    counts: Sequence[int]
    lengths: Sequence[int]
    table: Tensor

    @classmethod
    def of(
        cls,
        num_heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        counts: Sequence[int],
        lengths: Sequence[int],
        *,
        device: str = "cpu",
    ) -> RandomPages:
        """Draw values that are the same in every dtype: those of bf16. Query rows and keys of each sequence."""
        generator = torch.Generator().manual_seed(4)
        numbers = [-(-length // PAGE_TOKENS) for length in lengths]
        free = iter(torch.randperm(sum(numbers) + 1, generator=generator).tolist())
        table = torch.zeros(len(lengths), max(numbers), dtype=torch.int32)
        keys, values = (torch.full((sum(numbers) + 1, PAGE_TOKENS, num_heads[1], head_dim), torch.nan) for _ in "kv")
        for row, length, number in zip(table, lengths, numbers, strict=True):
            for place in range(number):
                row[place] = next(free)
                for memory in (keys, values):
                    own = memory[row[place], : length - place * PAGE_TOKENS]
                    own.copy_(torch.randn(own.shape, generator=generator))
        query = torch.randn(sum(counts), num_heads[0], head_dim, generator=generator)
        query, keys, values = (tensor.bfloat16().to(device, dtype) for tensor in (query, keys, values))
        return cls(query, keys, values, counts, lengths, table.to(device))

    def to(self, dtype: torch.dtype) -> RandomPages:
        """Return the same values in another dtype."""
        query, keys, values = (tensor.to(dtype) for tensor in (self.query, self.keys, self.values))
        return replace(self, query=query, keys=keys, values=values)

    def reads(self, sequences: slice = slice(None), *, is_causal: bool, more_queries: int = 0) -> PageReads:
        """Return the reads of some sequences, their table no wider than needed, and so many more `most_queries`."""
        counts, lengths = self.counts[sequences], self.lengths[sequences]
        ends = torch.tensor([0, *counts]).cumsum(0).to(self.table)
        own = torch.tensor(lengths).to(self.table)
        table = self.table[sequences, : -(-max(lengths) // PAGE_TOKENS)].contiguous()
        return PageReads(ends, own, table, max(counts) + more_queries, max(lengths), is_causal)

    def rows(self, number: int) -> slice:
        """Return the query rows of a sequence."""
        start = sum(self.counts[:number])
        return slice(start, start + self.counts[number])

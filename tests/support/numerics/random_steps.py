"""A sampling step over pages with random values: next tokens of two prompts, and a chunk of a third."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.fused_modules import HeadNorms
from workers.model.sampling_layers import Projected
from workers.sampling.attention.decode_plan import NextToken
from workers.sampling.attention.pages import StepTables, make_tables
from workers.sampling.attention.step import PromptChunk
from workers.sampling.kv_cache import PAGE_TOKENS, PagedCache, PromptBlocks, SequenceBlocks

NUM_PAGES = 7


@dataclass(frozen=True)
class _Shape:
    """What a cache asks of a model."""

    num_key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    num_attention_layers: int = 1


@dataclass(frozen=True)
class RandomStep:
    """The cache, filled, the tables of the step, and its projections."""

    cache: PagedCache
    tables: StepTables
    projected: Projected

    @classmethod
    def of(
        cls, num_heads: tuple[int, int], head_dim: int, dtype: torch.dtype, *, has_norms: bool, device: str = "cpu"
    ) -> RandomStep:
        """Draw values that are the same in every dtype: those of bf16."""
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device, dtype)

        prompts = [PromptBlocks([4], 30), PromptBlocks([2, 0], PAGE_TOKENS + 44), PromptBlocks([6], 7)]
        places = [(prompts[0], 1, 0), (prompts[0], 3, 5), (prompts[2], 5, 9)]
        tokens = [
            NextToken(row, prompt, SequenceBlocks(row, [block], length))
            for row, (prompt, block, length) in enumerate(places)
        ]
        chunk = PromptChunk(len(tokens), prompts[1], PAGE_TOKENS, PAGE_TOKENS + 44)
        num_rows = len(tokens) + 44
        cache = PagedCache(_Shape(num_heads[1], head_dim, dtype, torch.device(device)), NUM_PAGES)  # type: ignore[arg-type]
        for memory in cache.layer(0):
            memory.copy_(draw(*memory.shape))
        projected = Projected(
            draw(num_rows, num_heads[0] + 2 * num_heads[1], head_dim).flatten(1),
            draw(num_rows, head_dim),
            draw(num_rows, head_dim),
            HeadNorms(draw(head_dim), draw(head_dim), 1e-5) if has_norms else None,
            0.2,
        )
        tables = make_tables([chunk], tokens, num_heads[0] // num_heads[1], torch.device(device))
        return cls(cache, tables, projected)

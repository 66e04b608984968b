"""Tries attention over pages on the device, with the kernels in use, against attention row by row in fp32.

Wrong samples look like samples. So a kernel that gives other numbers, with the model's heads on this GPU and this build
of torch and Triton, is not used: attention is by blocks then.

Dimensions: H query heads, K key-value heads, E head dimension, n keys of a row.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from workers.model.base_model import BaseModel
from workers.model.sampling_layers import Projected, SplitProjections
from workers.sampling.attention.decode_plan import NextToken
from workers.sampling.attention.pages import PagedAttention, PageKernel, make_tables, page_kernel_for
from workers.sampling.attention.step import PromptChunk
from workers.sampling.kv_cache import PAGE_TOKENS, PagedCache, PromptBlocks, SequenceBlocks

logger = logging.getLogger(__name__)

TOLERANCE = 2.0**-6
"""Of values around 1: a few roundings to the 8 bits of bf16."""
PROMPT = PromptBlocks([4, 1], PAGE_TOKENS + 10)
OWN_LENGTHS = (0, 37, PAGE_TOKENS - 1)
"""Own tokens of three samples of the prompt, in a page each."""
OWN_PAGES = (3, 0, 5)
CHUNK = PromptChunk(len(OWN_LENGTHS), PromptBlocks([2, 6], PAGE_TOKENS + 33), PAGE_TOKENS - 64, PAGE_TOKENS + 33)
NUM_PAGES = 7
WINDOW = 50
"""Of a model with sliding windows: one sample sees keys of its prompt, one none."""


def tried_page_kernel(model: BaseModel) -> PageKernel | None:
    """Return the kernel of `page_kernel_for` if its results are right; otherwise None, and log that."""
    kernel = page_kernel_for(model)
    if kernel is not None and not is_right(model, kernel):
        logger.warning("%s: attention over pages gives other numbers on this GPU; attention is by blocks", model.name)
        return None
    return kernel


@torch.no_grad()
def is_right(model: BaseModel, kernel: PageKernel) -> bool:
    """Return whether a step of next tokens and a chunk has the results of attention row by row."""
    generator = torch.Generator().manual_seed(0)
    num_heads, num_keys, head_dim = model.num_heads, model.num_key_value_heads, model.head_dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(model.device, model.dtype)

    cache = PagedCache(model, NUM_PAGES)
    for memory in cache.layer(0):
        memory.copy_(draw(*memory.shape))
    tokens = [
        NextToken(row, PROMPT, SequenceBlocks(row, [page], length))
        for row, (page, length) in enumerate(zip(OWN_PAGES, OWN_LENGTHS, strict=True))
    ]
    tables = make_tables([CHUNK], tokens, num_heads // num_keys, model.device, has_windows=model.has_sliding_window)
    attend = PagedAttention(cache, kernel, tables)
    scaling = head_dim**-0.5
    heads = [draw(1, heads, tables.num_rows, head_dim) for heads in (num_heads, num_keys, num_keys)]  # (1, heads, T, E)
    sinks = draw(num_heads) if model.has_sinks else None
    for window in (None, *[WINDOW] * model.has_sliding_window):
        actual = attend(0, *heads, scaling=scaling, sliding_window=window, sinks=sinks)[0]  # (T, H, E)
        expected = _row_by_row(cache, heads[0][0].transpose(0, 1), scaling, window, sinks)
        if not torch.allclose(actual.float(), expected, atol=TOLERANCE):
            return False
    if model.sampling_layers is None:
        return True
    width = (num_heads + 2 * num_keys) * head_dim
    rows = draw(tables.num_rows, width), draw(tables.num_rows, head_dim), draw(tables.num_rows, head_dim)
    projected = Projected(*rows, model.sampling_layers.head_norms, scaling)
    ways = (attend, SplitProjections(attend, num_heads, num_keys))
    one, other = (way.projected(0, projected).float() for way in ways)
    return torch.allclose(one, other, atol=TOLERANCE * float(other.abs().max()))


def _row_by_row(cache: PagedCache, queries: Tensor, scaling: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """Return the attention (T, H, E), fp32, of the step's queries (T, H, E); its keys and values are in the cache."""
    places = [
        (PROMPT.blocks, PROMPT.length, page, length + 1) for page, length in zip(OWN_PAGES, OWN_LENGTHS, strict=True)
    ]
    places += [(CHUNK.prompt.blocks, position + 1, 0, 0) for position in range(CHUNK.start, CHUNK.stop)]
    results = []
    for query, (pages, length, own_page, own_length) in zip(queries, places, strict=True):
        keys, values = (
            torch.cat([memory[pages].flatten(0, 1)[:length], memory[own_page, :own_length]]).float()
            for memory in cache.layer(0)
        )  # (n, K, E)
        num_shared = query.shape[0] // keys.shape[1]
        keys, values = (part.repeat_interleave(num_shared, dim=1) for part in (keys, values))  # (n, H, E)
        if window is not None:
            keys, values = keys[-window:], values[-window:]
        scores = torch.einsum("he,nhe->nh", query.float(), keys) * scaling
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().unsqueeze(0)])
        weights = scores.softmax(0)[: len(keys)]
        results.append(torch.einsum("nh,nhe->he", weights, values))
    return torch.stack(results)

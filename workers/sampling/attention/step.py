"""The attention of one decode step: chunks of prompts, and the next token of every running sequence.

A chunk's queries are cut into blocks at absolute positions, the last one filled up with zeros. Each block is one call
over the keys up to its own end, with a shape that depends only on the block's position in its prompt. So a row's bits
do not depend on whether the prompt came in one step or several, or was shared.

The next tokens read blocks where they lie in memory; adjacent ones are one call, whichever sequences they belong to.
`decode_plan` chooses the calls. Samples of one prompt are rows of the same products, so their prompt is read once for
all of them. A key outside a sliding window is not read, or has the weight zero.

Does not depend on requests, versions or tokens.

Main invariant: a row's bits depend only on its own tokens and position, not on the other rows of the pass or on the
blocks that hold its keys.

Dimensions: T rows of the pass, S sequences, n blocks of a chunk, N blocks of the memory, B tokens of a block, K
key-value heads, H query heads, G query heads per key-value head, E head dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.contract.capacity import BLOCK_TOKENS
from workers.host.uploads import on_device
from workers.model.attention import Attend, add_sinks
from workers.model.base_model import BaseModel
from workers.sampling.attention.block_products import (
    ROWS_MULTIPLES,
    attend_prompt,
    attend_to_blocks,
    combine,
    find_rows_multiple,
    score_mask,
)
from workers.sampling.attention.decode_plan import DecodePlan, DecodePlanner, NextToken
from workers.sampling.kv_cache import KVCache, PromptBlocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of the pass, from `row` on, that are a prompt's tokens `start` to `stop`."""

    row: int
    prompt: PromptBlocks
    start: int
    """A multiple of `BLOCK_TOKENS`."""
    stop: int
    """A multiple of `BLOCK_TOKENS`, or the prompt's end."""


class Steps(Protocol):
    """How the steps of one sampler attend: the seam between passes and the memory of keys and values."""

    are_prompts_last: bool
    """Whether the rows of chunks must come after those of next tokens, which must be adjacent from row 0."""
    is_batch_invariant: bool
    """Whether a sample gets the same bits with any co-batched samples, as far as attention decides it."""

    def begin(self, chunks: Sequence[PromptChunk], tokens: Sequence[NextToken]) -> Attend:
        """Return the attention of a pass with these rows."""


class PrefillAttention:
    """The attention of one chunk, in all layers of a pass."""

    def __init__(self, chunk: PromptChunk, heads_per_key: int, device: torch.device) -> None:
        """Take a chunk, for tensors on `device`; `heads_per_key` is G."""
        assert chunk.start % BLOCK_TOKENS == 0
        assert chunk.stop % BLOCK_TOKENS == 0 or chunk.stop == chunk.prompt.length
        self._rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
        self._first, self._end = chunk.start // BLOCK_TOKENS, -(-chunk.stop // BLOCK_TOKENS)
        self._padding = self._end * BLOCK_TOKENS - chunk.stop
        self._blocks = on_device(chunk.prompt.blocks[: self._end], device)
        self._heads_per_key = heads_per_key
        self._masks: dict[int | None, Tensor] = {}

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Write the chunk's keys or values, among rows (T, K, E), to its blocks of (N, K, B, E)."""
        memory[self._blocks[self._first :]] = self._in_blocks(rows).transpose(1, 2)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """Fill the chunk's rows of `out` (T, H, E), from queries (T, H, E), keys (N, K, E, B), values (N, K, B, E)."""
        first = self._first_seen(self._first, window)
        blocks = self._blocks[first:]
        seen = [_joined(keys[blocks].transpose(2, 3)), _joined(values[blocks])]  # (1, K, tokens, E) each
        rows = self._in_blocks(queries).unflatten(2, (-1, self._heads_per_key))  # (n, B, K, G, E)
        rows = rows.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (n, K, G * B, E)
        mask = self._mask(window, queries)
        results = []
        for index, block in enumerate(range(self._first, self._end)):
            begin, end = self._first_seen(block, window), block + 1
            tokens = slice((begin - first) * BLOCK_TOKENS, (end - first) * BLOCK_TOKENS)
            result, log_sum_exp = attend_prompt(
                rows[index : index + 1],
                seen[0][:, :, tokens],
                seen[1][:, :, tokens],
                mask[:, :, :, mask.shape[-1] - (end - begin) * BLOCK_TOKENS :],
                scaling,
            )
            if sinks is not None:
                add_sinks(result, log_sum_exp, sinks.view(-1, self._heads_per_key).repeat_interleave(BLOCK_TOKENS, 1))
            results.append(result)
        result = torch.cat(results).unflatten(2, (self._heads_per_key, BLOCK_TOKENS))  # (n, K, G, B, E)
        result = result.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)  # (n * B, H, E)
        out[self._rows] = result[: len(result) - self._padding]

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """Return this chunk's rows of (T, heads, E), filled up with zeros: (n, B, heads, E)."""
        filled = F.pad(rows[self._rows], (0, 0, 0, 0, 0, self._padding))
        return filled.reshape(-1, BLOCK_TOKENS, *filled.shape[1:])

    def _first_seen(self, block: int, window: int | None) -> int:
        """Return the first block that a block's first query sees."""
        return 0 if window is None else max(0, block * BLOCK_TOKENS - window + 1) // BLOCK_TOKENS

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """Return the mask (1, 1, G * B, keys) of the last block's queries, over as many keys as any block sees.

        It depends only on distances, so the mask of another block is its right part.
        """
        if window not in self._masks:
            most = max(block + 1 - self._first_seen(block, window) for block in range(self._first, self._end))
            query = torch.arange(BLOCK_TOKENS).repeat(self._heads_per_key).unsqueeze(1)
            distance = query - torch.arange(BLOCK_TOKENS * (1 - most), BLOCK_TOKENS)  # (G * B, keys)
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._masks[window] = score_mask(is_hidden, like)[None, None]
        return self._masks[window]


class DecodeAttention:
    """The next token of every running sequence; and the tokens after it, while no sequence begins, ends or grows."""

    def __init__(
        self, tokens: Sequence[NextToken], heads_per_key: int, rows_multiple: int, device: torch.device
    ) -> None:
        """Take the tokens, for tensors on `device`.

        `heads_per_key` is H / K, and products have a multiple of `rows_multiple` query rows.
        """
        self._device = device
        self._layout = _layout(tokens)
        self._planner = DecodePlanner(tokens, heads_per_key, rows_multiple)
        first, last = tokens[0].row, tokens[-1].row
        rows = [token.row for token in tokens]
        self._rows: slice | Tensor = slice(first, last + 1)
        """The tokens' rows of the pass; adjacent rows, as in a pass without prompts, need no gathering."""
        if rows != list(range(first, last + 1)):
            self._rows = on_device(rows, device)
        self._block = on_device([token.own.blocks[-1] for token in tokens], device)
        self._offset = self._offsets(tokens)
        self._plans: dict[int | None, DecodePlan] = {}
        """By sliding window."""

    def try_continue(self, tokens: Sequence[NextToken]) -> bool:
        """Move to the next tokens if only the sequences' lengths differ; return whether they do.

        Most plans stay as they are, which saves making them.
        """
        if _layout(tokens) != self._layout:
            return False
        self._planner.move_to(tokens)
        self._offset = self._offsets(tokens)
        plan = self._plans.get(None)
        self._plans.clear()  # the keys inside a window change with every token
        if plan is not None:
            self._plans[None] = self._planner.remask(plan)
        return True

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Write the tokens' keys or values, among rows (T, K, E), to their blocks of (N, K, B, E)."""
        memory[self._block, :, self._offset] = rows[self._rows]

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> None:
        """Fill the tokens' rows of `out` (T, H, E), from queries (T, H, E), keys (N, K, E, B), values (N, K, B, E)."""
        if window not in self._plans:
            self._plans[window] = self._planner.plan(window, queries)
        plan = self._plans[window]
        result, log_sum_exp = attend_to_blocks(queries, keys, values, plan.by_sequence, scaling)
        if plan.by_tile is not None:
            of_tiles = attend_to_blocks(queries, keys, values, plan.by_tile, scaling)
            result, log_sum_exp = (torch.cat(pair) for pair in zip(of_tiles, (result, log_sum_exp), strict=True))
        result, log_sum_exp = (tensor.index_select(0, plan.results).float() for tensor in (result, log_sum_exp))
        if sinks is not None:
            sinks = sinks.float().view(result.shape[1:3])  # (K, G)
        joined = combine(result, log_sum_exp, plan.owners, plan.levels, sinks)  # (S, K, G, E)
        joined = joined.index_select(0, plan.order)
        out[self._rows] = joined.flatten(1, 2).to(out.dtype)

    def _offsets(self, tokens: Sequence[NextToken]) -> Tensor:
        """Return each token's position in its block, (S,)."""
        return on_device([token.own.length % BLOCK_TOKENS for token in tokens], self._device)


class BlockSteps:
    """Implements `Steps` by products over blocks, on any device and in any dtype. Used by one thread only."""

    are_prompts_last = False

    def __init__(self, cache: KVCache, model: BaseModel) -> None:
        """Find the number of rows from which the bits of a product are batch-invariant, on a CPU."""
        self._cache = cache
        self._heads_per_key = model.num_heads // model.num_key_value_heads
        self._rows_multiple = 1
        self.is_batch_invariant = True
        """On a GPU nothing is promised."""
        if model.device.type == "cpu":
            found = find_rows_multiple(model.head_dim, BLOCK_TOKENS, torch.get_num_threads())
            if found is None:
                logger.warning("on this processor the bits of a sample may depend on its neighbours")
                self.is_batch_invariant = False
            self._rows_multiple = found or ROWS_MULTIPLES[-1]
        self._decoding: DecodeAttention | None = None
        """Of the last pass: mostly the same sequences continue."""

    def begin(self, chunks: Sequence[PromptChunk], tokens: Sequence[NextToken]) -> StepAttention:
        """See `Steps`."""
        if not tokens:
            self._decoding = None
        elif self._decoding is None or not self._decoding.try_continue(tokens):
            self._decoding = DecodeAttention(tokens, self._heads_per_key, self._rows_multiple, self._cache.device)
        return StepAttention(self._cache, chunks, self._decoding, heads_per_key=self._heads_per_key)


class StepAttention:
    """Implements `model.attention.Attend` for one pass, and writes keys and values to the cache."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[PromptChunk], decoding: DecodeAttention | None, *, heads_per_key: int
    ) -> None:
        """Take the parts of a pass; `heads_per_key` is H / K, `decoding` is None if no sequence decodes."""
        self._cache = cache
        self._chunks = [PrefillAttention(chunk, heads_per_key, cache.device) for chunk in chunks]
        self._decoding = decoding

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        keys, values = self._cache.layer(layer)
        queries, key_rows, value_rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, heads, E)
        out = torch.zeros(queries.shape, dtype=query.dtype, device=query.device)  # (T, H, E)
        for chunk in self._chunks:
            chunk.write(keys.transpose(2, 3), key_rows)
            chunk.write(values, value_rows)
            chunk.attend(queries, keys, values, out, scaling, sliding_window, sinks)
        if self._decoding is not None:
            self._decoding.write(keys.transpose(2, 3), key_rows)
            self._decoding.write(values, value_rows)
            self._decoding.attend(queries, keys, values, out, scaling, sliding_window, sinks)
        return out.unsqueeze(0)


def _joined(blocks: Tensor) -> Tensor:
    """Return blocks (n, K, B, E) one after another: (1, K, n * B, E), the values of a token adjacent in memory."""
    return blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()


def _layout(tokens: Sequence[NextToken]) -> list[tuple[int, int, int, int, int]]:
    """Return everything that plans depend on except lengths. A sequence's blocks are only appended to."""
    return [
        (token.row, id(token.prompt), token.own.index, len(token.own.blocks), token.own.blocks[-1]) for token in tokens
    ]

"""The attention of a step of sampling: blocks of prompts, and one token more of every running sequence.

Knows positions and blocks of keys; not requests, versions or tokens.

Main invariant: every product has a shape that is the same whoever else is there, or one whose rows do not notice each
other, and what is added up for a row is added in the order of its own blocks. So a row's bits depend on its own tokens
and place alone: not on who is beside it, nor on which blocks the keys lie in, whether a prompt came in one step or
several, or was there already.

A prompt's queries are cut into blocks at absolute positions, the last filled up with zeros; each attends in one call to
the keys up to its own end. For running sequences see `decode_attention`.

Dimensions: T rows of the pass, N blocks of the memory, B tokens of a block, K key-value heads, H query heads, G query
heads per key-value head, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.block_attention import attend_prompt, mask_of
from workers.sampling.decode_attention import DecodeAttention
from workers.sampling.kv_cache import KVCache, PromptBlocks


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of the pass from `row` on that are a prompt's tokens `start` to `stop`."""

    row: int
    prompt: PromptBlocks
    start: int
    """A multiple of `BLOCK_TOKENS`."""
    stop: int
    """The same, or the prompt's end."""


class StepAttention:
    """Implements `attention.Attend` for one pass, and fills the cache on the way."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[PromptChunk], decoding: DecodeAttention | None, *, heads_per_key: int
    ) -> None:
        """Of prompts and running sequences in the same pass; `heads_per_key` is G."""
        self._cache = cache
        self._chunks = [_Chunk(chunk, heads_per_key) for chunk in chunks]
        self._decoding = decoding

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `Attend`."""
        keys, values = self._cache.layer(layer)
        queries, key_rows, value_rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (T, heads, E)
        out = torch.zeros(queries.shape, dtype=query.dtype, device=query.device)  # (T, H, E)
        for chunk in self._chunks:
            chunk.write(keys.transpose(2, 3), key_rows)
            chunk.write(values, value_rows)
            chunk.attend(queries, keys, values, out, scaling, sliding_window)
        if self._decoding is not None:
            self._decoding.write(keys.transpose(2, 3), key_rows)
            self._decoding.write(values, value_rows)
            self._decoding.attend(queries, keys, values, out, scaling, sliding_window)
        return out.unsqueeze(0)


class _Chunk:
    """Whole blocks of a prompt."""

    def __init__(self, chunk: PromptChunk, heads_per_key: int) -> None:
        assert chunk.start % BLOCK_TOKENS == 0
        assert chunk.stop % BLOCK_TOKENS == 0 or chunk.stop == chunk.prompt.length
        self._rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
        self._first, self._end = chunk.start // BLOCK_TOKENS, -(-chunk.stop // BLOCK_TOKENS)
        self._padding = self._end * BLOCK_TOKENS - chunk.stop
        self._blocks = torch.tensor(chunk.prompt.blocks[: self._end])
        self._heads_per_key = heads_per_key
        self._masks: dict[int | None, Tensor] = {}

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """This chunk's rows of (T, heads, E), filled up with zeros: (blocks, B, heads, E)."""
        filled = F.pad(rows[self._rows], (0, 0, 0, 0, 0, self._padding))
        return filled.reshape(-1, BLOCK_TOKENS, *filled.shape[1:])

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Put the chunk's keys or values among rows (T, K, E) where they belong in (N, K, B, E)."""
        self._blocks = self._blocks.to(memory.device)
        memory[self._blocks[self._first :]] = self._in_blocks(rows).transpose(1, 2)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        """Fill the chunk's rows of `out` (T, H, E)."""
        first = self._first_seen(self._first, window)
        blocks = self._blocks[first:]
        seen = [_joined(keys[blocks].transpose(2, 3)), _joined(values[blocks])]  # (1, K, tokens, E) each
        rows = self._in_blocks(queries).unflatten(2, (-1, self._heads_per_key))  # (blocks, B, K, G, E)
        rows = rows.permute(0, 2, 3, 1, 4).flatten(2, 3)  # (blocks, K, G * B, E)
        mask = self._mask(window, queries)
        results = []
        for place, block in enumerate(range(self._first, self._end)):
            begin, end = self._first_seen(block, window), block + 1
            tokens = slice((begin - first) * BLOCK_TOKENS, (end - first) * BLOCK_TOKENS)
            results.append(
                attend_prompt(
                    rows[place : place + 1],
                    seen[0][:, :, tokens],
                    seen[1][:, :, tokens],
                    mask[:, :, :, mask.shape[-1] - (end - begin) * BLOCK_TOKENS :],
                    scaling,
                )
            )
        result = torch.cat(results).unflatten(2, (self._heads_per_key, BLOCK_TOKENS))  # (blocks, K, G, B, E)
        result = result.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)  # (tokens, H, E)
        out[self._rows] = result[: len(result) - self._padding]

    def _first_seen(self, block: int, window: int | None) -> int:
        """The first block of which a block's first query sees anything."""
        return 0 if window is None else max(0, block * BLOCK_TOKENS - window + 1) // BLOCK_TOKENS

    def _mask(self, window: int | None, like: Tensor) -> Tensor:
        """Of the last block's queries and as many keys, up to its end, as any block here sees: (1, 1, G * B, keys).

        It depends on the distance alone, so that of another block is its right part.
        """
        if window not in self._masks:
            most = max(block + 1 - self._first_seen(block, window) for block in range(self._first, self._end))
            query = torch.arange(BLOCK_TOKENS).repeat(self._heads_per_key).unsqueeze(1)
            distance = query - torch.arange(BLOCK_TOKENS * (1 - most), BLOCK_TOKENS)  # (G * B, keys)
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._masks[window] = mask_of(is_hidden, like)[None, None]
        return self._masks[window]


def _joined(blocks: Tensor) -> Tensor:
    """Blocks (n, K, B, E) one behind the other: (1, K, n * B, E), with the values of a token beside each other."""
    return blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()

"""Attention of one chunk of a prompt, block by block.

The chunk's queries are cut into blocks at absolute positions, the last one filled up with zeros. Each block is one call
over the keys up to its own end.

Does not depend on requests, versions or tokens.

Main invariant: every call has a shape that depends only on a block's position in its prompt. So a row's bits do not
depend on whether the prompt came in one step or several, or was shared, or on which blocks hold its keys.

Dimensions: T rows of the pass, n blocks of the chunk, N blocks of the memory, B tokens of a block, K key-value heads,
H query heads, G query heads per key-value head, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.attention.block_products import attend_prompt, score_mask
from workers.sampling.kv_cache import PromptBlocks


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows of the pass, from `row` on, that are a prompt's tokens `start` to `stop`."""

    row: int
    prompt: PromptBlocks
    start: int
    """A multiple of `BLOCK_TOKENS`."""
    stop: int
    """A multiple of `BLOCK_TOKENS`, or the prompt's end."""


class PrefillAttention:
    """The attention of one chunk, in all layers of a pass."""

    def __init__(self, chunk: PromptChunk, heads_per_key: int) -> None:
        """Take a chunk; `heads_per_key` is G."""
        assert chunk.start % BLOCK_TOKENS == 0
        assert chunk.stop % BLOCK_TOKENS == 0 or chunk.stop == chunk.prompt.length
        self._rows = slice(chunk.row, chunk.row + chunk.stop - chunk.start)
        self._first, self._end = chunk.start // BLOCK_TOKENS, -(-chunk.stop // BLOCK_TOKENS)
        self._padding = self._end * BLOCK_TOKENS - chunk.stop
        self._blocks = torch.tensor(chunk.prompt.blocks[: self._end])
        self._heads_per_key = heads_per_key
        self._masks: dict[int | None, Tensor] = {}

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Write the chunk's keys or values, among rows (T, K, E), to its blocks of (N, K, B, E)."""
        self._blocks = self._blocks.to(memory.device)
        memory[self._blocks[self._first :]] = self._in_blocks(rows).transpose(1, 2)

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int | None
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
            results.append(
                attend_prompt(
                    rows[index : index + 1],
                    seen[0][:, :, tokens],
                    seen[1][:, :, tokens],
                    mask[:, :, :, mask.shape[-1] - (end - begin) * BLOCK_TOKENS :],
                    scaling,
                )
            )
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


def _joined(blocks: Tensor) -> Tensor:
    """Return blocks (n, K, B, E) one after another: (1, K, n * B, E), the values of a token adjacent in memory."""
    return blocks.transpose(0, 1).flatten(1, 2).unsqueeze(0).contiguous()

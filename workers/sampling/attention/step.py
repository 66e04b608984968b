"""The attention of one decode step: chunks of prompts (`prefill`), and the next token of running sequences (`decode`).

Does not depend on requests, versions or tokens.

Main invariant: a row's bits depend only on its own tokens and position, not on the other rows of the pass or on the
blocks that hold its keys.

Dimensions: T rows of the pass, K key-value heads, H query heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.sampling.attention.decode import DecodeAttention
from workers.sampling.attention.prefill import PrefillAttention, PromptChunk
from workers.sampling.kv_cache import KVCache


class StepAttention:
    """Implements `model.attention.Attend` for one pass, and writes keys and values to the cache."""

    def __init__(
        self, cache: KVCache, chunks: Sequence[PromptChunk], decoding: DecodeAttention | None, *, heads_per_key: int
    ) -> None:
        """Take the parts of a pass; `heads_per_key` is H / K, `decoding` is None if no sequence decodes."""
        self._cache = cache
        self._chunks = [PrefillAttention(chunk, heads_per_key) for chunk in chunks]
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

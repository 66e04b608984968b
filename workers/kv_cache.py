"""Keys and values of what is being sampled, and the attention of a decode step over them.

Knows positions and sequences; not requests, adapters or tokens. A prompt is computed once and copied to each of its
samples; samples that began together stay equally long, and are one call of the kernel per layer (a wave).

Main invariant: a row attends to its own sequence alone, and its bits do not depend on the others in its wave. A step
that failed can be run again: nothing counts before `advance`.

Dimensions: T rows of the pass, S sequences of a wave, P tokens of a prompt, C capacity of a wave in tokens, H query
heads, K key-value heads, G query heads per key-value head, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.attention import AttendPacked

QUERY_ROWS_MULTIPLE = 4
"""Queries per key-value head are padded to this multiple: with others a row's bits depend on its wave."""


@dataclass(slots=True)
class PromptCache:
    """Keys and values of one prompt, (K, P, E) per layer."""

    length: int
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class WaveCache:
    """Keys and values of samples of one prompt that are equally long, (S, K, C, E) per layer."""

    def __init__(self, prompt: PromptCache, num_sequences: int, capacity: int) -> None:
        assert prompt.length <= capacity
        self.length = prompt.length
        """Tokens of each sequence that are in the cache."""
        self.num_sequences = num_sequences
        self._keys = [self._filled(keys, capacity) for keys in prompt.keys]
        self._values = [self._filled(values, capacity) for values in prompt.values]

    def _filled(self, prompt: Tensor, capacity: int) -> Tensor:
        num_heads, length, head_dim = prompt.shape
        cache = prompt.new_empty(self.num_sequences, num_heads, capacity, head_dim)
        cache[:, :, :length] = prompt
        return cache

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values (S, K, E) of the next token of every sequence."""
        self._keys[layer][: self.num_sequences, :, self.length] = keys
        self._values[layer][: self.num_sequences, :, self.length] = values

    def seen(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        """What the next token sees, itself included: keys and values (S, K, C', E)."""
        stop = self.length + 1
        start = 0 if window is None else max(0, stop - window)
        rows, tokens = slice(self.num_sequences), slice(start, stop)
        return self._keys[layer][rows, :, tokens], self._values[layer][rows, :, tokens]

    def advance(self) -> None:
        """The token that was put last is now part of every sequence."""
        self.length += 1

    def remove(self, index: int) -> None:
        """Drop a sequence; the last one takes its place."""
        last = self.num_sequences - 1
        if index != last:
            for cache in (*self._keys, *self._values):
                cache[index, :, : self.length] = cache[last, :, : self.length]
        self.num_sequences = last


class StepAttention:
    """Implements `attention.Attend` for a pass of waves (one row per sequence) and whole prompts, in row order."""

    def __init__(self, pieces: Sequence[WaveCache | PromptCache], attend_packed: AttendPacked) -> None:
        """`attend_packed` is the base model's: a prompt attends as it does in training."""
        self._pieces = tuple(pieces)
        self._packed = {
            length: attend_packed([length], [1])
            for length in {piece.length for piece in pieces if isinstance(piece, PromptCache)}
        }

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, sliding_window: int | None
    ) -> Tensor:
        """See `Attend`; fills the caches on the way."""
        out = torch.empty_like(query.transpose(1, 2))  # (1, T, H, E)
        start = 0
        for piece in self._pieces:
            stop = start + (piece.num_sequences if isinstance(piece, WaveCache) else piece.length)
            q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))  # (1, heads, rows, E)
            if isinstance(piece, WaveCache):
                out[0, start:stop] = _attend_to_wave(piece, layer, q[0], k[0], v[0], scaling, sliding_window)
            else:
                piece.keys.append(k[0].clone())
                piece.values.append(v[0].clone())
                attend = self._packed[piece.length]
                out[:, start:stop] = attend(layer, q, k, v, scaling=scaling, sliding_window=sliding_window)
            start = stop
        out[:, start:] = 0
        return out


def _attend_to_wave(
    wave: WaveCache, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Query (H, S, E), key and value (K, S, E) of one new token per sequence -> (S, H, E).

    All query heads of a key-value head are rows of one small product, so that no keys are repeated.
    """
    wave.put(layer, key.transpose(0, 1), value.transpose(0, 1))
    keys, values = wave.seen(layer, window)
    num_heads = key.shape[0]
    rows = query.unflatten(0, (num_heads, -1)).permute(2, 0, 1, 3)  # (S, K, G, E)
    num_rows = rows.shape[2]
    rows = F.pad(rows, (0, 0, 0, -num_rows % QUERY_ROWS_MULTIPLE))
    if rows.device.type == "cpu":
        # Named, because the choice of `scaled_dot_product_attention` depends on the shape of the whole batch.
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, keys, values, dropout_p=0.0, is_causal=False, scale=scaling
        )[0]
    else:
        out = F.scaled_dot_product_attention(rows, keys, values, scale=scaling)
    return out[:, :, :num_rows].flatten(1, 2)

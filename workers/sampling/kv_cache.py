"""The memory for keys and values of all samples: one allocation, in blocks of a fixed number of tokens.

Does not depend on the owners of blocks (`shared_blocks`) or on how attention reads them (`attention`).

Main invariant: a value that is read from a block is finite, unless the model computed a non-finite one for a user of
that block. A block is cleared before it is filled token by token, and written whole otherwise. This matters because a
hidden position has the weight zero, and 0 x NaN would let one tenant's overflow reach another.

Dimensions: N blocks, B tokens of a block, K key-value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.contract.capacity import BLOCK_TOKENS
from workers.model.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Where a prompt's keys and values are."""

    blocks: list[int]
    """From the prompt's beginning up to the last computed token."""
    length: int
    """Tokens of the whole prompt."""


@dataclass(frozen=True, slots=True)
class SequenceBlocks:
    """Where the keys and values of a running sequence's own tokens are."""

    index: int
    """Of the sequence among the samples of its prompt."""
    blocks: Sequence[int]
    """The last one has room for one more token."""
    length: int
    """Own tokens whose keys and values are computed."""


class KVCache:
    """Keys and values of every layer. On a CPU, blocks that were never written take no memory."""

    def __init__(self, model: BaseModel, num_blocks: int) -> None:
        """Allocate the blocks; raises the library's error if there is not enough memory."""
        sizes = (BLOCK_TOKENS, model.head_dim)
        shape = (model.num_layers, num_blocks, model.num_key_value_heads)
        self._keys = torch.empty(*shape, *reversed(sizes), dtype=model.dtype, device=model.device)
        self._values = torch.empty(*shape, *sizes, dtype=model.dtype, device=model.device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys (N, K, E, B), the fastest order to read, and values (N, K, B, E), to read and write."""
        return self._keys[layer], self._values[layer]

    def clear(self, blocks: Iterable[int]) -> None:
        """Write zeros to blocks in all layers."""
        for block in blocks:
            self._keys[:, block].zero_()
            self._values[:, block].zero_()


def block_bytes(model: BaseModel) -> int:
    """Return the bytes of one block, all layers together."""
    token_values = 2 * model.num_layers * model.num_key_value_heads * model.head_dim
    return BLOCK_TOKENS * token_values * int(model.dtype.itemsize)

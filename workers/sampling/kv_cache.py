"""The memory for keys and values of all that is sampled: one allocation, in blocks of a fixed number of tokens.

Knows shapes; not whose a block is (`block_pool`), nor how it is attended to (`step_attention`).

Main invariant: what is read of a block is finite unless the model itself computed something else for whoever uses the
block: it is cleared before it is filled token by token, and written whole when it is filled at once. Positions that are
hidden from a query count with the weight zero, and 0 x NaN would let one tenant's overflow reach another.

Dimensions: N blocks, B tokens of a block, K key-value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.contract.capacity import BLOCK_TOKENS
from workers.model.base_model import BaseModel


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Where a prompt's keys and values are."""

    blocks: list[int]
    """From its beginning on, as far as it has come."""
    length: int
    """Tokens of the whole prompt."""


class KVCache:
    """Keys and values of every layer. On a CPU, pages that no block has used take no memory."""

    def __init__(self, model: BaseModel, num_blocks: int) -> None:
        """Allocate; raises what the library raises when there is no memory."""
        sizes = (BLOCK_TOKENS, model.head_dim)
        shape = (model.num_layers, num_blocks, model.num_key_value_heads)
        self._keys = torch.empty(*shape, *reversed(sizes), dtype=model.dtype, device=model.device)
        self._values = torch.empty(*shape, *sizes, dtype=model.dtype, device=model.device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (N, K, E, B), which are read fastest so, and values (N, K, B, E) of a layer, to be read and written."""
        return self._keys[layer], self._values[layer]

    def clear(self, blocks: Iterable[int]) -> None:
        """Make blocks zero in all layers."""
        for block in blocks:
            self._keys[:, block].zero_()
            self._values[:, block].zero_()


def block_bytes(model: BaseModel) -> int:
    """Bytes of one block, all layers together."""
    token_values = 2 * model.num_layers * model.num_key_value_heads * model.head_dim
    return BLOCK_TOKENS * token_values * int(model.dtype.itemsize)

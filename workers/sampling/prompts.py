"""A request's prompt on a worker: how far it is computed, and which of its blocks are shared.

Does not depend on the pool of blocks or on passes: `prefill` decides, this class records.

Main invariant: the blocks of a prompt are its shared ones first, in chain order and all held, then its private ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.contract.capacity import BLOCK_TOKENS, num_blocks_for
from workers.sampling.kv_cache import PromptBlocks
from workers.sampling.shared_blocks import Prefix


class Prompt:
    """The tokens of one prompt, and the blocks with their keys and values."""

    def __init__(self, tokens: NDArray[np.int32], num_shareable_blocks: int) -> None:
        """Take the tokens; the first `num_shareable_blocks` blocks need not be computed if they are shared already."""
        self.tokens = tokens
        self.blocks: list[int] = []
        """Key-value blocks, as many as are computed or about to be."""
        self.location = PromptBlocks(self.blocks, len(tokens))
        """The same list of blocks, for attention."""
        self.shared: list[Prefix] = []
        self.num_computed = 0
        """Tokens whose keys and values are there."""
        self.num_cached_tokens = 0
        """Tokens that were found in shared blocks instead of being computed."""
        self._num_shareable_blocks = num_shareable_blocks

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return self.location.length

    @property
    def num_blocks(self) -> int:
        """Blocks that the whole prompt takes."""
        return num_blocks_for(self.length)

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that the prompt does not have yet."""
        return self.num_blocks - len(self.blocks)

    @property
    def private_blocks(self) -> list[int]:
        """Blocks after the shared ones."""
        return self.blocks[len(self.shared) :]

    @property
    def is_computed(self) -> bool:
        """Whether the keys and values of all tokens are there."""
        return self.num_computed == self.length

    def block_tokens(self, block: int) -> bytes:
        """Return the tokens of a whole block of the prompt."""
        tokens = self.tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        assert len(tokens) == BLOCK_TOKENS
        return tokens.tobytes()

    def next_shareable(self, num_found: int) -> bytes | None:
        """Return the tokens of the block that the prompt needs next after `num_found` others; None: compute it."""
        block = len(self.shared)
        if self.num_computed != block * BLOCK_TOKENS:
            return None  # its version was replaced, and no block computed since can be shared
        block += num_found
        return self.block_tokens(block) if block < self._num_shareable_blocks else None

    def use_shared(self, prefixes: Sequence[Prefix]) -> None:
        """Use shared blocks, which the caller holds, as the next ones of the prompt."""
        num_tokens = len(prefixes) * BLOCK_TOKENS
        self.shared += prefixes
        self.blocks.extend(prefix.block for prefix in prefixes)
        self.num_computed += num_tokens
        self.num_cached_tokens += num_tokens

    def add_private(self, block: int) -> None:
        """Append a block that will be computed."""
        self.blocks.append(block)

    def make_shared(self, prefix: Prefix) -> None:
        """Replace the first private block by the shared one with the same tokens."""
        self.blocks[len(self.shared)] = prefix.block
        self.shared.append(prefix)

    def advance(self, stop: int) -> None:
        """Record that all tokens before `stop` are computed."""
        self.num_computed = stop

"""The memory for keys and values of all samples, in blocks of a fixed number of tokens, and each block's state.

Which of the two memories a sampler has, `KVCache` or, on a GPU with a kernel for it, `PagedCache`, and how many tokens
a block has, is decided by the attention that reads them.

A block is free, private to one request, or shared by prompts that begin alike. A shared block holds the keys and values
of one whole block of prompt tokens, computed with one version. A prompt finds it by its chain: the root of its version
and scope, then the tokens of every block before it, then its own tokens. Tokens are compared, not hashes, so a hit is
never a collision. A request holds all blocks of the chain that it uses. A shared block without a holder is *idle*: it
stays until its memory is needed, the least recently used leaving first.

Does not depend on requests, or on how attention reads the blocks (`attention`).

Main invariants: a value that is read from a block is finite, unless the model computed a non-finite one for a user of
that block. A block is cleared before it is filled token by token, and written whole otherwise. This matters because a
hidden position has the weight zero, and 0 x NaN would let one tenant's overflow reach another. A page may hold anything
beyond its tokens: nothing reads it.
Free and idle blocks together are never fewer than reserved ones, so a reserved block can always be taken. A holder of a
block holds every block before it in the chain, so an evicted block never has children.

Dimensions: N blocks, B tokens of a block, K key-value heads, E head dimension.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workers.contract.capacity import BLOCK_TOKENS
from workers.model.base_model import BaseModel

PAGE_TOKENS = 256
"""Tokens of a page: the library's kernel takes multiples of this number."""


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
    """Keys and values of every layer of full attention. On a CPU, blocks that were never written take no memory."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, model: BaseModel, num_blocks: int) -> None:
        """Allocate the blocks; raises the library's error if there is not enough memory."""
        sizes = (BLOCK_TOKENS, model.head_dim)
        shape = (model.num_attention_layers, num_blocks, model.num_key_value_heads)
        self.device = model.device
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


class PagedCache:
    """Like `KVCache`, in pages: blocks in which a token's heads are together, as the kernel reads."""

    block_tokens = PAGE_TOKENS

    def __init__(self, model: BaseModel, num_blocks: int) -> None:
        """Allocate the pages, and one more; raises the library's error if there is not enough memory."""
        self.scratch_page = num_blocks
        """A page that no sequence has, for rows that nobody needs."""
        shape = (model.num_attention_layers, num_blocks + 1, PAGE_TOKENS, model.num_key_value_heads, model.head_dim)
        self.device = model.device
        self._keys, self._values = (torch.empty(shape, dtype=model.dtype, device=model.device) for _ in range(2))

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values (N, B, K, E), to read and write."""
        return self._keys[layer], self._values[layer]

    def clear(self, blocks: Iterable[int]) -> None:
        """Do nothing: what a page holds beyond its tokens is never read."""


@dataclass(slots=True, eq=False)
class Prefix:
    """A shared block at the end of its chain; or a root, the empty prefix with which a version's chains begin."""

    parent: Prefix | None
    tokens: bytes
    """The block's own tokens, as they lie in memory."""
    block: int
    num_holders: int = 0
    is_dropped: bool = False
    """No prompt can find it any more; its block becomes free when its last holder releases it."""
    state: int | None = None
    """The slot with the states of linear attention after the block; see `delta_states`."""
    children: dict[bytes, Prefix] = field(default_factory=dict)


@dataclass(slots=True)
class _Root:
    prefix: Prefix
    weights: weakref.ref[object] | None
    """The object whose lifetime is that of the version's weights; None: the base model, which never changes."""

    def is_of(self, weights: object | None) -> bool:
        return weights is None if self.weights is None else self.weights() is weights


class BlockPool:
    """The blocks 0 to `num_blocks` - 1. Used by one thread only."""

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        on_leave: Callable[[Prefix], None] = lambda _: None,
    ) -> None:
        """Begin with all blocks free; `block_tokens`: tokens of a block. `on_leave` gets a shared block that leaves."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._on_leave = on_leave
        self.num_evictions = 0
        """Idle blocks that gave way, since the pool was made."""
        self._free = list(range(num_blocks))  # ascending
        self.untouched = set(self._free)
        """Blocks that were never taken, so that a CPU has not given them memory yet."""
        self.num_reserved = 0
        """Blocks that are promised and not yet taken."""
        self._roots: dict[Hashable, _Root] = {}
        self._idle: OrderedDict[Prefix, None] = OrderedDict()
        """In order of use, the least recently used first."""

    @property
    def num_available(self) -> int:
        """Blocks that can still be reserved: free or idle, and not reserved."""
        return len(self._free) + len(self._idle) - self.num_reserved

    @property
    def num_in_use(self) -> int:
        """Private blocks, and shared blocks that a request holds."""
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def num_idle(self) -> int:
        """Shared blocks that no request holds."""
        return len(self._idle)

    def reserve(self, num_blocks: int) -> bool:
        """Promise blocks, all or none; return whether there were enough."""
        if num_blocks > self.num_available:
            return False
        self.num_reserved += num_blocks
        return True

    def unreserve(self, num_blocks: int) -> None:
        """Withdraw a promise of blocks that were not taken."""
        assert 0 <= num_blocks <= self.num_reserved
        self.num_reserved -= num_blocks

    def take(self, end: Literal["low", "high"]) -> int:
        """Make one reserved block private, the lowest or the highest that is free; return it.

        Adjacent blocks are read in one call. Prompts take low blocks and sequences take high ones, because a step reads
        the two in different calls.
        """
        assert self.num_reserved > 0, "a block was taken that was not reserved"
        self.num_reserved -= 1
        if not self._free:
            self._evict()
        block = self._free.pop(0 if end == "low" else -1)
        self.untouched.discard(block)
        return block

    def free(self, blocks: Iterable[int]) -> None:
        """Make private blocks free."""
        for block in blocks:
            index = bisect_left(self._free, block)
            assert index == len(self._free) or self._free[index] != block, f"block {block} is free already"
            self._free.insert(index, block)

    def root(self, key: Hashable, weights: object | None) -> Prefix:
        """Return the root of the chains of `key`, a version within a scope; `weights` None: the base model.

        Blocks that were shared under the key with another `weights` object are dropped: the key has other weights now,
        and so other keys and values.
        """
        root = self._roots.get(key)
        if root is None or not root.is_of(weights):
            if root is not None:
                self._drop(key)
            root = _Root(Prefix(None, b"", -1), None if weights is None else weakref.ref(weights))
            self._roots[key] = root
        return root.prefix

    def find(self, parent: Prefix, tokens: bytes) -> Prefix | None:
        """Return the shared block with these tokens after a prefix that was not dropped; None if there is none."""
        return None if parent.is_dropped else parent.children.get(tokens)

    def hold(self, prefix: Prefix) -> None:
        """Keep a shared block from being evicted. The caller already holds the chain before it."""
        if not prefix.num_holders:
            self._idle.pop(prefix, None)
        prefix.num_holders += 1

    def release(self, chain: Sequence[Prefix]) -> None:
        """Undo `hold` for a whole chain, given from its beginning. Its later blocks count as less recently used."""
        for prefix in reversed(chain):
            prefix.num_holders -= 1
            if prefix.num_holders:
                continue
            if prefix.is_dropped:
                self.free([prefix.block])
            else:
                self._idle[prefix] = None

    def share(self, parent: Prefix, tokens: bytes, block: int) -> Prefix | None:
        """Share a private block that the caller has filled, after a prefix that it holds; return it, held.

        If the same tokens are shared there already, hold and return that block, and free the caller's. Return None if
        the prefix was dropped: the block stays private.
        """
        if parent.is_dropped:
            return None
        known = self.find(parent, tokens)
        if known is not None:
            self.hold(known)
            self.free([block])
            return known
        prefix = parent.children[tokens] = Prefix(parent, tokens, block, num_holders=1)
        return prefix

    def drop_orphans(self) -> None:
        """Drop the shared blocks of versions whose weights do not exist any more."""
        for key in [key for key, root in self._roots.items() if root.weights is not None and root.weights() is None]:
            self._drop(key)

    def drop_all(self) -> None:
        """Drop all shared blocks."""
        for key in list(self._roots):
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        for prefix in _descendants(self._roots.pop(key).prefix):
            prefix.is_dropped = True
            self._on_leave(prefix)
            if prefix in self._idle:
                del self._idle[prefix]
                self.free([prefix.block])

    def _evict(self) -> None:
        prefix, _ = self._idle.popitem(last=False)
        assert prefix.parent is not None
        assert not prefix.children, "the blocks after an idle block are evicted before it"
        del prefix.parent.children[prefix.tokens]
        self._on_leave(prefix)
        self.free([prefix.block])
        self.num_evictions += 1


def block_bytes(model: BaseModel, block_tokens: int = BLOCK_TOKENS) -> int:
    """Return the bytes of one block, all layers together."""
    token_values = 2 * model.num_attention_layers * model.num_key_value_heads * model.head_dim
    return block_tokens * token_values * int(model.dtype.itemsize)


def _descendants(prefix: Prefix) -> Iterator[Prefix]:
    """Yield a prefix and every shared block after it."""
    found = [prefix]
    while found:
        prefix = found.pop()
        found += prefix.children.values()
        yield prefix

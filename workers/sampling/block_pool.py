"""Which blocks of the key-value memory are free, taken or remembered, and for which prefix of whose prompts.

Knows block numbers, keys of versions and tokens; not tensors, requests or models.

A remembered block holds a whole block of some prompt's tokens, computed with one version. It is found by the chain of
tokens that leads to it, compared token by token, so a hit is never a coincidence. Who uses a chain holds every block of
it; what nobody holds stays until its place is needed, and the least recently used goes first.

Main invariants: a block is free, taken by one user, or remembered. Free and unheld blocks together are never fewer than
what is reserved, so whoever has reserved always gets. Whoever holds a block holds what comes before it, so what is
evicted has nothing behind it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, eq=False)
class Prefix:
    """A remembered block, at the end of a chain of them; or the empty prefix, with which a version's chains begin."""

    parent: Prefix | None
    tokens: bytes
    """The block's own tokens, as they lie in memory."""
    block: int
    num_holders: int = 0
    is_dropped: bool = False
    """Nothing finds it any more; its block is free when its last holder lets go."""
    children: dict[bytes, Prefix] = field(default_factory=dict)


@dataclass(slots=True)
class _Root:
    prefix: Prefix
    owner: weakref.ref[object] | None
    """What the version's weights belong to; None: the base model, which never changes."""

    def is_of(self, owner: object | None) -> bool:
        return owner is None if self.owner is None else self.owner() is owner


class BlockPool:
    """The blocks 0 to `num_blocks` - 1. One thread only."""

    def __init__(self, num_blocks: int) -> None:
        """All blocks are free."""
        self.num_blocks = num_blocks
        self.num_evictions = 0
        """Remembered blocks that gave way, since the pool was made."""
        self._free = list(range(num_blocks))  # ascending
        self._never_taken = set(self._free)
        self._num_reserved = 0
        self._roots: dict[Hashable, _Root] = {}
        self._unheld: OrderedDict[Prefix, None] = OrderedDict()
        """In order of use, the least recent first."""

    # ------------------------------------------------------------------ room

    @property
    def num_available(self) -> int:
        """Blocks that can still be reserved: free or remembered for nobody, and not reserved."""
        return len(self._free) + len(self._unheld) - self._num_reserved

    @property
    def num_taken(self) -> int:
        """Blocks that are neither free nor remembered for nobody."""
        return self.num_blocks - len(self._free) - len(self._unheld)

    @property
    def num_reserved(self) -> int:
        """Blocks that are promised and not yet taken."""
        return self._num_reserved

    @property
    def num_never_taken(self) -> int:
        """Blocks that nobody has ever taken."""
        return len(self._never_taken)

    @property
    def num_remembered(self) -> int:
        """Remembered blocks that nobody holds."""
        return len(self._unheld)

    def reserve(self, num_blocks: int) -> bool:
        """Promise blocks, all or none; whether there was room."""
        if num_blocks > self.num_available:
            return False
        self._num_reserved += num_blocks
        return True

    def unreserve(self, num_blocks: int) -> None:
        """Give up a promise of blocks that were not taken."""
        assert 0 <= num_blocks <= self._num_reserved
        self._num_reserved -= num_blocks

    def take(self, end: Literal["low", "high"]) -> int:
        """One reserved block, the lowest or highest that is free.

        Blocks beside each other are read in one go; prompts grow from one end and samples from the other, for they are
        read apart from each other.
        """
        assert self._num_reserved > 0, "a block was taken that nobody reserved"
        self._num_reserved -= 1
        if not self._free:
            self._evict()
        block = self._free.pop(0 if end == "low" else -1)
        self._never_taken.discard(block)
        return block

    def give(self, blocks: Iterable[int]) -> None:
        """Make taken blocks free."""
        for block in blocks:
            place = bisect_left(self._free, block)
            assert place == len(self._free) or self._free[place] != block, f"block {block} is free already"
            self._free.insert(place, block)

    # ------------------------------------------------------------------ prefixes

    def root(self, key: Hashable, owner: object | None) -> Prefix:
        """The empty prefix of a version for those who share it, whose weights belong to `owner` (None: the base model).

        What was remembered under the key for another owner is dropped: other weights give other keys and values.
        """
        root = self._roots.get(key)
        if root is None or not root.is_of(owner):
            if root is not None:
                self._drop(key)
            root = _Root(Prefix(None, b"", -1), None if owner is None else weakref.ref(owner))
            self._roots[key] = root
        return root.prefix

    def find(self, parent: Prefix, tokens: bytes) -> Prefix | None:
        """The remembered block with these tokens behind a prefix."""
        return parent.children.get(tokens)

    def hold(self, prefix: Prefix) -> None:
        """Keep a remembered block, of whose chain the caller holds the rest, from being evicted."""
        if not prefix.num_holders:
            self._unheld.pop(prefix, None)
        prefix.num_holders += 1

    def release(self, chain: Sequence[Prefix]) -> None:
        """Let go of a chain, given from its beginning. Its blocks stay remembered, those behind as the older ones."""
        for prefix in reversed(chain):
            prefix.num_holders -= 1
            if prefix.num_holders:
                continue
            if prefix.is_dropped:
                self.give([prefix.block])
            else:
                self._unheld[prefix] = None

    def remember(self, parent: Prefix, tokens: bytes, block: int) -> Prefix | None:
        """Remember a block that the caller has taken and filled, behind a prefix that it holds; held by the caller.

        If the same is remembered already, that is held and returned, and the caller's block is free. None: the version
        was dropped, and the block remains the caller's.
        """
        if parent.is_dropped:
            return None
        known = self.find(parent, tokens)
        if known is not None:
            self.hold(known)
            self.give([block])
            return known
        prefix = parent.children[tokens] = Prefix(parent, tokens, block, num_holders=1)
        return prefix

    def drop_orphans(self) -> None:
        """Drop what is remembered for versions that are gone."""
        for key in [key for key, root in self._roots.items() if root.owner is not None and root.owner() is None]:
            self._drop(key)

    def drop_all(self) -> None:
        """Drop what is remembered for any version."""
        for key in list(self._roots):
            self._drop(key)

    # ------------------------------------------------------------------ inside

    def _drop(self, key: Hashable) -> None:
        for prefix in _all_behind(self._roots.pop(key).prefix):
            prefix.is_dropped = True
            if prefix in self._unheld:
                del self._unheld[prefix]
                self.give([prefix.block])

    def _evict(self) -> None:
        prefix, _ = self._unheld.popitem(last=False)
        assert prefix.parent is not None
        assert not prefix.children, "what is behind a block is older than it"
        del prefix.parent.children[prefix.tokens]
        self.give([prefix.block])
        self.num_evictions += 1


def _all_behind(prefix: Prefix) -> Iterator[Prefix]:
    """A prefix and every remembered block behind it."""
    found = [prefix]
    while found:
        prefix = found.pop()
        found += prefix.children.values()
        yield prefix

"""Key-value blocks: reserved, taken, shared, evicted, with their invariants checked after every step."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.sampling.kv_cache import BlockPool, Prefix


class Owner:
    """Stands for the object that holds a version's weights."""


def chain_of(pool: BlockPool, key: str, *tokens: bytes, owner: object | None = None) -> list[Prefix]:
    """Share a chain of new blocks; return it, held."""
    assert pool.reserve(len(tokens))
    last, chain = pool.root(key, owner), []
    for block_tokens in tokens:
        prefix = pool.share(last, block_tokens, pool.take("low"))
        assert prefix is not None
        chain.append(prefix)
        last = prefix
    return chain


def test_prompts_take_the_lowest_blocks_and_sequences_the_highest() -> None:
    pool = BlockPool(6)
    pool.reserve(6)
    assert [pool.take("low"), pool.take("high"), pool.take("low"), pool.take("high")] == [0, 5, 1, 4]
    pool.free([0, 5])
    assert [pool.take("low"), pool.take("high")] == [0, 5]


def test_reservation_beyond_the_available_blocks_reserves_none() -> None:
    pool = BlockPool(3)
    assert pool.reserve(2)
    assert not pool.reserve(2)
    assert pool.num_available == 1
    pool.unreserve(2)
    assert pool.reserve(3)


def test_shared_block_is_found_by_version_and_whole_chain_of_tokens_only() -> None:
    pool = BlockPool(8)
    first, second = chain_of(pool, "v", b"ab", b"cd")
    root = pool.root("v", None)
    assert pool.find(root, b"ab") is first
    assert pool.find(first, b"cd") is second
    assert pool.find(root, b"cd") is None
    assert pool.find(pool.root("w", None), b"ab") is None


def test_least_recently_used_block_is_evicted_first_and_a_chain_from_its_end() -> None:
    pool = BlockPool(4)
    old, new = chain_of(pool, "v", b"a", b"b"), chain_of(pool, "v", b"c", b"d")
    pool.release(old)
    pool.release(new)
    pool.hold(old[0])
    pool.release(old[:1])  # used again: now only its end is older than the other chain
    assert pool.reserve(3)
    left = []
    for _ in range(3):
        pool.take("low")
        left.append([prefix.parent.children.get(prefix.tokens) is prefix for prefix in (*old, *new) if prefix.parent])
    assert left == [[True, False, True, True], [True, False, True, False], [True, False, False, False]]
    assert pool.num_evictions == 3


def test_held_block_is_never_evicted() -> None:
    pool = BlockPool(2)
    held = chain_of(pool, "v", b"a")
    pool.release(chain_of(pool, "v", b"b"))
    assert pool.num_available == 1
    assert not pool.reserve(2)
    assert pool.reserve(1)
    assert pool.take("high") != held[0].block


def test_same_tokens_computed_twice_are_shared_once() -> None:
    pool = BlockPool(4)
    (first,) = chain_of(pool, "v", b"a")
    pool.reserve(1)
    assert pool.share(pool.root("v", None), b"a", pool.take("low")) is first
    assert first.num_holders == 2
    assert pool.num_in_use == 1


def test_new_weights_under_a_key_find_no_block_and_held_blocks_are_freed_at_release() -> None:
    pool = BlockPool(4)
    before, after = Owner(), Owner()
    held, idle = chain_of(pool, "v", b"a", owner=before), chain_of(pool, "v", b"b", owner=before)
    pool.release(idle)
    root = pool.root("v", after)
    assert pool.find(root, b"a") is None
    assert (pool.num_in_use, pool.num_idle) == (1, 0)
    pool.reserve(1)
    block = pool.take("low")
    assert pool.share(held[0], b"c", block) is None, "no prompt could find it"
    pool.free([block])
    pool.release(held)
    assert (pool.num_in_use, pool.num_available) == (0, 4)


def test_no_block_is_found_behind_one_that_was_dropped() -> None:
    """It is free, or another version's by now."""
    pool = BlockPool(4)
    before, after = Owner(), Owner()
    held, behind = chain_of(pool, "v", b"a", b"b", owner=before)
    pool.release([held, behind])
    pool.hold(held)
    pool.root("v", after)
    assert pool.find(held, behind.tokens) is None


def test_blocks_of_deleted_weights_are_dropped() -> None:
    pool = BlockPool(4)
    owner = Owner()
    pool.release(chain_of(pool, "v", b"a", owner=owner))
    pool.release(chain_of(pool, "", b"a"))
    pool.drop_orphans()
    assert pool.num_idle == 2
    del owner
    pool.drop_orphans()
    assert pool.num_idle == 1, "the base model is never dropped"
    pool.drop_all()
    assert pool.num_idle == 0


class Users(RuleBasedStateMachine):
    """Users with chains of few different tokens, in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.owners = {"a": Owner(), "b": Owner()}
        self.chains: list[tuple[str, list[Prefix]]] = []
        self.own: list[int] = []

    @rule(key=st.sampled_from("ab"), tokens=st.lists(st.sampled_from([b"x", b"y"]), max_size=3))
    def use_prompt(self, key: str, tokens: list[bytes]) -> None:
        last, chain = self.pool.root(key, self.owners[key]), []
        for block_tokens in tokens:
            found = self.pool.find(last, block_tokens)
            if found is None:
                break
            self.pool.hold(found)
            chain.append(found)
            last = found
        if not self.pool.reserve(len(tokens) - len(chain)):
            self.pool.release(chain)
            return
        for block_tokens in tokens[len(chain) :]:
            prefix = self.pool.share(last, block_tokens, self.pool.take("low"))
            assert prefix is not None
            chain.append(prefix)
            last = prefix
        self.chains.append((key, chain))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.chains:
            _, chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
            self.pool.release(chain)

    @rule()
    def take(self) -> None:
        if self.pool.reserve(1):
            self.own.append(self.pool.take("high"))

    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        if self.own:
            self.pool.free([self.own.pop(data.draw(st.integers(0, len(self.own) - 1)))])

    @rule(key=st.sampled_from("ab"))
    def publish_again(self, key: str) -> None:
        self.owners[key] = Owner()
        self.pool.drop_orphans()

    @invariant()
    def every_block_has_one_user(self) -> None:
        held = {prefix.block for _, chain in self.chains for prefix in chain}
        assert len(held) + len(set(self.own)) == len(held | set(self.own)) == self.pool.num_in_use
        assert len(set(self.own)) == len(self.own)
        assert self.pool.num_available == 7 - self.pool.num_in_use

    @invariant()
    def chains_are_whole(self) -> None:
        for _, chain in self.chains:
            for parent, prefix in pairwise(chain):
                assert prefix.parent is parent


TestUsers = Users.TestCase
TestUsers.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)

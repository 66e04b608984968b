"""States of linear attention: places, slots and checkpoints, with their invariants checked after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from workers.sampling.delta_states import OWNER_PLACES, StateOwner, StatePool
from workers.sampling.kv_cache import Prefix


def prefix_of(number: int) -> Prefix:
    return Prefix(None, b"", number)


def owner_of(pool: StatePool) -> StateOwner:
    assert pool.reserve(1)
    return StateOwner(pool)


def test_a_model_without_linear_attention_has_no_states_and_places_for_all_owners() -> None:
    pool = StatePool(0)
    assert pool.reserve(1000)
    assert pool.num_places == 0


def test_places_beyond_the_slots_are_refused_all_together() -> None:
    pool = StatePool(5)
    assert pool.reserve(2)
    assert not pool.reserve(1)
    assert pool.reserve_spare()
    assert not pool.reserve_spare()


def test_a_pass_writes_another_slot_than_it_reads_and_the_same_one_when_it_runs_again() -> None:
    owner = owner_of(StatePool(4))
    first = owner.writable()
    assert owner.writable() == first
    owner.commit()
    assert owner.current == first
    assert owner.writable() != first


def test_a_checkpoint_is_read_by_another_owner_after_its_first_has_gone_on() -> None:
    pool = StatePool(4)
    first, prefix = owner_of(pool), prefix_of(0)
    slot = first.writable()
    first.commit()
    pool.keep(prefix, slot)
    first.writable()
    first.commit()
    second = owner_of(pool)
    second.adopt(slot)
    first.close()
    assert second.current == slot == prefix.state
    assert second.writable() != slot


def test_the_checkpoint_used_last_leaves_last_and_one_in_use_stays() -> None:
    pool = StatePool(6)
    prefixes = [prefix_of(number) for number in range(2)]
    for prefix in prefixes:
        owner = owner_of(pool)
        pool.keep(prefix, owner.writable())
        owner.close()
    reader = owner_of(pool)
    assert prefixes[0].state is not None
    reader.adopt(prefixes[0].state)
    owners = [owner_of(pool) for _ in range(2)]
    taken = [reader.writable(), *(owner.writable() for owner in owners)]
    for owner in owners:
        owner.commit()
        taken.append(owner.writable())
    assert prefixes[1].state is None, "its slot was needed"
    assert prefixes[0].state == reader.current
    assert reader.current not in taken


def test_a_block_that_is_found_no_more_gets_no_checkpoint() -> None:
    pool = StatePool(4)
    owner, prefix = owner_of(pool), prefix_of(0)
    prefix.is_dropped = True
    pool.keep(prefix, owner.writable())
    assert prefix.state is None


class Owners(RuleBasedStateMachine):
    """Owners in a small pool, in any order of passes, checkpoints and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = StatePool(7)
        self.owners: list[StateOwner] = []
        self.prefixes: list[Prefix] = []

    def one(self, data: st.DataObject) -> StateOwner | None:
        return data.draw(st.sampled_from(self.owners)) if self.owners else None

    @rule()
    def begin(self) -> None:
        if self.pool.reserve(1):
            self.owners.append(StateOwner(self.pool))

    @rule(data=st.data(), succeeds=st.booleans())
    def run_a_pass(self, data: st.DataObject, *, succeeds: bool) -> None:
        owner = self.one(data)
        if owner is not None:
            assert owner.writable() != owner.current
            if succeeds:
                owner.commit()

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        owner = self.one(data)
        if owner is not None and owner.current is not None and owner.current not in self.kept:
            self.prefixes.append(prefix_of(len(self.prefixes)))
            self.pool.keep(self.prefixes[-1], owner.current)

    @rule(data=st.data())
    def keep_a_spare(self, data: st.DataObject) -> None:
        owner = self.one(data)
        if owner is not None and owner.spare() is not None:
            self.prefixes.append(prefix_of(len(self.prefixes)))
            owner.keep_spare(self.prefixes[-1])

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        owner = self.one(data)
        if owner is not None and owner._next is None and self.kept:
            owner.adopt(data.draw(st.sampled_from(sorted(self.kept))))

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        if self.prefixes:
            self.pool.forget(data.draw(st.sampled_from(self.prefixes)))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = self.one(data)
        if owner is not None:
            owner.close()
            self.owners.remove(owner)

    @property
    def kept(self) -> set[int]:
        return {prefix.state for prefix in self.prefixes if prefix.state is not None}

    @invariant()
    def places_are_those_of_the_owners(self) -> None:
        assert self.pool.num_places == OWNER_PLACES * len(self.owners) <= self.pool.num_slots

    @invariant()
    def no_slot_to_be_written_is_read_by_another(self) -> None:
        written = [owner._next for owner in self.owners if owner._next is not None]
        assert len(set(written)) == len(written)
        assert not set(written) & (self.kept | {owner.current for owner in self.owners})

    @invariant()
    def every_slot_is_held_kept_or_free(self) -> None:
        held = {slot for owner in self.owners for slot in (owner.current, owner._next) if slot is not None}
        assert len(held | self.kept) + len(self.pool._free) == self.pool.num_slots
        assert len(self.pool._prefix_of) == len(self.kept)


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)

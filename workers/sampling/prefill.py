"""Prefill: which tokens of which prompts a step computes, and which blocks prompts share instead of computing them.

Does not depend on passes or drawn tokens.

Main invariants: scopes take turns block by block, and so do the requests of a scope. Of prompts whose next block is the
same one, only the first computes it; the others find it shared in the next step. Blocks are shared only within a scope,
so counts and times never tell one scope about another's prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from workers.bank.bank import Bank
from workers.sampling.delta_states import StateMove, StateOwner, StatePool
from workers.sampling.kv_cache import BlockPool, Prefix
from workers.sampling.sequences import ActiveRequest

DECODING_SHARE = 1 / 4
"""The part of `tokens_max` that a step computes while sequences are decoding, so that their next token is not late."""
CHECKPOINT_BLOCKS = 8
"""A hybrid's prompt leaves a checkpoint at the ends of so many blocks, and at the last one that it shares."""


class Prefill:
    """The prompts of one worker that are being computed. Used by one thread only."""

    def __init__(self, pool: BlockPool, states: StatePool, bank: Bank, tokens_max: int) -> None:
        """Compute at most `tokens_max` tokens in a step, rounded up to a whole block."""
        self._pool = pool
        self._states = states
        self._bank = bank
        self._tokens_max = tokens_max
        self._active: dict[str, deque[ActiveRequest]] = {}
        """By scope; scopes, and the requests of each, in the order of their turns."""

    def add(self, active: ActiveRequest, shared: Sequence[Prefix]) -> None:
        """Begin a prompt with shared blocks that are held for it; blocks for the rest are reserved."""
        self._use_shared(active, shared)
        self._active.setdefault(active.scope, deque()).append(active)

    def remove(self, active: ActiveRequest) -> None:
        """Stop computing a prompt; ignored if it is not being computed."""
        requests = self._active.get(active.scope, deque())
        if active in requests:
            requests.remove(active)
        if not requests:
            self._active.pop(active.scope, None)

    def plan(self, *, is_decoding: bool, held: Collection[str] = ()) -> dict[ActiveRequest, int]:
        """Return up to which token each prompt is computed in this step; the blocks for it are taken.

        Prompts that get no token in this step, as those of `held` scopes, are not in the result.
        """
        stops = self._positions()
        budget = int(self._tokens_max * (DECODING_SHARE if is_decoding else 1))
        while budget > 0 and (active := self._next(stops, held)) is not None:
            num_tokens = min(self._pool.block_tokens, active.prompt.length - stops[active])
            stops[active] += num_tokens
            budget -= num_tokens
        planned = {active: stop for active, stop in stops.items() if stop > active.prompt.num_computed}
        for active, stop in planned.items():
            while len(active.prompt.blocks) * self._pool.block_tokens < stop:
                active.prompt.add_private(self._pool.take("low"))
        return planned

    def advance(self, active: ActiveRequest, stop: int) -> None:
        """Record that a prompt is computed up to `stop`, and share its whole blocks."""
        prompt = active.prompt
        prompt.advance(stop)
        if active.state is not None:
            active.state.commit()
        for block in range(len(prompt.shared), stop // self._pool.block_tokens):
            parent = prompt.shared[-1] if prompt.shared else self._root(active)
            prefix = self._pool.share(parent, prompt.block_tokens(block), prompt.blocks[block])
            if prefix is None:
                break
            prompt.make_shared(prefix)
        if active.state is not None:
            self._keep_states(active, active.state)
        if prompt.is_computed:
            self.remove(active)

    def move(self, active: ActiveRequest, stop: int) -> StateMove | None:
        """Return how a pass up to `stop` moves a prompt's state on; None: the model has no linear attention."""
        if active.state is None:
            return None
        position = active.prompt.last_shareable
        slot = active.state.spare() if active.prompt.num_computed < position < stop else None
        checkpoint = None if slot is None else (position - active.prompt.num_computed, slot)
        return StateMove(active.state.current, active.state.writable(), checkpoint)

    def _keep_states(self, active: ActiveRequest, state: StateOwner) -> None:
        """Make checkpoints of a prompt's states: a state is of use where a shared block ends."""
        prompt = active.prompt
        kept = state.keep_spare(prompt.shared_until(prompt.last_shareable))
        prefix = prompt.shared_until(prompt.num_computed)
        if prefix is not None and state.current is not None and self._states.keep(prefix, state.current):
            kept = prefix
        if kept is not None:
            is_lasting = (prompt.shared.index(kept) + 1) % CHECKPOINT_BLOCKS == 0
            replaced = prompt.keep(kept, is_lasting=is_lasting)
            if replaced is not None:
                self._states.forget(replaced)
        if prompt.is_computed:
            state.end_writing()

    def _use_shared(self, active: ActiveRequest, shared: Sequence[Prefix]) -> None:
        """Use shared blocks that are held for a prompt, and the state behind the last of them."""
        active.prompt.use_shared(shared)
        if shared and active.state is not None:
            assert shared[-1].state is not None
            active.state.adopt(shared[-1].state)

    def find_shared(self, active: ActiveRequest) -> list[Prefix]:
        """Return the blocks that a prompt needs next and that are shared already; of a hybrid, up to a checkpoint."""
        found: list[Prefix] = []
        while (wanted := self._next_shareable(active, found)) is not None:
            prefix = self._pool.find(*wanted)
            if prefix is None:
                break
            found.append(prefix)
        while found and self._states.num_slots and found[-1].state is None:
            found.pop()
        return found

    def hold_shared(self, active: ActiveRequest) -> list[Prefix]:
        """Hold the blocks of `find_shared`, and return them."""
        found = self.find_shared(active)
        for prefix in found:
            self._pool.hold(prefix)
        return found

    def _next(self, stops: Mapping[ActiveRequest, int], held: Collection[str]) -> ActiveRequest | None:
        """Return the next request in `stops` whose prompt is longer than that; it and its scope go to the end."""
        for scope, requests in self._active.items():
            if scope in held:
                continue
            for active in requests:
                if stops.get(active, active.prompt.length) < active.prompt.length:
                    requests.remove(active)
                    requests.append(active)
                    self._active[scope] = self._active.pop(scope)
                    return active
        return None

    def _positions(self) -> dict[ActiveRequest, int]:
        """Use blocks that are shared by now; return where each prompt stands.

        Prompts that wait for a block which an earlier one computes are left out.
        """
        stops: dict[ActiveRequest, int] = {}
        in_progress: set[tuple[Prefix, bytes]] = set()
        for active in [active for requests in self._active.values() for active in requests]:
            shared = self.hold_shared(active)
            self._pool.unreserve(len(shared))
            self._use_shared(active, shared)
            wanted = self._next_shareable(active, ())
            if wanted is None or wanted not in in_progress:
                stops[active] = active.prompt.num_computed
            if wanted is not None:
                in_progress.add(wanted)
        return stops

    def _next_shareable(self, active: ActiveRequest, found: Sequence[Prefix]) -> tuple[Prefix, bytes] | None:
        """Return parent and tokens of the block that a prompt needs after `found`; None if it cannot be shared."""
        tokens = active.prompt.next_shareable(len(found))
        if tokens is None:
            return None
        chain = found or active.prompt.shared
        return chain[-1] if chain else self._root(active), tokens

    def _root(self, active: ActiveRequest) -> Prefix:
        """Return the root of a request's version and scope; a key that was published again has a new one."""
        weights = self._bank.entry(active.key) if active.key else None
        return self._pool.root((active.request.scope, active.key), weights)

"""Sequence slots: which waiting request gets the next one, and the key-value memory behind each of them.

Scopes get slots in turn; within a scope, requests are served first come, first served. Does not depend on passes, drawn
tokens or events.

Main invariants: a slot comes with memory reserved up to its sequence's last token, so a sequence with a slot can always
finish. A request that has begun keeps one slot until its last sequence has ended, so it never stops half way. One scope
never has more than `SCOPE_SHARE` of the slots or of the memory, except for a single sequence. A request that does not
fit is passed over at most `PATIENCE` times; after that no other request is served before it. So every request is served
in the end, provided that sequences end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from workers.sampling.delta_states import StateMove, StateOwner, StatePool
from workers.sampling.kv_cache import BlockPool
from workers.sampling.prefill import Prefill
from workers.sampling.sequences import ActiveRequest, ActiveSequence

PATIENCE = 64
"""How many slots may be granted past a request that does not fit; then no other request gets one before it."""
SCOPE_SHARE = 3 / 4
"""The part of all slots, and of all memory, that one scope has at most, so that a new scope can begin at once."""


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    item: T
    num_passed_over: int = 0


class SlotOrder(Generic[T]):
    """One queue per scope, served round robin. An item stays at the head of its queue until it is removed."""

    def __init__(self, patience: int) -> None:
        """Let the head of a queue be passed over at most `patience` times because it cannot be served."""
        self._patience = patience
        self._queues: dict[str, deque[_Waiting[T]]] = {}
        """By scope, in the order of service: a scope that was served goes to the end."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, scope: str, item: T) -> None:
        """Append an item to its scope's queue."""
        self._queues.setdefault(scope, deque()).append(_Waiting(item))

    def remove(self, scope: str, item: T) -> None:
        """Remove an item from any position of its queue; ignored if it is not there."""
        queue = self._queues.get(scope, deque())
        for position, waiting in enumerate(queue):
            if waiting.item is item:
                del queue[position]
                break
        if not queue:
            self._queues.pop(scope, None)

    def serve(self, try_serve: Callable[[T], bool], is_at_limit: Callable[[T], bool] = lambda _: False) -> T | None:
        """Offer service to the heads of the queues until `try_serve` returns True for one; return that item.

        A head that `is_at_limit` is skipped: it does not count as passed over, and no other item waits for it.
        """
        passed_over: list[_Waiting[T]] = []
        for scope, queue in self._queues.items():
            head = queue[0]
            if is_at_limit(head.item):
                continue
            if try_serve(head.item):
                for other in passed_over:
                    other.num_passed_over += 1
                head.num_passed_over = 0
                self._queues[scope] = self._queues.pop(scope)
                return head.item
            if head.num_passed_over >= self._patience:
                return None
            passed_over.append(head)
        return None


class SequenceSlots:
    """The requests of one worker, waiting and running. Used by one thread only."""

    def __init__(self, pool: BlockPool, states: StatePool, prefill: Prefill, num_slots: int) -> None:
        """Grant `num_slots` slots at most."""
        self.running: list[ActiveRequest] = []
        """Requests with a slot, in the order in which they got their first."""
        self.num_granted = 0
        self._pool = pool
        self._states = states
        self._prefill = prefill
        self._num_slots = num_slots
        self._waiting: SlotOrder[ActiveRequest] = SlotOrder(PATIENCE)
        """Requests with a sequence that has no slot yet."""

    def add(self, active: ActiveRequest) -> None:
        """Queue a request of which at least one sequence fits into the memory."""
        self._waiting.add(active.scope, active)

    def grant(self) -> None:
        """Grant slots one at a time, in the order of `SlotOrder`, as long as there are slots and memory."""
        while self._waiting and self.num_granted < self._num_slots:
            active = self._waiting.serve(self._try_reserve, self._is_scope_at_share)
            if active is None:
                return
            active.grant_slot()
            self.num_granted += 1
            if not active.num_waiting:
                self._waiting.remove(active.scope, active)

    def _is_scope_at_share(self, active: ActiveRequest) -> bool:
        """Return whether one more sequence would take its scope beyond `SCOPE_SHARE`; never so for its only one."""
        own = [other for other in self.running if other.scope == active.scope]
        if not own:
            return False
        if sum(other.num_slots for other in own) >= int(self._num_slots * SCOPE_SHARE):
            return True
        shared = {prefix.block for other in own for prefix in other.prompt.shared}
        num_blocks = len(shared) + active.num_own_blocks
        for other in own:
            num_blocks += other.prompt.num_blocks - len(other.prompt.shared) + other.num_slots * other.num_own_blocks
        if not active.num_slots:
            num_blocks += active.prompt.num_blocks
            num_blocks -= sum(prefix.block in shared for prefix in self._prefill.find_shared(active))
        return num_blocks > int(self._pool.num_blocks * SCOPE_SHARE)

    def _try_reserve(self, active: ActiveRequest) -> bool:
        """Reserve the memory for one more sequence, and for the prompt if it is the first; return whether it fits."""
        num_owners = 1 if active.num_slots else 2
        if not self._states.reserve(num_owners):
            return False
        shared = [] if active.num_slots else self._prefill.hold_shared(active)
        num_blocks = 0 if active.num_slots else active.prompt.num_blocks - len(shared)
        if not self._pool.reserve(num_blocks + active.num_own_blocks):
            self._pool.release(shared)
            self._states.unreserve(num_owners * self._states.owner_places)
            return False
        if active.num_slots:
            return True
        if self._states.num_slots:
            active.begin_state(StateOwner(self._states))
        self.running.append(active)
        self._prefill.add(active, shared)
        return True

    def extend(self, sequence: ActiveSequence, num_unread: int = 0) -> list[int]:
        """Give a sequence the block for its next token if it needs one; return the blocks given.

        `num_unread`: tokens that were drawn for it and that the host has not read.
        """
        if len(sequence.blocks) >= sequence.num_blocks_wanted(num_unread):
            return []
        block = self._pool.take("high")
        sequence.add_block(block)
        return [block]

    def move(self, active: ActiveRequest, sequence: ActiveSequence) -> StateMove | None:
        """Return how a pass moves a sequence's state on; None: the model has no linear attention."""
        if not self._states.num_slots:
            return None
        state = sequence.state or sequence.begin_state(StateOwner(self._states))
        read = state.current
        if read is None and active.state is not None:
            read = active.state.current
        return StateMove(read, state.writable())

    def moved(self, active: ActiveRequest, sequences: Sequence[ActiveSequence]) -> None:
        """Record that a pass has moved on the states of these sequences; drop the prompt's after its last use."""
        if active.state is None:
            return
        for sequence in sequences:
            assert sequence.state is not None
            sequence.state.commit()
        if active.num_begun == active.request.num_samples and all(each.has_own_state for each in active.sequences):
            active.state.close()

    def end_sequence(self, active: ActiveRequest, sequence: ActiveSequence) -> None:
        """Free an ended sequence's blocks, and its slot unless it is the last one of a request with more to run."""
        self._pool.free(sequence.blocks)
        is_followed = active.num_slots == 1 and active.num_begun < active.request.num_samples
        if sequence.state is not None:
            sequence.state.close(keeps_places=is_followed)
        elif not is_followed:
            self._states.unreserve(self._states.owner_places)
        if is_followed:
            is_reserved = self._pool.reserve(len(sequence.blocks))
            assert is_reserved, "the blocks were freed just now"
            if not active.num_waiting:
                self._waiting.remove(active.scope, active)
            return
        self._pool.unreserve(active.num_own_blocks - len(sequence.blocks))
        active.return_slot()
        self.num_granted -= 1

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request in any state, and free everything that it holds."""
        self._waiting.remove(active.scope, active)
        self._prefill.remove(active)
        if active not in self.running:
            return
        self.running.remove(active)
        own = [block for sequence in active.sequences for block in sequence.blocks]
        self._pool.free(own)
        self._pool.free(active.prompt.private_blocks)
        self._pool.unreserve(active.num_slots * active.num_own_blocks - len(own) + active.prompt.num_missing_blocks)
        self._pool.release(active.prompt.shared)
        states = [sequence.state for sequence in active.sequences if sequence.state is not None]
        self._states.unreserve((active.num_slots - len(states)) * self._states.owner_places)
        for state in [*states, *([] if active.state is None else [active.state])]:
            state.close()
        self.num_granted -= active.num_slots

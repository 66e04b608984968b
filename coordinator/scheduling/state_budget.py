"""The budget of a cycle's step phase: how many steps run and states are saved and loaded in it, and whose.

A save or a load moves a whole state through the coordinator's memory and its disk. `StateCosts` measures the bytes and
seconds by kind of operation and shape of adapter; a step takes what the bytes of its adapter's copy suggest.
`plan_states` is a pure function of these costs and of the tenants' virtual counters. It chooses by what the operations
are likely to take; tenants are charged what they took, once that is measured.

Does not depend on workers, files or a clock. Main invariant: the states of one step phase take at most `BYTES_MAX` and
an estimated `SECONDS_MAX`, or there is only one; its steps take what the pass has left of the cycle, and `SECONDS_MAX`
in any case. So a tenant that queues hundreds of saves or steps delays its own, and a neighbour by the budget of one
cycle.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median_low
from typing import NamedTuple

from coordinator.operations.operation import Kind
from coordinator.scheduling.virtual_counters import FairState, lifted
from workers.contract.messages import AdapterSpec

BYTES_MAX = 32 << 20
"""States in the coordinator's memory that one step phase moves; several copies of them exist on the way to the disk."""
SECONDS_MAX = 0.1
"""Engine and file seconds that they may add to a cycle: about as long as the pass of a small model takes."""
KEPT = 9
"""Measurements kept of one kind: their median is right with up to four outliers."""


@dataclass(frozen=True, slots=True)
class StateCost:
    """What one save, load or step takes."""

    num_bytes: int
    seconds: float
    """Of the engine, and of writing files."""
    moves_state: bool = True
    """False: it is an optimizer step."""


UNKNOWN = StateCost(BYTES_MAX, SECONDS_MAX)
"""The cost of a kind without a measurement: its first operation has a step phase for itself."""


class StateCosts:
    """The measured costs of one base model's saves and loads."""

    def __init__(self) -> None:
        self._measured: dict[tuple[object, ...], deque[StateCost]] = {}

    def observe(self, kind: Kind, spec: AdapterSpec, cost: StateCost) -> None:
        """Record what an operation took."""
        self._measured.setdefault(_key(kind, spec), deque(maxlen=KEPT)).append(cost)

    def of(self, kind: Kind, spec: AdapterSpec) -> StateCost:
        """Return what an operation is likely to take: the most bytes and the median seconds of the last ones."""
        kept = self._measured.get(_key(kind, spec))
        if kept is None:
            return UNKNOWN
        return StateCost(max(cost.num_bytes for cost in kept), median_low(cost.seconds for cost in kept))


class StateCandidate(NamedTuple):
    """An adapter with operations that the step phase may run now."""

    adapter_id: str
    tenant_id: str
    costs: Iterable[StateCost]
    """Of its operations, in the order in which they must run."""
    last_cycle_id: int
    """The cycle in whose step phase it last had a turn; 0: none."""


@dataclass(slots=True)
class _Room:
    """What is left for one sort of operations; the first one of each sort runs in any case."""

    num_bytes: float
    seconds: float
    is_untouched: bool = True

    def take(self, cost: StateCost) -> bool:
        """Take an operation's cost, if there is room for it; return whether there was."""
        if not self.is_untouched and (cost.num_bytes > self.num_bytes or cost.seconds > self.seconds):
            return False
        self.num_bytes, self.seconds = self.num_bytes - cost.num_bytes, self.seconds - cost.seconds
        self.is_untouched = False
        return True


def plan_states(
    candidates: Iterable[StateCandidate], state: FairState, tokens_per_s: float, steps_s_max: float = SECONDS_MAX
) -> tuple[dict[str, int], FairState]:
    """Return how many operations of each adapter run now, by adapter.

    The next one is of the tenant with the lowest counter, and of its adapters the one whose turn is longest ago. Within
    this choice a second counts as `tokens_per_s` tokens; the returned counters are not charged. The steps take
    `steps_s_max` at most, if that is more than `SECONDS_MAX`.
    """
    rotations: dict[str, deque[tuple[str, Iterator[StateCost]]]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.last_cycle_id, c.adapter_id)):
        rotations.setdefault(candidate.tenant_id, deque()).append((candidate.adapter_id, iter(candidate.costs)))
    before = lifted(state.shares, rotations.keys() - state.active, state.active)
    shares = dict(before)
    heap = [(shares[tenant].virtual_tokens, tenant) for tenant in rotations]
    heapq.heapify(heap)
    num_planned: dict[str, int] = {}
    states, steps = _Room(BYTES_MAX, SECONDS_MAX), _Room(0, max(steps_s_max, SECONDS_MAX))
    while heap:
        _, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        adapter_id, costs = rotation.popleft()
        cost = next(costs, None)
        if cost is not None and (states if cost.moves_state else steps).take(cost):
            num_planned[adapter_id] = num_planned.get(adapter_id, 0) + 1
            shares[tenant] = shares[tenant].charged(cost.seconds * tokens_per_s)
            rotation.append((adapter_id, costs))
        if rotation:
            heapq.heappush(heap, (shares[tenant].virtual_tokens, tenant))
    return num_planned, FairState(shares=before, active=state.active | rotations.keys())


def _key(kind: Kind, spec: AdapterSpec) -> tuple[object, ...]:
    return kind, spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed

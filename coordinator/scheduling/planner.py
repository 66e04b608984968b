"""Which adapters share the next pass, and on which worker each runs: a pure function of the ready chunks, the tenants'
virtual counters and the token budget.

The next chunk is one of the tenant with the lowest counter; within a tenant, adapters are served round robin. Does not
depend on a clock, the database or workers. Main invariant: planning reads at most one chunk of an adapter more than it
plans, because a cycle takes a few chunks of a thousand long logs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from coordinator.scheduling.virtual_counters import FairState, lifted


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An adapter that may have something to run in a pass."""

    adapter_id: str
    tenant_id: str
    worker_id: str
    """The worker of its copy; empty: it may be placed on any worker."""
    chunk_tokens: Iterable[int]
    """Tokens of its ready chunks, in the order in which they must run; each iteration yields the same."""
    last_cycle_id: int
    """The cycle that last had it; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassPlan:
    """The first `num_chunks` ready chunks of each adapter, and where they run."""

    num_chunks: Mapping[str, int]
    """By adapter, in the order in which they were picked."""
    placements: Mapping[str, str]
    """Adapter to worker, for every adapter in `num_chunks`."""
    tokens: Mapping[str, int]
    """Worker to tokens of this pass."""


@dataclass(slots=True)
class _Unplanned:
    """A candidate with a chunk left."""

    candidate: Candidate
    rest: Iterator[int]
    cost: int
    """Tokens of its next chunk."""
    num_planned: int = 0


def plan_pass(
    candidates: Iterable[Candidate], state: FairState, residents: Mapping[str, int], budget_tokens: int
) -> tuple[PassPlan, FairState]:
    """Fill every worker's budget fairly.

    `residents` has the live workers and the number of adapters with a copy on each; a candidate whose worker is not
    among them waits. A worker always takes at least one chunk, so that a chunk above the budget runs too.
    """
    rotations: dict[str, deque[_Unplanned]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.last_cycle_id, c.adapter_id)):
        if not candidate.worker_id or candidate.worker_id in residents:
            rest = iter(candidate.chunk_tokens)
            if (cost := next(rest, None)) is not None:
                rotations.setdefault(candidate.tenant_id, deque()).append(_Unplanned(candidate, rest, cost))
    active = frozenset(rotations)
    shares = lifted(state.shares, active - state.active, active & state.active)

    num_chunks: dict[str, int] = {}
    placements: dict[str, str] = {}
    tokens = dict.fromkeys(residents, 0)
    placer = _Placer(rotations.values(), residents, budget_tokens)
    heap = [(shares[tenant].virtual_tokens, tenant) for tenant in rotations]
    heapq.heapify(heap)
    while heap and min(tokens.values(), default=budget_tokens) < budget_tokens:
        counter, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        first = rotation.popleft()
        adapter_id, cost = first.candidate.adapter_id, first.cost
        worker = placements.get(adapter_id) or first.candidate.worker_id or placer.choose()
        if tokens[worker] == 0 or tokens[worker] + cost <= budget_tokens:
            if adapter_id not in placements and not first.candidate.worker_id:
                placer.placed(first.candidate, worker)
            first.num_planned += 1
            placements[adapter_id] = worker
            num_chunks[adapter_id] = first.num_planned
            tokens[worker] += cost
            shares[tenant] = shares[tenant].charged(cost)
            counter = shares[tenant].virtual_tokens
            if (cost_next := next(first.rest, None)) is not None:
                first.cost = cost_next
                rotation.append(first)
        if rotation:
            heapq.heappush(heap, (counter, tenant))
    return (
        PassPlan(num_chunks=num_chunks, placements=placements, tokens=tokens),
        FairState(shares=shares, active=active),
    )


class _Placer:
    """Places adapters without a copy on the worker with the fewest tokens of residents and of adapters placed there."""

    def __init__(
        self, rotations: Iterable[Iterable[_Unplanned]], residents: Mapping[str, int], budget_tokens: int
    ) -> None:
        self._num_residents = dict(residents)
        self._budget_tokens = budget_tokens
        self._load = dict.fromkeys(residents, 0)
        candidates = [each.candidate for rotation in rotations for each in rotation]
        if len(residents) > 1 and not all(candidate.worker_id for candidate in candidates):
            for candidate in candidates:
                if candidate.worker_id:
                    self._load[candidate.worker_id] += self._tokens(candidate)

    def choose(self) -> str:
        """Return the worker for a candidate without a copy."""
        return min(self._load, key=lambda worker: (self._load[worker], self._num_residents[worker], worker))

    def placed(self, candidate: Candidate, worker_id: str) -> None:
        """Count a candidate that was placed on this worker."""
        self._num_residents[worker_id] += 1
        self._load[worker_id] += self._tokens(candidate)

    def _tokens(self, candidate: Candidate) -> int:
        """Count its ready tokens, up to the budget: a long log must not make planning long."""
        total = 0
        for num_tokens in candidate.chunk_tokens:
            total += num_tokens
            if total >= self._budget_tokens:
                break
        return total


def place(residents: Mapping[str, int]) -> str:
    """Return the live worker with the fewest adapters, for an adapter that needs no pass; empty if none is live."""
    return min(residents, key=lambda worker: (residents[worker], worker), default="")

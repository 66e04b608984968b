"""Who is in the next pass: a pure function of what is ready, what each tenant has had, and the budget.

Fairness is by virtual token counters (as in VTC, Sheng et al., OSDI 2024): every chunk planned adds its tokens over the
tenant's weight to the tenant's counter, and the next chunk goes to the tenant with the lowest. A tenant that was away
is lifted to the lowest counter of those who stayed, so idleness saves nothing up. Within a tenant: round robin over
adapters.

Knows no clock, no database, no worker: everything comes in as values, and a new state goes out. Of a thousand long
queues a cycle takes a few chunks: what is not taken is not looked at, but for one chunk of each.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An adapter that may have something to run in a pass."""

    adapter_id: str
    tenant_id: str
    worker_id: str
    """Where its copy lives; empty: it may go anywhere."""
    chunk_tokens: Iterable[int]
    """Tokens of its ready chunks, in the order in which they must run: the same ones each time it is walked through."""
    last_cycle_id: int
    """The cycle it was last in; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a tenant is owed and has had."""

    weight: float = 1.0
    virtual_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FairState:
    """What planning carries from cycle to cycle."""

    shares: Mapping[str, Share] = field(default_factory=dict)
    active: frozenset[str] = frozenset()
    """Tenants of the last plan."""


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
class _Turn:
    """A candidate whose next chunk waits."""

    candidate: Candidate
    rest: Iterator[int]
    cost: int
    """Tokens of its next chunk."""
    num_taken: int = 0


def plan_pass(
    candidates: Iterable[Candidate], state: FairState, residents: Mapping[str, int], budget_tokens: int
) -> tuple[PassPlan, FairState]:
    """Fill every worker's budget fairly.

    `residents` has the live workers and the number of adapters that live on each; a candidate whose worker is not among
    them waits. A worker always takes at least one chunk, so that a chunk above the budget runs too.
    """
    rotations: dict[str, deque[_Turn]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.last_cycle_id, c.adapter_id)):
        if not candidate.worker_id or candidate.worker_id in residents:
            rest = iter(candidate.chunk_tokens)
            if (cost := next(rest, None)) is not None:
                rotations.setdefault(candidate.tenant_id, deque()).append(_Turn(candidate, rest, cost))
    shares = _lifted(state, frozenset(rotations))

    num_chunks: dict[str, int] = {}
    placements: dict[str, str] = {}
    tokens = dict.fromkeys(residents, 0)
    placer = _Placer(rotations.values(), residents, budget_tokens)
    heap = [(shares[tenant].virtual_tokens, tenant) for tenant in rotations]
    heapq.heapify(heap)
    while heap and min(tokens.values(), default=budget_tokens) < budget_tokens:
        counter, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        turn = rotation.popleft()
        adapter_id, cost = turn.candidate.adapter_id, turn.cost
        worker = placements.get(adapter_id) or turn.candidate.worker_id or placer.choose()
        if tokens[worker] == 0 or tokens[worker] + cost <= budget_tokens:
            if adapter_id not in placements and not turn.candidate.worker_id:
                placer.placed(turn.candidate, worker)
            turn.num_taken += 1
            placements[adapter_id] = worker
            num_chunks[adapter_id] = turn.num_taken
            tokens[worker] += cost
            counter += cost / shares[tenant].weight
            shares[tenant] = Share(weight=shares[tenant].weight, virtual_tokens=counter)
            if (cost_next := next(turn.rest, None)) is not None:
                turn.cost = cost_next
                rotation.append(turn)
        if rotation:
            heapq.heappush(heap, (counter, tenant))
    return (
        PassPlan(num_chunks=num_chunks, placements=placements, tokens=tokens),
        FairState(shares=shares, active=frozenset(rotations)),
    )


class _Placer:
    """Newcomers go where the least is to be done: by what residents bring plus what was placed there."""

    def __init__(self, rotations: Iterable[Iterable[_Turn]], residents: Mapping[str, int], budget_tokens: int) -> None:
        self._num_residents = dict(residents)
        self._budget_tokens = budget_tokens
        self._load = dict.fromkeys(residents, 0)
        candidates = [turn.candidate for rotation in rotations for turn in rotation]
        if len(residents) > 1 and not all(candidate.worker_id for candidate in candidates):
            for candidate in candidates:
                if candidate.worker_id:
                    self._load[candidate.worker_id] += self._tokens(candidate)

    def choose(self) -> str:
        """The worker for one that may go anywhere."""
        return min(self._load, key=lambda worker: (self._load[worker], self._num_residents[worker], worker))

    def placed(self, candidate: Candidate, worker_id: str) -> None:
        """It goes there."""
        self._num_residents[worker_id] += 1
        self._load[worker_id] += self._tokens(candidate)

    def _tokens(self, candidate: Candidate) -> int:
        """What it brings, up to what fills a cycle: a long queue must not make planning long."""
        total = 0
        for num_tokens in candidate.chunk_tokens:
            total += num_tokens
            if total >= self._budget_tokens:
                break
        return total


def place(residents: Mapping[str, int]) -> str:
    """The live worker with the fewest adapters, for one that needs no pass; empty if there is none."""
    return min(residents, key=lambda worker: (residents[worker], worker), default="")


def lowest_counter(shares: Mapping[str, Share], stayed: Iterable[str]) -> float:
    """To what a tenant who comes back is lifted: the lowest of those who stayed; if nobody did, the highest of all."""
    counters = [shares[tenant].virtual_tokens for tenant in stayed if tenant in shares]
    return min(counters) if counters else max((share.virtual_tokens for share in shares.values()), default=0.0)


def _lifted(state: FairState, active: frozenset[str]) -> dict[str, Share]:
    """Shares in which nobody who comes back is behind those who stayed."""
    shares = dict(state.shares)
    floor = lowest_counter(shares, active & state.active)
    for tenant in active - state.active:
        share = shares.get(tenant, Share())
        shares[tenant] = replace(share, virtual_tokens=max(share.virtual_tokens, floor))
    return shares

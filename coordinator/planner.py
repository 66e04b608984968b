"""Who is in the next pass: a pure function of what is ready, what each tenant has had, and the budget.

Fairness is by virtual token counters (as in VTC, Sheng et al., OSDI 2024): every chunk planned adds its tokens over the
tenant's weight to the tenant's counter, and the next chunk goes to the tenant with the lowest. A tenant that was away
is lifted to the lowest counter of those who stayed, so idleness saves nothing up. Within a tenant: round robin over
adapters.

Knows no clock, no database, no worker: everything comes in as values, and a new state goes out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An adapter with something to run in a pass."""

    adapter_id: str
    tenant_id: str
    worker_id: str
    """Where its copy lives; empty: it may go anywhere."""
    chunk_tokens: tuple[int, ...]
    """Tokens of its ready chunks, in the order in which they must run."""
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


def plan_pass(
    candidates: Iterable[Candidate], state: FairState, residents: Mapping[str, int], budget_tokens: int
) -> tuple[PassPlan, FairState]:
    """Fill every worker's budget fairly.

    `residents` has the live workers and the number of adapters that live on each; a candidate whose worker is not among
    them waits. A worker always takes at least one chunk, so that a chunk above the budget runs too.
    """
    rotations: dict[str, deque[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.last_cycle_id, c.adapter_id)):
        if not candidate.worker_id or candidate.worker_id in residents:
            rotations.setdefault(candidate.tenant_id, deque()).append(candidate)
    shares = _lifted(state, frozenset(rotations))

    num_chunks: dict[str, int] = {}
    placements: dict[str, str] = {}
    tokens = dict.fromkeys(residents, 0)
    load = dict.fromkeys(residents, 0)  # what residents bring plus what was placed: newcomers go where it is least
    for resident in (candidate for rotation in rotations.values() for candidate in rotation if candidate.worker_id):
        load[resident.worker_id] += sum(resident.chunk_tokens)
    num_residents = dict(residents)
    heap = [(shares[tenant].virtual_tokens, tenant) for tenant in rotations] if residents else []
    heapq.heapify(heap)
    while heap:
        counter, tenant = heapq.heappop(heap)
        rotation = rotations[tenant]
        candidate = rotation.popleft()
        num_taken = num_chunks.get(candidate.adapter_id, 0)
        cost = candidate.chunk_tokens[num_taken]
        worker = placements.get(candidate.adapter_id) or candidate.worker_id
        if not worker:
            worker = min(load, key=lambda w: (load[w], num_residents[w], w))
        if tokens[worker] == 0 or tokens[worker] + cost <= budget_tokens:
            if candidate.adapter_id not in placements and not candidate.worker_id:
                num_residents[worker] += 1
                load[worker] += sum(candidate.chunk_tokens)
            placements[candidate.adapter_id] = worker
            num_chunks[candidate.adapter_id] = num_taken + 1
            tokens[worker] += cost
            counter += cost / shares[tenant].weight
            shares[tenant] = replace(shares[tenant], virtual_tokens=counter)
            if num_taken + 1 < len(candidate.chunk_tokens):
                rotation.append(candidate)
        if rotation:
            heapq.heappush(heap, (counter, tenant))
    return (
        PassPlan(num_chunks=num_chunks, placements=placements, tokens=tokens),
        FairState(shares=shares, active=frozenset(rotations)),
    )


def place(residents: Mapping[str, int]) -> str:
    """The live worker with the fewest adapters, for one that needs no pass; empty if there is none."""
    return min(residents, key=lambda worker: (residents[worker], worker), default="")


def _lifted(state: FairState, active: frozenset[str]) -> dict[str, Share]:
    """Shares in which nobody who comes back is behind those who stayed."""
    shares = dict(state.shares)
    stayed = [shares[tenant].virtual_tokens for tenant in active & state.active if tenant in shares]
    floor = min(stayed) if stayed else max((s.virtual_tokens for s in shares.values()), default=0.0)
    for tenant in active - state.active:
        share = shares.get(tenant, Share())
        shares[tenant] = replace(share, virtual_tokens=max(share.virtual_tokens, floor))
    return shares

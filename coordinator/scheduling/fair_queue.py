"""Whose sample is next: the waiting requests of one base model, tenant by tenant.

Fairness is by virtual token counters, as in `planner`: the next turn is the tenant's who has had the least for its
weight, whatever the size of its requests. A tenant that was away is lifted to the lowest of those who stayed. What a
request will draw is known only at its end, so while it runs it counts with the most that it may draw, and then with
what the engine computed: nobody gets ahead by asking for much. What only may be drawn lifts nobody who comes meanwhile,
or it would wait for work that is never done; so a newcomer gets more than its share once, by what ran when it came.

The counters are not those of training. A tenant that only samples and one that only trains do not compete for turns
but for the worker's time, which `Batch.decode_share` divides; with one counter for both, who has done much of the one
while nobody else wanted it would be last in the other. They begin anew with every life of the coordinator.

Knows names, tenants and numbers of tokens; neither workers nor what a request asks. A turn costs the same however many
requests wait, and next to nothing more where a thousand tenants do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from coordinator.scheduling.planner import Share, lowest_counter

RANKS_KEPT_MIN = 64
"""Ranks that are out of date are thrown away when there are more of them than others, and more than this."""


@dataclass(slots=True)
class _Entry:
    """A request that is not finished."""

    tenant_id: str
    num_tokens_max: int
    """The most that the engine will compute for it."""


class SampleTurns:
    """The requests that wait or run, and what every tenant has had."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        """`shares` gives the weights; a tenant without one has the usual."""
        self._shares = {tenant: replace(share, virtual_tokens=0.0) for tenant, share in shares.items()}
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, OrderedDict[str, None]] = {}
        """Tenant to its waiting requests, in order."""
        self._ranks: dict[str, tuple[float, int, str]] = {}
        """The counter of each waiting tenant, and the number of its last change: of equal tenants the turn is whose
        counter has stood still the longest."""
        self._heap: list[tuple[float, int, str]] = []
        """Ranks, the lowest first, and some that are out of date."""
        self._changes = itertools.count()
        self._num_unfinished: Counter[str] = Counter()
        """Requests by tenant; who has none is away."""
        self._running_tokens: Counter[str] = Counter()
        """The most that each tenant's running requests may draw."""

    def add(self, name: str, tenant_id: str, num_tokens_max: int) -> None:
        """A new request waits for its turn."""
        assert name not in self._entries
        if tenant_id not in self._num_unfinished:
            share = self._shares.get(tenant_id, Share())
            floor = lowest_counter(self._shares, self._num_unfinished)
            self._shares[tenant_id] = replace(share, virtual_tokens=max(share.virtual_tokens, floor))
        self._num_unfinished[tenant_id] += 1
        self._entries[name] = _Entry(tenant_id, num_tokens_max)
        self._wait(name, tenant_id)
        if tenant_id not in self._ranks:
            self._rank(tenant_id)

    def first(self, may_run: Callable[[str], bool]) -> str | None:
        """The request whose turn it is, of those that may run now; None if none does."""
        while self._heap and self._ranks.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        name = self._first(self._heap[0][2], may_run)
        if name is None:  # only some may run: look at everybody
            names = (self._first(tenant, may_run) for _, _, tenant in sorted(self._ranks.values()))
            name = next(filter(None, names), None)
        return name

    def begin(self, name: str) -> None:
        """A waiting request runs."""
        entry = self._entries[name]
        self._leave(name, entry.tenant_id)
        self._running_tokens[entry.tenant_id] += entry.num_tokens_max
        self._rank(entry.tenant_id)

    def again(self, name: str) -> None:
        """A running request begins anew, and waits behind its tenant's others. What it had counts for nothing."""
        entry = self._entries[name]
        self._running_tokens[entry.tenant_id] -= entry.num_tokens_max
        self._wait(name, entry.tenant_id)
        self._rank(entry.tenant_id)

    def end(self, name: str, num_tokens: int) -> None:
        """A request is finished, whether it ran or waited; the engine computed `num_tokens` for it.

        One that was never added is ignored.
        """
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        tenant_id = entry.tenant_id
        if name in self._waiting.get(tenant_id, ()):
            self._leave(name, tenant_id)
        else:
            self._running_tokens[tenant_id] -= entry.num_tokens_max
        share = self._shares[tenant_id]
        counter = share.virtual_tokens + num_tokens / share.weight
        self._shares[tenant_id] = replace(share, virtual_tokens=counter)
        self._num_unfinished[tenant_id] -= 1
        self._rank(tenant_id)
        if not self._num_unfinished[tenant_id]:
            del self._num_unfinished[tenant_id], self._running_tokens[tenant_id]

    def _rank(self, tenant_id: str) -> None:
        """The tenant's counter has changed, or whether it waits."""
        self._ranks.pop(tenant_id, None)
        if tenant_id in self._waiting:
            share = self._shares[tenant_id]
            counter = share.virtual_tokens + self._running_tokens[tenant_id] / share.weight
            self._ranks[tenant_id] = (counter, next(self._changes), tenant_id)
            heapq.heappush(self._heap, self._ranks[tenant_id])
            if len(self._heap) > 2 * len(self._ranks) + RANKS_KEPT_MIN:
                self._heap = sorted(self._ranks.values())

    def _first(self, tenant_id: str, may_run: Callable[[str], bool]) -> str | None:
        return next(filter(may_run, self._waiting[tenant_id]), None)

    def _wait(self, name: str, tenant_id: str) -> None:
        self._waiting.setdefault(tenant_id, OrderedDict())[name] = None

    def _leave(self, name: str, tenant_id: str) -> None:
        del self._waiting[tenant_id][name]
        if not self._waiting[tenant_id]:
            del self._waiting[tenant_id]

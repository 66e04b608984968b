"""Whose sample is next: the waiting requests of one base model, tenant by tenant.

Fairness is by virtual token counters, as in `planner`: the next turn is the tenant's who has had the least for its
weight, whatever the size of its requests. A tenant that was away is lifted to the lowest of those who stayed. What a
request will draw is known only at its end, so while it runs it counts with the most that it may draw, and then with
what the engine computed: nobody gets ahead by asking for much. What only may be drawn lifts nobody who comes meanwhile,
or it would wait for work that is never done; so a newcomer gets more than its share once, by what ran when it came.

The counters are not those of training. A tenant that only samples and one that only trains do not compete for turns
but for the worker's time, which `Batch.decode_share` divides; with one counter for both, who has done much of the one
while nobody else wanted it would be last in the other. They begin anew with every life of the coordinator.

Knows names, tenants and numbers of tokens; neither workers nor what a request asks. A turn costs time in proportion to
the tenants that wait, not to their requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from coordinator.planner import FairState, Share, lifted


@dataclass(slots=True)
class _Entry:
    """A request that is not finished."""

    tenant_id: str
    num_tokens_max: int
    """The most that the engine will compute for it."""


class Turns:
    """The requests that wait or run, and what every tenant has had."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        """`shares` gives the weights; a tenant without one has the usual."""
        self._shares = {tenant: replace(share, virtual_tokens=0.0) for tenant, share in shares.items()}
        self._entries: dict[str, _Entry] = {}
        self._waiting: dict[str, dict[str, None]] = {}
        """Tenant to its waiting requests, in order. Of equal tenants the first has the turn, and then goes behind."""
        self._num_unfinished: Counter[str] = Counter()
        """Requests by tenant; who has none is away."""
        self._running_tokens: Counter[str] = Counter()
        """The most that each tenant's running requests may draw."""

    def add(self, name: str, tenant_id: str, num_tokens_max: int) -> None:
        """A new request waits for its turn."""
        assert name not in self._entries
        if tenant_id not in self._num_unfinished:
            stayed = frozenset(self._num_unfinished)
            self._shares = lifted(FairState(shares=self._shares, active=stayed), stayed | {tenant_id})
        self._num_unfinished[tenant_id] += 1
        self._entries[name] = _Entry(tenant_id, num_tokens_max)
        self._wait(name, tenant_id)

    def first(self, may_run: Callable[[str], bool]) -> str | None:
        """The request whose turn it is, of those that may run now; None if none does."""
        firsts = ((tenant, self._first(tenant, may_run)) for tenant in self._waiting)
        allowed = [(tenant, name) for tenant, name in firsts if name is not None]
        return min(allowed, key=lambda each: self._counter(each[0]), default=("", None))[1]

    def begin(self, name: str) -> None:
        """A waiting request runs."""
        entry = self._entries[name]
        self._leave(name, entry.tenant_id)
        self._running_tokens[entry.tenant_id] += entry.num_tokens_max
        if entry.tenant_id in self._waiting:
            self._waiting[entry.tenant_id] = self._waiting.pop(entry.tenant_id)

    def again(self, name: str) -> None:
        """A running request begins anew, and waits behind its tenant's others. What it had counts for nothing."""
        entry = self._entries[name]
        self._running_tokens[entry.tenant_id] -= entry.num_tokens_max
        self._wait(name, entry.tenant_id)

    def end(self, name: str, num_tokens: int) -> None:
        """A request is finished, whether it ran or waited; the engine computed `num_tokens` for it."""
        entry = self._entries.pop(name)
        tenant_id = entry.tenant_id
        if name in self._waiting.get(tenant_id, ()):
            self._leave(name, tenant_id)
        else:
            self._running_tokens[tenant_id] -= entry.num_tokens_max
        share = self._shares[tenant_id]
        counter = share.virtual_tokens + num_tokens / share.weight
        self._shares[tenant_id] = replace(share, virtual_tokens=counter)
        self._num_unfinished[tenant_id] -= 1
        if not self._num_unfinished[tenant_id]:
            del self._num_unfinished[tenant_id], self._running_tokens[tenant_id]

    def _counter(self, tenant_id: str) -> float:
        share = self._shares[tenant_id]
        return share.virtual_tokens + self._running_tokens[tenant_id] / share.weight

    def _first(self, tenant_id: str, may_run: Callable[[str], bool]) -> str | None:
        return next(filter(may_run, self._waiting[tenant_id]), None)

    def _wait(self, name: str, tenant_id: str) -> None:
        self._waiting.setdefault(tenant_id, {})[name] = None

    def _leave(self, name: str, tenant_id: str) -> None:
        del self._waiting[tenant_id][name]
        if not self._waiting[tenant_id]:
            del self._waiting[tenant_id]

"""The fair queues of samples: which request of a base model is next, by virtual counters of tenants.

The next request is that of the tenant with the lowest counter, whatever the size of its requests. The tokens of a
request are known only at its end. While it runs, it counts with the most tokens that it may draw; afterwards, with the
tokens that the engine computed, so that a large limit gains no share. Tokens that may still be drawn do not lift the
counter of a returning tenant, because it would then wait for tokens that are never drawn. So such a tenant once gets
more than its share, by at most the tokens of the requests that ran when it returned.

These counters are separate from those of training. A tenant that only samples and one that only trains compete for the
worker's time, which `Batch.decode_share` divides, and not for the same queue. With one counter for both, a tenant that
trained much while the pool was idle would be last in sampling. The counters start at zero in every epoch.

`FairQueue` depends on names, tenants and numbers of tokens; `SampleQueues` has one for each base model, the
quarantines and the solo turns. Does not depend on workers. Main invariants: the cost of a choice does not grow with the
number of queued requests; a sample is queued or running until it is decided.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from coordinator.sampling.sample import Sample
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.schedule import Scheduling
from coordinator.scheduling.virtual_counters import Share, lowest_counter, reweighed

RANKS_KEPT_MIN = 64
"""Outdated ranks are removed when they outnumber the current ones and this."""


@dataclass(slots=True)
class _Entry:
    """An unfinished request."""

    tenant_id: str
    num_tokens_max: int
    """The most tokens that the engine will compute for it."""


class FairQueue:
    """The queued and running requests of one base model, and every tenant's counter."""

    def __init__(self, shares: Mapping[str, Share]) -> None:
        """`shares` gives the weights; a tenant without one has weight 1."""
        self._shares = {tenant: replace(share, virtual_tokens=0.0) for tenant, share in shares.items()}
        self._entries: dict[str, _Entry] = {}
        self._queued: dict[str, OrderedDict[str, None]] = {}
        """Tenant to its queued requests, in order."""
        self._ranks: dict[str, tuple[float, int, str]] = {}
        """Tenant with queued requests to its counter and the number of the counter's last change: of equal
        counters the one that has not changed for longest is first."""
        self._heap: list[tuple[float, int, str]] = []
        """Ranks, the lowest first; some are outdated."""
        self._changes = itertools.count()
        self._num_unfinished: Counter[str] = Counter()
        """Requests by tenant; a tenant without any is inactive."""
        self._running_tokens: Counter[str] = Counter()
        """The most tokens that each tenant's running requests may draw."""

    def add(self, name: str, tenant_id: str, num_tokens_max: int) -> None:
        """Queue a new request."""
        assert name not in self._entries
        if tenant_id not in self._num_unfinished:
            floor = lowest_counter(self._shares, self._num_unfinished)
            self._shares[tenant_id] = self._shares.get(tenant_id, Share()).lifted(floor)
        self._num_unfinished[tenant_id] += 1
        self._entries[name] = _Entry(tenant_id, num_tokens_max)
        self._enqueue(name, tenant_id)
        if tenant_id not in self._ranks:
            self._rank(tenant_id)

    def peek(
        self, may_run: Callable[[str], bool], may_start: Callable[[str, str], bool] = lambda tenant_id, name: True
    ) -> str | None:
        """Return the next request of those that may run now; None if there is none.

        `may_start` is asked for a tenant and the first of its requests that may run; if it may not start, none does.
        """
        while self._heap and self._ranks.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return None
        name = self._first(self._heap[0][2], may_run, may_start)
        if name is None:  # quarantine or probation: look at every tenant
            names = (self._first(tenant, may_run, may_start) for _, _, tenant in sorted(self._ranks.values()))
            name = next(filter(None, names), None)
        return name

    def is_queued(self, name: str) -> bool:
        """Return whether the request is queued, and not running."""
        entry = self._entries.get(name)
        return entry is not None and name in self._queued.get(entry.tenant_id, ())

    def start(self, name: str) -> None:
        """Move a queued request to the running ones."""
        entry = self._entries[name]
        self._dequeue(name, entry.tenant_id)
        self._running_tokens[entry.tenant_id] += entry.num_tokens_max
        self._rank(entry.tenant_id)

    def requeue(self, name: str) -> None:
        """Queue a running request again, behind its tenant's others; the tokens that it drew are not charged."""
        entry = self._entries[name]
        self._running_tokens[entry.tenant_id] -= entry.num_tokens_max
        self._enqueue(name, entry.tenant_id)
        self._rank(entry.tenant_id)

    def finish(self, name: str, num_tokens: int) -> None:
        """Remove a finished request, running or queued; the engine computed `num_tokens` for it.

        A request that was never added is ignored.
        """
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        tenant_id = entry.tenant_id
        if name in self._queued.get(tenant_id, ()):
            self._dequeue(name, tenant_id)
        else:
            self._running_tokens[tenant_id] -= entry.num_tokens_max
        self._shares[tenant_id] = self._shares[tenant_id].charged(num_tokens)
        self._num_unfinished[tenant_id] -= 1
        self._rank(tenant_id)
        if not self._num_unfinished[tenant_id]:
            del self._num_unfinished[tenant_id], self._running_tokens[tenant_id]

    def weigh(self, tenant_id: str, weight: float) -> None:
        """Queue by another weight of a tenant from now on; its running requests count by it, too."""
        self._shares = reweighed(self._shares, tenant_id, weight, self._num_unfinished)
        self._rank(tenant_id)

    def _rank(self, tenant_id: str) -> None:
        """Rank the tenant again, after its counter changed, or its first request was queued or its last one started."""
        self._ranks.pop(tenant_id, None)
        if tenant_id in self._queued:
            share = self._shares[tenant_id]
            counter = share.virtual_tokens + self._running_tokens[tenant_id] / share.weight
            self._ranks[tenant_id] = (counter, next(self._changes), tenant_id)
            heapq.heappush(self._heap, self._ranks[tenant_id])
            if len(self._heap) > 2 * len(self._ranks) + RANKS_KEPT_MIN:
                self._heap = sorted(self._ranks.values())

    def _first(
        self, tenant_id: str, may_run: Callable[[str], bool], may_start: Callable[[str, str], bool]
    ) -> str | None:
        name = next(filter(may_run, self._queued[tenant_id]), None)
        return name if name is not None and may_start(tenant_id, name) else None

    def _enqueue(self, name: str, tenant_id: str) -> None:
        self._queued.setdefault(tenant_id, OrderedDict())[name] = None

    def _dequeue(self, name: str, tenant_id: str) -> None:
        del self._queued[tenant_id][name]
        if not self._queued[tenant_id]:
            del self._queued[tenant_id]


class SampleQueues:
    """The samples of all base models in fair order, filtered by quarantine, probation and suspension of a tenant."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._quarantines, self._turns = dict(scheduling.quarantines), scheduling.turns
        self._is_held = scheduling.accounts.is_held
        self._queues = {base_model: FairQueue(scheduling.fair.shares) for base_model in self._quarantines}

    def base_models(self) -> list[str]:
        """Return the base models that have a queue."""
        return list(self._queues)

    def add(self, sample: Sample) -> None:
        """Queue a new sample."""
        self._of(sample.base_model).add(sample.name, sample.operation.tenant_id, sample.decoded.num_tokens_max)

    def peek(self, base_model: str, must_wait: Callable[[str], bool] = lambda _: False) -> str | None:
        """Return the name of the base model's next sample that may run.

        `must_wait` returns whether a sample waits for a worker that is not there now: the others do not wait for it.
        """
        queue = self._of(base_model)
        if (turns := self._turns.get(base_model)) is None:
            return None
        if turns.sample and queue.is_queued(turns.sample):
            return turns.sample
        quarantine = self._quarantines[base_model]
        quarantine.note_unplaced(frozenset(filter(must_wait, quarantine.names)))

        def may_run(name: str) -> bool:
            return quarantine.may_run(name) and not must_wait(name)

        def may_start(tenant_id: str, name: str) -> bool:
            # The others of a quarantined group wait for each of its samples, so that it runs also of a held tenant.
            return (not self._is_held(tenant_id) or name in quarantine.group) and turns.may_sample(tenant_id, name)

        return queue.peek(may_run, may_start)

    def start(self, sample: Sample) -> None:
        """Move a queued sample to the running ones."""
        self._of(sample.base_model).start(sample.name)

    def requeue(self, sample: Sample) -> None:
        """Queue a running sample again."""
        self._of(sample.base_model).requeue(sample.name)

    def finish(self, sample: Sample, num_tokens: int) -> None:
        """Remove a decided sample; the engine computed `num_tokens` for it."""
        self._of(sample.base_model).finish(sample.name, num_tokens)
        if (turns := self._turns.get(sample.base_model)) is not None:
            turns.end_sample(sample.name)

    def release(self, sample: Sample) -> None:
        """End the quarantine of a sample that was committed: it survived, or was the poison."""
        self._quarantines[sample.base_model].release(sample.name)

    def weigh(self, tenant_id: str, weight: float) -> None:
        """Queue the samples of a tenant by another weight from now on, of every base model."""
        for queue in self._queues.values():
            queue.weigh(tenant_id, weight)

    def _of(self, base_model: str) -> FairQueue:
        """Return the queue of a base model; a model that is not served now gets one in which samples wait."""
        if base_model not in self._queues:
            self._queues[base_model], self._quarantines[base_model] = FairQueue({}), Quarantine()
        return self._queues[base_model]

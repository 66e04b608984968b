"""The gauges of a pool: what it has at the moment, read when `/metrics` is asked for.

Reads all rooms of the runtime and changes none. Every label has a bounded set of values; tenants are left out unless
the operator names how many are shown.
"""

from __future__ import annotations

import heapq
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.fleet.fleet import Incarnation
from coordinator.runtime.core import Core
from coordinator.storage.identity import DATABASE

Values: TypeAlias = list[tuple[tuple[str, ...], float]]
"""Values by labels."""
OF_WORKER = ("worker",)
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "info": ("The version of the pool; always 1.", ("version",)),
    "healthy": ("Whether new work is taken and makes progress.", ()),
    "unfinished_operations": ("Operations without a committed outcome.", ("kind",)),
    "oldest_operation_seconds": ("Seconds since the oldest of these was accepted.", ("kind",)),
    "active_tenants": ("Tenants with such operations.", ()),
    "workers": ("Workers, by state: ready, late, lost.", ("base_model", "state")),
    "worker_slots": ("Adapters that fit in a worker's bank at once.", OF_WORKER),
    "worker_adapters": ("Adapters with a copy on a worker.", OF_WORKER),
    "worker_samples": ("Samples that a worker runs.", OF_WORKER),
    "worker_host_memory_bytes": ("Host memory of copies and weights for sampling on a worker.", OF_WORKER),
    "worker_resident_bytes": ("Memory of a worker's process, as of its last cycle.", OF_WORKER),
    "worker_device_bytes": ("Memory of its GPU that a worker has reserved, as of its last cycle.", OF_WORKER),
    "worker_cache_blocks": ("Key-value blocks that a worker has.", OF_WORKER),
    "worker_cache_blocks_used": ("Those of them that running samples have, as of its last cycle.", OF_WORKER),
    "data_bytes": ("Size of the database, with its write-ahead log.", ()),
    "disk_free_bytes": ("Room on the disk of the data directory.", ()),
    "cycle_budget_tokens": ("Tokens that a cycle may take of a worker.", ("base_model",)),
    "limit_used_ratio": ("The part of a limit that is in use, by the tenant that uses the most of it.", ("limit",)),
}
"""Every gauge, without the prefix `tinkerpool_`: what it says, and its labels."""
COUNTERS: Mapping[str, str] = {
    "worker_cpu_seconds": "Processor time of a worker's process.",
    "worker_slot_loads": "Adapters and weights for sampling that a worker has moved into a slot.",
    "worker_slot_prefetches": "Those of them whose move began before they were needed.",
    "worker_slot_evictions": "Adapters and weights that a worker has moved out of a slot.",
}
"""What workers count since their start, without prefix and suffix."""
TENANT_TOKENS = "Tokens of a tenant since the start, for the tenants with the most."
REST = "(rest)"
"""The label of all tenants that are not shown by name."""


class PoolGauges(Collector):
    """The gauges of one coordinator."""

    def __init__(self, core: Core, num_tenants: int) -> None:
        """`num_tenants`: how many tenants are shown by name, those with the most tokens; 0: none."""
        self._core = core
        self._num_tenants = num_tenants

    def collect(self) -> Iterator[Metric]:
        """Yield every gauge with its present values. Call it on the event loop."""
        values = self._operations() | self._workers() | self._limits()
        values["info"] = [((version("tinkerpool"),), 1.0)]
        values["data_bytes"], values["disk_free_bytes"] = self._disk()
        values["healthy"] = [((), float(self._core.is_healthy()))]
        for name, (text, labels) in GAUGES.items():
            family = GaugeMetricFamily(f"tinkerpool_{name}", text, labels=labels)
            for key, value in values[name]:
                family.add_metric(key, value)
            yield family
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"tinkerpool_{name}", text, labels=OF_WORKER)
            for key, value in values[name]:
                counter.add_metric(key, value)
            yield counter
        if self._num_tenants:
            yield self._tenants()

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the pool has not started when a registry asks for names."""
        yield from ()

    def _operations(self) -> dict[str, Values]:
        in_flight, now = self._core.in_flight, self._core.time.monotonic()
        numbers = in_flight.num_by_kind()
        oldest = {kind: in_flight.oldest(kind) for kind in numbers}
        return {
            "unfinished_operations": [((kind.value,), number) for kind, number in numbers.items()],
            "oldest_operation_seconds": [((kind.value,), now - at) for kind, at in oldest.items() if at is not None],
            "active_tenants": [((), len(in_flight.tenants()))],
        }

    def _workers(self) -> dict[str, Values]:
        core = self._core
        workers = {(name,): core.fleet.worker(name) for name in core.fleet.worker_ids()}
        states = Counter((each.info.model.name, _state_of(each)) for each in workers.values())
        return {
            "workers": list(states.items()),
            "worker_slots": [(key, each.info.num_slots) for key, each in workers.items()],
            "worker_adapters": [(key, core.registry.num_on(key[0], None)) for key in workers],
            "worker_samples": [(key, len(each.samples)) for key, each in workers.items()],
            "worker_host_memory_bytes": [(key, each.held_bytes) for key, each in workers.items()],
            "worker_resident_bytes": [(key, each.use.resident_bytes) for key, each in workers.items()],
            "worker_device_bytes": [(key, each.use.device_bytes) for key, each in workers.items()],
            "worker_cache_blocks": [(key, each.info.model.num_cache_blocks or 0) for key, each in workers.items()],
            "worker_cache_blocks_used": [(key, each.use.num_cache_blocks_used) for key, each in workers.items()],
            "worker_cpu_seconds": [(key, each.use.cpu_s) for key, each in workers.items()],
            "worker_slot_loads": [(key, each.use.num_loads) for key, each in workers.items()],
            "worker_slot_prefetches": [(key, each.use.num_prefetches) for key, each in workers.items()],
            "worker_slot_evictions": [(key, each.use.num_evictions) for key, each in workers.items()],
            "cycle_budget_tokens": [((name,), loop.planning.budget.tokens) for name, loop in core.loops.items()],
        }

    def _disk(self) -> tuple[Values, Values]:
        folder = self._core.config.data_dir
        num_bytes = sum(each.stat().st_size for each in folder.glob(f"{DATABASE}*"))
        return [((), num_bytes)], [((), shutil.disk_usage(folder).free)]

    def _limits(self) -> dict[str, Values]:
        """Return how full each limit is; of tenants that did something since the start."""
        used: Values = []
        in_flight = self._core.in_flight
        tenant_ids = in_flight.all_tokens().keys() | set(in_flight.tenants())
        for name, limit in self._core.quotas.listed.items():
            most = {tenant_id: limit.maximum(tenant_id) for tenant_id in tenant_ids}
            parts = [limit.used(tenant_id) / maximum for tenant_id, maximum in most.items() if maximum]
            used.append(((name,), max(parts, default=0.0)))
        return {"limit_used_ratio": used}

    def _tenants(self) -> Metric:
        tokens = self._core.in_flight.all_tokens()
        family = CounterMetricFamily("tinkerpool_tenant_tokens", TENANT_TOKENS, labels=("tenant",))
        names = {row.tenant_id: row.name for row in self._core.store.tenants.all()}
        for tenant_id in heapq.nlargest(self._num_tenants, tokens, key=lambda each: (tokens[each], each)):
            family.add_metric((names.get(tenant_id, ""),), tokens.pop(tenant_id))
        family.add_metric((REST,), sum(tokens.values()))
        return family


def _state_of(worker: Incarnation) -> str:
    if not worker.is_live:
        return "lost"
    return "late" if worker.is_away else "ready"

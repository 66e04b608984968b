"""Which adapters exist, which of them changed, and which tenants submitted operations. In memory.

Does not depend on the order in which operations run. Main invariant: an idle adapter is in no collection that a cycle
walks through; `AdapterGroup.dirty` has an adapter from a change until it was found idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.base.time import Signal, Time
from coordinator.fleet.fleet import Residency
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.holdings import Holdings
from coordinator.storage.adapters import Adapters
from coordinator.storage.rows import AdapterRow
from workers.contract.messages import AdapterSpec

USE_INTERVAL_S = 3600.0
"""Seconds after which the last use of an adapter is stored again. It is in memory at once."""


class Arrivals:
    """When tenants submitted operations at one base model, since the cycle clock last read this.

    Admission notes arrivals; the clock drains them. The signal is raised once no awaited tenant is missing, so that a
    thousand arrivals do not wake a lingering clock a thousand times.
    """

    def __init__(self, time: Time, changed: Signal) -> None:
        self._time = time
        self._changed = changed
        self._at: dict[str, float] = {}
        """Tenant to its first arrival since the last `drain`."""
        self._awaited: set[str] = set()

    @property
    def is_awaiting(self) -> bool:
        """Whether an awaited tenant has not arrived."""
        return bool(self._awaited)

    def await_tenants(self, tenants: Iterable[str]) -> None:
        """Signal only once all of these have arrived; empty: signal each arrival."""
        self._awaited = set(tenants)

    def note(self, tenant_id: str) -> None:
        """Record that the tenant has submitted operations."""
        self._at.setdefault(tenant_id, self._time.monotonic())
        self._awaited.discard(tenant_id)
        if not self._awaited:
            self._changed.notify()

    def drain(self) -> dict[str, float]:
        """Return the first arrival of each tenant since the last call, in seconds of service time."""
        arrived, self._at = self._at, {}
        return arrived


class AdapterGroup:
    """The adapters of one base model."""

    def __init__(self, time: Time) -> None:
        self.residency = Residency()
        self.changed = Signal()
        """An adapter that a cycle may take has changed: the clock reads the ready set again."""
        self.arrivals = Arrivals(time, self.changed)
        self._logs: dict[str, AdapterLog] = {}
        self._dirty: dict[str, AdapterLog] = {}

    @property
    def logs(self) -> Mapping[str, AdapterLog]:
        """The adapters by id."""
        return self._logs

    @property
    def dirty(self) -> Mapping[str, AdapterLog]:
        """The adapters that changed since they were last found idle."""
        return self._dirty

    def add(self, log: AdapterLog) -> None:
        """Register an adapter that has no copy yet."""
        assert not log.home
        log.join(self.residency)
        self._logs[log.adapter_id] = log

    def remove(self, log: AdapterLog) -> None:
        """Remove a deleted adapter. A cycle that has it may still place a copy, which no residency counts."""
        self._logs.pop(log.adapter_id, None)
        self._dirty.pop(log.adapter_id, None)
        log.join(Residency())

    def lose_copies(self, worker_id: str) -> None:
        """Drop every copy on a worker that is lost, or is to be removed."""
        for adapter_id in self.residency.on(worker_id):
            log = self._logs[adapter_id]
            log.lose_worker()
            self.mark_dirty(log)
        self.residency.take_left(worker_id)  # the worker ends

    def mark_dirty(self, log: AdapterLog) -> None:
        """Record that the adapter changed, and wake the clock. (It may have been deleted meanwhile.)"""
        if self._logs.get(log.adapter_id) is log:
            self._dirty[log.adapter_id] = log
            self.changed.notify()

    def submitted(self, log: AdapterLog) -> None:
        """Record that operations of the adapter were submitted."""
        if self._logs.get(log.adapter_id) is log:
            self._dirty[log.adapter_id] = log
            self.arrivals.note(log.tenant_id)

    def mark_clean(self, adapter_ids: Iterable[str]) -> None:
        """Record that these adapters are idle."""
        for adapter_id in adapter_ids:
            del self._dirty[adapter_id]


class AdapterRegistry:
    """All adapters that are not deleted. A base model that is not served has a group, too, which never runs."""

    def __init__(self, time: Time, rows: Adapters, holdings: Holdings) -> None:
        self._time = time
        self._rows = rows
        self._holdings = holdings
        self._logs: dict[str, AdapterLog] = {}
        self._groups: dict[str, AdapterGroup] = {}

    @property
    def logs(self) -> Mapping[str, AdapterLog]:
        """The adapters by id."""
        return self._logs

    def group(self, base_model: str) -> AdapterGroup:
        """Return the adapters of a base model."""
        if base_model not in self._groups:
            self._groups[base_model] = AdapterGroup(self._time)
        return self._groups[base_model]

    def group_of(self, log: AdapterLog) -> AdapterGroup:
        """Return the group that the adapter belongs to."""
        return self.group(log.base_model)

    def get(self, adapter_id: str) -> AdapterLog | None:
        """Return the adapter of this id, if it is not deleted."""
        return self._logs.get(adapter_id)

    def spec(self, adapter_id: str) -> AdapterSpec:
        """Return the spec of an adapter, also of a deleted one."""
        if (log := self._logs.get(adapter_id)) is not None:
            return log.spec
        row = self._rows.get(adapter_id)
        assert row is not None
        return spec_of_row(row)

    def name(self, adapter_id: str) -> str:
        """Return the name of an adapter, also of a deleted one; empty: it has none."""
        if (log := self._logs.get(adapter_id)) is not None:
            return log.name
        row = self._rows.get(adapter_id)
        assert row is not None
        return row.name

    def used(self, log: AdapterLog) -> None:
        """Record that an operation of the adapter is accepted. Its row has this at most an hour late."""
        log.used_at = self._time.wall()
        if abs(log.used_at - log.stored_used_at) >= USE_INTERVAL_S:
            self._rows.note_use(log.adapter_id, log.used_at)
            log.stored_used_at = log.used_at

    def add(self, log: AdapterLog) -> None:
        """Register an adapter."""
        assert log.adapter_id not in self._logs
        self._logs[log.adapter_id] = log
        self._holdings.add_state(log.tenant_id, log.spec, log.base_model)
        self.group_of(log).add(log)

    def remove(self, log: AdapterLog) -> None:
        """Remove a deleted adapter."""
        if self._logs.pop(log.adapter_id, None) is not None:
            self._holdings.remove_state(log.tenant_id, log.spec, log.base_model)
        self.group_of(log).remove(log)

    def num_on(self, worker_id: str, tenant_id: str | None = None) -> int:
        """Return the number of adapters with a copy on this worker: of one tenant, or of all (None)."""
        on_worker = (adapter_id for group in self._groups.values() for adapter_id in group.residency.on(worker_id))
        found = (self._logs.get(adapter_id) for adapter_id in on_worker)
        return sum(log is not None and tenant_id in (None, log.tenant_id) for log in found)

    def num_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's adapters."""
        return sum(log.tenant_id == tenant_id for log in self._logs.values())


def adapter_of_row(row: AdapterRow) -> AdapterLog:
    """Return an adapter without its operations."""
    return AdapterLog(
        tenant_id=row.tenant_id,
        session_id=row.session_id,
        base_model=row.base_model,
        spec=spec_of_row(row),
        fingerprint=row.fingerprint,
        is_restored=row.is_restored,
        name=row.name,
        used_at=row.used_at,
        stored_used_at=row.used_at,
    )


def spec_of_row(row: AdapterRow) -> AdapterSpec:
    """Return the adapter's spec."""
    return AdapterSpec(
        adapter_id=row.adapter_id,
        rank=row.rank,
        alpha=row.alpha,
        seed=row.seed,
        train_attn=row.train_attn,
        train_mlp=row.train_mlp,
        train_unembed=row.train_unembed,
    )

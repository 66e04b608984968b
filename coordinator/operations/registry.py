"""Which sessions are live, which adapters exist, which of them changed, and which tenants submitted operations.

In memory. Sessions use service time only: downtime and steps of the wall clock do not age a session. Does not depend on
the order in which operations run. Main invariants: a session leaves its table only once its end is durable, so a number
in it is never given twice; an idle adapter is in no collection that a cycle walks through; `AdapterGroup.dirty` has an
adapter from a change until it was found idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.base.errors import Code, ServiceError, sampler_exists
from coordinator.base.time import Signal, Time
from coordinator.fleet.fleet import Residency
from coordinator.operations.adapter_log import AdapterLog
from coordinator.storage.adapters import Adapters
from coordinator.storage.rows import AdapterRow, SessionRow
from coordinator.storage.store import Store
from tinkerpool import names
from workers.contract.messages import AdapterSpec


@dataclass(slots=True)
class Session:
    """One live session."""

    session_id: str
    tenant_id: str
    last_seen: float
    """Monotonic service time."""
    next_adapter: int
    next_sampler: int
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an adapter or sampler is created in it, so that a concurrent repeat finds the first call's row."""
    taken: dict[int, str] = field(default_factory=dict)
    """Sampler numbers that are given though their rows may not be durable yet, each with the operation or sampler that
    has it."""
    num_endings: int = 0
    """Calls that are ending it: it accepts no new work meanwhile."""

    def take_adapter_index(self, wanted: int | None) -> int:
        """Return the number of a new adapter: the wanted one, or the next free one."""
        index = self.next_adapter if wanted is None else wanted
        self.next_adapter = max(self.next_adapter, index + 1)
        return index

    @contextmanager
    def reserving(self, index: int) -> Iterator[None]:
        """Reserve this sampler number while the block writes its row. Raises ServiceError if it is taken."""
        sampler_id = names.sampler_id(self.session_id, index)
        if index in self.taken:
            raise sampler_exists(sampler_id)
        self.next_sampler = max(self.next_sampler, index + 1)
        self.taken[index] = sampler_id
        try:
            yield
        finally:
            del self.taken[index]  # its row can be read now, or the write failed


class SessionTable:
    """The live sessions of all tenants."""

    def __init__(self, store: Store, time: Time) -> None:
        self._store = store
        self._monotonic = time.monotonic
        self._live: dict[str, Session] = {}

    def load(self) -> None:
        """Load the sessions that were live when the last epoch ended."""
        for row in self._store.sessions.live():
            self._load(row)

    def add(self, session_id: str) -> None:
        """Add a session that is in the database, unless it has ended."""
        if session_id in self._live:
            return
        if (row := self._store.sessions.get_live(session_id)) is not None:
            self._load(row)

    def get(self, session_id: str) -> Session | None:
        """Return a live session; None if it has ended or is being ended."""
        session = self._live.get(session_id)
        return None if session is None or session.num_endings else session

    def keep_alive(self, session_id: str) -> None:
        """Record a call of the session's client."""
        if session := self._live.get(session_id):
            session.last_seen = self._monotonic()

    def take_sampler_index(self, session_id: str, operation: str, wanted: int | None) -> int:
        """Reserve a number for a sampler whose row is stored with a cycle's commit, and return it.

        `operation` is the save that makes the sampler. `wanted` is the number to reserve; None: the next free one.
        Raises ServiceError if the session has ended or another sampler has the number.
        """
        session = self.get(session_id)
        if session is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SESSION_ENDED",
                f"session {session_id} has ended, and a sampler without a name ends with its session: give a name to "
                "save a checkpoint",
            )
        index = session.next_sampler if wanted is None else wanted
        if session.taken.get(index, operation) != operation or self._has_sampler(session_id, index):
            raise sampler_exists(names.sampler_id(session_id, index))
        session.next_sampler = max(session.next_sampler, index + 1)
        session.taken[index] = operation
        return index

    def expired(self, timeout_s: float) -> list[Session]:
        """Return the sessions without a call for `timeout_s` that are not being ended."""
        limit = self._monotonic() - timeout_s
        return [s for s in self._live.values() if s.last_seen < limit and not s.num_endings]

    @contextmanager
    def ending(self, session_id: str) -> Iterator[None]:
        """Accept no new work in a session while the block makes its end durable. If the block raises, it stays live."""
        session = self._live.get(session_id)
        if session is not None:
            session.num_endings += 1
        try:
            yield
        finally:
            if session is not None:
                session.num_endings -= 1
        self._live.pop(session_id, None)

    def _has_sampler(self, session_id: str, index: int) -> bool:
        return self._store.samplers.get(names.sampler_id(session_id, index)) is not None

    def _load(self, row: SessionRow) -> None:
        self._live[row.session_id] = Session(
            row.session_id,
            row.tenant_id,
            self._monotonic(),
            _next_index(self._store.adapters.ids_of_session(row.session_id, with_deleted=True)),
            _next_index(self._store.samplers.ids_of_session(row.session_id)),
        )


def _next_index(ids: Iterable[str]) -> int:
    """Return the index after the highest one of these ids of adapters or samplers."""
    return max((int(each.rpartition(":")[2]) for each in ids), default=-1) + 1


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
        assert not log.worker_id
        log.join(self.residency)
        self._logs[log.adapter_id] = log

    def remove(self, log: AdapterLog) -> None:
        """Remove a deleted adapter. A cycle that has it may still place a copy, which no residency counts."""
        self._logs.pop(log.adapter_id, None)
        self._dirty.pop(log.adapter_id, None)
        log.join(Residency())

    def mark_dirty(self, log: AdapterLog) -> None:
        """Record that the adapter changed. (It may have been deleted meanwhile.)"""
        if self._logs.get(log.adapter_id) is log:
            self._dirty[log.adapter_id] = log

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

    def __init__(self, time: Time, rows: Adapters) -> None:
        self._time = time
        self._rows = rows
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

    def add(self, log: AdapterLog) -> None:
        """Register an adapter."""
        assert log.adapter_id not in self._logs
        self._logs[log.adapter_id] = log
        self.group_of(log).add(log)

    def remove(self, log: AdapterLog) -> None:
        """Remove a deleted adapter."""
        self._logs.pop(log.adapter_id, None)
        self.group_of(log).remove(log)

    def num_on(self, worker_id: str) -> int:
        """Return the number of adapters with a copy on this worker."""
        return sum(len(group.residency.on(worker_id)) for group in self._groups.values())

    def num_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's adapters."""
        return sum(log.tenant_id == tenant_id for log in self._logs.values())


def adapter_of_row(row: AdapterRow) -> AdapterLog:
    """Return an adapter without its operations."""
    return AdapterLog(
        tenant_id=row.tenant_id, session_id=row.session_id, base_model=row.base_model, spec=spec_of_row(row)
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

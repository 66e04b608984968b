"""Live sessions: the tenant of each, the time of its last call, and the next numbers of its adapters and samplers.

Uses service time only: downtime and steps of the wall clock do not age a session. Does not depend on adapters or
samplers. Main invariant: a session leaves the table only once its end is durable, so a number is never given twice.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.base.errors import invalid, sampler_exists, unmet
from coordinator.base.time import Time
from coordinator.storage.rows import SessionRow
from coordinator.storage.store import Store
from tinkerpool import names

DOOR = "tinkerpool:door"
"""Metadata of sessions that a door keeps for its clients. These send no heartbeats between requests, and may repeat one
as long as its result is kept."""


@dataclass(slots=True)
class Session:
    """One live session."""

    session_id: str
    tenant_id: str
    last_seen: float
    """Monotonic service time."""
    next_adapter: int
    next_sampler: int
    num_samplers: int
    """Its samplers with a row, and those that are being written."""
    is_of_door: bool
    """Whether it has the metadata `DOOR`."""
    creating: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while an adapter or sampler is created in it, so that a concurrent repeat finds the first call's row."""
    taken: dict[int, str] = field(default_factory=dict)
    """Sampler numbers that are given though their rows may not be durable yet, each with the operation or sampler that
    has it."""
    num_endings: int = 0
    """Calls that are ending it: it accepts no new work meanwhile."""

    def take_adapter_index(self, wanted: int | None) -> int:
        """Return the number of a new adapter: the wanted one, or the next free one. Raises ServiceError."""
        index = self.next_adapter if wanted is None else wanted
        _check_index(index)
        self.next_adapter = max(self.next_adapter, index + 1)
        return index

    @contextmanager
    def reserving(self, index: int) -> Iterator[None]:
        """Reserve a sampler number while the block writes its row. Raises ServiceError if it is taken or too high."""
        _check_index(index)
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
        self._num_by_tenant: Counter[str] = Counter()
        self._samplers_by_tenant: Counter[str] = Counter()

    def load(self) -> None:
        """Load the sessions that were live when the last epoch ended."""
        for row in self._store.sessions.live():
            self._load(row)

    def num_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's live sessions."""
        return self._num_by_tenant[tenant_id]

    def num_samplers(self, tenant_id: str) -> int:
        """Return the number of samplers of a tenant's live sessions."""
        return self._samplers_by_tenant[tenant_id]

    def count_samplers(self, session_id: str, number: int) -> bool:
        """Count samplers of a session more, or less; return False if it has ended, for its samplers ended with it."""
        if (session := self._live.get(session_id)) is None:
            return False
        session.num_samplers += number
        self._samplers_by_tenant[session.tenant_id] += number
        return True

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

    def ids_of(self, tenant_id: str) -> list[str]:
        """Return the live sessions of a tenant."""
        return [session.session_id for session in self._live.values() if session.tenant_id == tenant_id]

    def renew(self, tenant_id: str) -> None:
        """Let the idle time of a tenant's sessions begin again: it is resumed, and its heartbeats were refused."""
        for session in self._live.values():
            if session.tenant_id == tenant_id:
                session.last_seen = self._monotonic()

    def take_sampler_index(self, session_id: str, operation: str, wanted: int | None) -> int:
        """Reserve a number for a sampler whose row is stored with a cycle's commit, and return it.

        `operation` is the save that makes the sampler. `wanted` is the number to reserve; None: the next free one.
        Raises ServiceError if the session has ended, the number is too high or another sampler has it.
        """
        session = self.get(session_id)
        if session is None:
            raise unmet(
                "SESSION_ENDED",
                f"session {session_id} has ended, and a sampler without a name ends with its session: give a name to "
                "save a checkpoint",
            )
        index = session.next_sampler if wanted is None else wanted
        _check_index(index)
        if session.taken.get(index, operation) != operation or self._has_sampler(session_id, index):
            raise sampler_exists(names.sampler_id(session_id, index))
        session.next_sampler = max(session.next_sampler, index + 1)
        session.taken[index] = operation
        return index

    def expired(self, timeout_s: float, door_timeout_s: float) -> list[Session]:
        """Return the sessions without a call for `timeout_s`, or those of doors for `door_timeout_s`.

        Without those that are being ended.
        """
        now = self._monotonic()
        return [
            session
            for session in self._live.values()
            if session.last_seen < now - (door_timeout_s if session.is_of_door else timeout_s)
            and not session.num_endings
        ]

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
        if (ended := self._live.get(session_id)) is not None:
            self.count_samplers(session_id, -ended.num_samplers)
            del self._live[session_id]
            self._num_by_tenant[ended.tenant_id] -= 1
            if not self._num_by_tenant[ended.tenant_id]:
                del self._num_by_tenant[ended.tenant_id]

    def _has_sampler(self, session_id: str, index: int) -> bool:
        return self._store.samplers.get(names.sampler_id(session_id, index)) is not None

    def _load(self, row: SessionRow) -> None:
        self._num_by_tenant[row.tenant_id] += 1
        sampler_ids = self._store.samplers.ids_of_session(row.session_id)
        self._samplers_by_tenant[row.tenant_id] += len(sampler_ids)
        self._live[row.session_id] = Session(
            row.session_id,
            row.tenant_id,
            self._monotonic(),
            max(row.adapters_gone, _next_index(self._store.adapters.ids_of_session(row.session_id, with_deleted=True))),
            _next_index(sampler_ids),
            len(sampler_ids),
            DOOR in json.loads(row.user_metadata),
        )


def _check_index(index: int) -> None:
    """Refuse a number that no id can hold: it follows the highest one, which a client has given."""
    if index > names.INDEX_MAX:
        raise invalid(
            f"{names.INDEX_MAX} is the highest number in a session, and is given: choose a lower index, or create "
            "another session"
        )


def _next_index(ids: Iterable[str]) -> int:
    """Return the index after the highest one of these ids of adapters or samplers."""
    return max((int(each.rpartition(":")[2]) for each in ids), default=-1) + 1

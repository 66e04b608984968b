"""Live sessions: who they belong to, when they were last heard of, and how far their numbering has come.

In service time only: downtime and steps of the wall clock age no session. Knows nothing of what a session owns. Main
invariant: a session leaves only once its end is durable, so what has ended never comes back with numbers given before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator.base.errors import Code, ServiceError, sampler_exists
from coordinator.base.time import Time
from coordinator.storage.rows import SessionRow
from coordinator.storage.store import Store
from tinkerpool import names


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
    """Held while an adapter or sampler is created in it: who repeats the call finds the first one's."""
    taken: dict[int, str] = field(default_factory=dict)
    """Sampler numbers that are given though their rows may not be durable yet, each with the operation or sampler that
    has it."""
    num_endings: int = 0
    """Calls that are ending it: nothing new starts in it meanwhile."""

    def take_adapter_index(self, wanted: int | None) -> int:
        """Return the number of a new adapter: the wanted one, or the next free one."""
        index = self.next_adapter if wanted is None else wanted
        self.next_adapter = max(self.next_adapter, index + 1)
        return index

    @contextmanager
    def reserving(self, index: int) -> Iterator[None]:
        """Nobody else gets this sampler number while the block writes its row. Raises ServiceError if it is taken."""
        sampler_id = names.sampler_id(self.session_id, index)
        if index in self.taken:
            raise sampler_exists(sampler_id)
        self.next_sampler = max(self.next_sampler, index + 1)
        self.taken[index] = sampler_id
        try:
            yield
        finally:
            del self.taken[index]  # readable by now, or never


class SessionTable:
    """The live sessions of all tenants."""

    def __init__(self, store: Store, time: Time) -> None:
        self._store = store
        self._monotonic = time.monotonic
        self._live: dict[str, Session] = {}

    def load(self) -> None:
        """Take up the sessions that were live when the last coordinator ended."""
        for row in self._store.sessions.live():
            self._take_up(row)

    def add(self, session_id: str) -> None:
        """A session whose creation is durable, now or for long: one that has ended stays so."""
        if session_id in self._live:
            return
        if (row := self._store.sessions.get_live(session_id)) is not None:
            self._take_up(row)

    def get(self, session_id: str) -> Session | None:
        """A live session that nobody is ending."""
        session = self._live.get(session_id)
        return None if session is None or session.num_endings else session

    def touch(self, session_id: str) -> None:
        """It was heard of."""
        if session := self._live.get(session_id):
            session.last_seen = self._monotonic()

    def take_sampler_index(self, session_id: str, operation: str, wanted: int | None = None) -> int:
        """A number for a sampler whose row comes with a cycle's commit: nobody else gets it.

        `operation` names who takes it; `wanted` is the number that it must be, None: the next free one. Raises
        ServiceError if the session has ended or another sampler has the number.
        """
        session = self.get(session_id)
        if session is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SESSION_ENDED",
                f"session {session_id} has ended, and a sampler without a name lives no longer than its session: give "
                "a name to save a checkpoint",
            )
        index = session.next_sampler if wanted is None else wanted
        if session.taken.get(index, operation) != operation or self._has_sampler(session_id, index):
            raise sampler_exists(names.sampler_id(session_id, index))
        session.next_sampler = max(session.next_sampler, index + 1)
        session.taken[index] = operation
        return index

    def expired(self, timeout_s: float) -> list[Session]:
        """Sessions not heard of for that long, and that nobody is ending."""
        limit = self._monotonic() - timeout_s
        return [s for s in self._live.values() if s.last_seen < limit and not s.num_endings]

    @contextmanager
    def ending(self, session_id: str) -> Iterator[None]:
        """Nothing new starts in it while the block makes its end durable; if the block raises, the session goes on."""
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

    def _take_up(self, row: SessionRow) -> None:
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

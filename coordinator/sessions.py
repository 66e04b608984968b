"""Live sessions: who they belong to, when they were last heard of, and how far their numbering has come.

In service time only: downtime and steps of the wall clock age no session. Knows nothing of what a session owns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.errors import Code, ServiceError
from coordinator.store import Store


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
    taken: set[int] = field(default_factory=set)
    """Sampler numbers that unnamed saves have got, their rows durable or not yet."""


class SessionTable:
    """The live sessions of all tenants."""

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._monotonic = monotonic
        self._live: dict[str, Session] = {}

    def load(self) -> None:
        """Take up the sessions that were live when the last coordinator ended."""
        for row in self._store.read("SELECT session_id, tenant_id FROM sessions WHERE ended_at IS NULL"):
            session_id = row["session_id"]
            self._live[session_id] = Session(
                session_id,
                row["tenant_id"],
                self._monotonic(),
                self._next("adapters", "adapter_id", session_id),
                self._next("samplers", "sampler_id", session_id),
            )

    def add(self, session_id: str, tenant_id: str) -> None:
        """A new session."""
        self._live.setdefault(session_id, Session(session_id, tenant_id, self._monotonic(), 0, 0))

    def get(self, session_id: str) -> Session | None:
        """A live session."""
        return self._live.get(session_id)

    def touch(self, session_id: str) -> None:
        """It was heard of."""
        if session := self._live.get(session_id):
            session.last_seen = self._monotonic()

    def take_sampler_index(self, session_id: str) -> int:
        """A number for a sampler whose row comes with a cycle's commit: nobody else gets it.

        Raises ServiceError if the session has ended.
        """
        session = self._live.get(session_id)
        if session is None:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SESSION_ENDED",
                f"session {session_id} has ended, and a sampler without a name lives no longer than its session: give "
                "a name to save a checkpoint",
            )
        session.next_sampler += 1
        session.taken.add(session.next_sampler - 1)
        return session.next_sampler - 1

    def expired(self, timeout_s: float) -> list[Session]:
        """Sessions not heard of for that long."""
        limit = self._monotonic() - timeout_s
        return [session for session in self._live.values() if session.last_seen < limit]

    def remove(self, session_id: str) -> None:
        """It has ended."""
        self._live.pop(session_id, None)

    def _next(self, table: str, column: str, session_id: str) -> int:
        rows = self._store.read(f"SELECT {column} FROM {table} WHERE session_id = ?", (session_id,))  # noqa: S608
        return max((int(row[0].rpartition(":")[2]) for row in rows), default=-1) + 1

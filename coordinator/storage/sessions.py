"""The sessions, live and ended. Main invariant: a session that has ended never becomes live again."""

from __future__ import annotations

import asyncio

from coordinator.storage.database import Database
from coordinator.storage.rows import Page, SessionRow
from coordinator.storage.tables import Table, insert


class Sessions(Table[SessionRow]):
    """The sessions of all tenants."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SessionRow, "sessions")

    def insert(self, row: SessionRow) -> asyncio.Future[None]:
        """Insert a session. Raises ConflictError through the future if its request id exists."""
        return self._database.write(lambda db: insert(db, "sessions", row))

    def of_tenant(self, tenant_id: str, session_id: str) -> SessionRow | None:
        """Return a session of this tenant, also an ended one."""
        return self._one("WHERE session_id = ? AND tenant_id = ?", (session_id, tenant_id))

    def of_request(self, tenant_id: str, request_id: str) -> SessionRow | None:
        """Return the session that a request id created."""
        return self._one("WHERE tenant_id = ? AND request_id = ?", (tenant_id, request_id))

    def get_live(self, session_id: str) -> SessionRow | None:
        """Return a session that has not ended."""
        return self._one("WHERE session_id = ? AND ended_at IS NULL", (session_id,))

    def live(self) -> list[SessionRow]:
        """Return the sessions that have not ended."""
        return self._all("WHERE ended_at IS NULL")

    def page(self, tenant_id: str, limit: int, offset: int) -> Page[SessionRow]:
        """Return a page of a tenant's live sessions, newest first."""
        rest = "WHERE tenant_id = ? AND ended_at IS NULL ORDER BY created_at DESC, session_id"
        return self._page(rest, (tenant_id,), limit, offset)

    def end(self, session_id: str, wall: float) -> asyncio.Future[int]:
        """End a session, if it has not ended. `wall`: the time of day."""
        return self._database.execute(
            "UPDATE sessions SET ended_at = ? WHERE session_id = ? AND ended_at IS NULL", (wall, session_id)
        )

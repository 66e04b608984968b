"""The tenants: fair-share counters, limits and sessions.

Main invariant: a session that has ended never becomes live again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from coordinator.storage.access.admins import keeping_admins
from coordinator.storage.access.audit import Act, record
from coordinator.storage.database import Database
from coordinator.storage.rows import (
    Leftovers,
    Listing,
    Place,
    ProbationRow,
    SessionRow,
    Table,
    TenantRow,
    insert,
)
from coordinator.storage.sqlite import Connection

NEEDLESS_SESSION = """ended_service_s < :before
    AND NOT EXISTS (SELECT 1 FROM adapters WHERE adapters.session_id = sessions.session_id)
    AND NOT EXISTS (SELECT 1 FROM samplers WHERE samplers.session_id = sessions.session_id)"""
"""Condition for sessions that ended long ago and have no adapter or sampler left."""
DELETED_AT_ONCE = 200
"""Rows of a table that one step of a tenant's deletion deletes, in about a millisecond of the writer."""
DELETE_SOME = (
    "DELETE FROM usage_days WHERE (tenant_id, day, base_model, adapter_id, kind) IN"
    " (SELECT tenant_id, day, base_model, adapter_id, kind FROM usage_days WHERE tenant_id = :tenant LIMIT :limit)",
    "DELETE FROM history WHERE entry_id IN (SELECT entry_id FROM history WHERE tenant_id = :tenant LIMIT :limit)",
    "DELETE FROM sample_records WHERE (target_id, seq) IN"
    " (SELECT target_id, seq FROM sample_records WHERE tenant_id = :tenant LIMIT :limit)",
    "DELETE FROM operations WHERE (target_id, seq) IN (SELECT target_id, seq FROM operations WHERE target_id IN"
    " (SELECT adapter_id FROM adapters WHERE tenant_id = :tenant"
    " UNION ALL SELECT sampler_id FROM samplers WHERE tenant_id = :tenant) LIMIT :limit)",
    "DELETE FROM samplers WHERE rowid IN (SELECT rowid FROM samplers WHERE tenant_id = :tenant AND NOT EXISTS"
    " (SELECT 1 FROM operations WHERE target_id = sampler_id) LIMIT :limit)",
    "DELETE FROM adapters WHERE rowid IN (SELECT rowid FROM adapters WHERE tenant_id = :tenant"
    " AND deleted_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM operations WHERE target_id = adapters.adapter_id)"
    " AND NOT EXISTS (SELECT 1 FROM samplers WHERE samplers.adapter_id = adapters.adapter_id"
    " AND samplers.adapter_id != '') LIMIT :limit)",
    "DELETE FROM sessions WHERE rowid IN (SELECT rowid FROM sessions WHERE tenant_id = :tenant"
    " AND ended_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM adapters WHERE adapters.session_id = sessions.session_id)"
    " AND NOT EXISTS (SELECT 1 FROM samplers WHERE samplers.session_id = sessions.session_id) LIMIT :limit)",
)
"""Delete some rows of a tenant; each goes once no row needs it."""


class Tenants(Table[TenantRow]):
    """All tenants."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, TenantRow, "tenants")

    def create(self, tenant_id: str, act: Act) -> asyncio.Future[bool]:
        """Insert the tenant that is the subject of the act, and record it. The future: False if its name exists."""
        return self._database.write(lambda db: add_tenant(db, tenant_id, act))

    def set_limits(self, tenant_id: str, texts: Mapping[str, str], act: Act) -> asyncio.Future[None]:
        """Set some limits of a tenant, all or none, and record the act. An empty text: the pool's default again."""

        def write(db: Connection) -> None:
            for name, text in texts.items():
                db.execute("DELETE FROM tenant_limits WHERE tenant_id = ? AND name = ?", (tenant_id, name))
                if text:
                    db.execute("INSERT INTO tenant_limits VALUES (?, ?, ?)", (tenant_id, name, text))
            record(db, act)

        return self._database.write(write)

    def row_bytes(self, tenant_id: str) -> int:
        """Return the bytes of a tenant's rows, and of the files of its unnamed samplers; 0 if it does not exist."""
        row = self._database.read_one("SELECT row_bytes FROM tenants WHERE tenant_id = ?", (tenant_id,))
        return int(row["row_bytes"]) if row is not None else 0

    def limits(self) -> dict[str, dict[str, str]]:
        """Return the limits that were set, as text, by tenant and name."""
        found: dict[str, dict[str, str]] = {}
        for row in self._database.read("SELECT tenant_id, name, value FROM tenant_limits"):
            found.setdefault(row["tenant_id"], {})[row["name"]] = row["value"]
        return found

    def suspend(self, tenant_id: str, reason: str, act: Act) -> asyncio.Future[None]:
        """Suspend a tenant. Raises NoAdminError through the future."""

        def write(db: Connection) -> None:
            with keeping_admins(db):
                db.execute(
                    "UPDATE tenants SET suspended_at = COALESCE(suspended_at, ?), suspension_reason = ?"
                    " WHERE tenant_id = ?",
                    (act.at, reason, tenant_id),
                )
            record(db, act)

        return self._database.write(write, is_deletion=True)

    def resume(self, tenant_id: str, act: Act) -> asyncio.Future[None]:
        """End a tenant's suspension, if it is suspended."""

        def write(db: Connection) -> None:
            sql = "UPDATE tenants SET suspended_at = NULL, suspension_reason = '' WHERE tenant_id = ? AND"
            if db.execute(f"{sql} suspended_at IS NOT NULL", (tenant_id,)).rowcount:
                record(db, act)

        return self._database.write(write)

    def mark_deletion(self, tenant_id: str, act: Act) -> asyncio.Future[None]:
        """Mark a tenant for its deletion. Raises NoAdminError through the future."""

        def write(db: Connection) -> None:
            with keeping_admins(db):
                sql = "UPDATE tenants SET deletion_at = ? WHERE tenant_id = ? AND deletion_at IS NULL"
                marked = db.execute(sql, (act.at, tenant_id)).rowcount
            if marked:
                record(db, act)

        return self._database.write(write, is_deletion=True)

    def marked(self) -> list[TenantRow]:
        """Return the tenants that are being deleted."""
        return self._all("WHERE deletion_at IS NOT NULL")

    def delete_some(self, tenant_id: str) -> asyncio.Future[int]:
        """Delete some rows of a tenant without live sessions and training state; the future has their number.

        Adapters stay while samplers of other tenants have their published weights, whose spec they hold.
        """

        def write(db: Connection) -> int:
            values = {"tenant": tenant_id, "limit": DELETED_AT_ONCE}
            return sum(db.execute(statement, values).rowcount for statement in DELETE_SOME)

        return self._database.write(write, is_deletion=True)

    def delete(self, tenant_id: str, act: Act) -> asyncio.Future[bool]:
        """Delete a tenant with its keys, limits and usage, and record the act with its usage in all.

        The future: False if anything else of it is left.
        """

        def write(db: Connection) -> bool:
            for table in ("sessions", "adapters", "samplers", "operations", "sample_records", "checkpoints"):
                sql = f"SELECT 1 FROM {table} WHERE tenant_id = ? LIMIT 1"  # noqa: S608 (our names)
                if db.execute(sql, (tenant_id,)).fetchone() is not None:
                    return False
            used = db.execute(
                "SELECT TOTAL(num_operations), TOTAL(num_tokens), TOTAL(engine_s) FROM usage WHERE tenant_id = ?",
                (tenant_id,),
            ).fetchone()
            names = ("num_operations", "num_tokens", "engine_seconds")
            details = {name: f"{value:.0f}" for name, value in zip(names, used, strict=True)}
            for table in ("usage", "api_keys", "tenants"):
                db.execute(f"DELETE FROM {table} WHERE tenant_id = ?", (tenant_id,))  # noqa: S608 (our names)
            record(db, replace(act, details=details))
            return True

        return self._database.write(write, is_deletion=True)

    def all(self) -> list[TenantRow]:
        """Return every tenant."""
        return self._all("")

    def listing(self, limit: int, place: Place) -> Listing[TenantRow]:
        """Return a part of the tenants, by name."""
        return self._listing("name", "WHERE TRUE", (), limit, place, is_by_key=True)

    def get(self, tenant_id: str) -> TenantRow | None:
        """Return a tenant."""
        return self._one("WHERE tenant_id = ?", (tenant_id,))

    def named(self, name: str) -> TenantRow | None:
        """Return the tenant of a name."""
        return self._one("WHERE name = ?", (name,))


def add_tenant(db: Connection, tenant_id: str, act: Act) -> bool:
    """Insert the tenant that is the subject of the act, and record it; return False if its name exists."""
    added = db.execute(
        "INSERT INTO tenants (tenant_id, name, created_at) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
        (tenant_id, act.subject, act.at),
    ).rowcount
    if added:
        record(db, act)
    return bool(added)


class Probations(Table[ProbationRow]):
    """The tenants whose operations killed workers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, ProbationRow, "probations")

    def all(self) -> list[ProbationRow]:
        """Return every record, also of tenants whose probation is over."""
        return self._all("")

    def note(self, row: ProbationRow) -> None:
        """Replace a tenant's record. Becomes durable with the next write, so before any outcome decided later."""

        def write(db: Connection) -> None:
            db.execute("DELETE FROM probations WHERE tenant_id = ?", (row.tenant_id,))
            # The tenant may have been deleted meanwhile.
            db.execute(
                "INSERT INTO probations SELECT tenant_id, ?, ?, ?, ? FROM tenants WHERE tenant_id = ?",
                (row.num_kills, row.killed_service_s, row.until_service_s, row.operation, row.tenant_id),
            )

        self._database.ride(f"probation {row.tenant_id}", write)

    def release(self, tenant_id: str, act: Act) -> asyncio.Future[None]:
        """Delete a tenant's record, if it has one, and record the act."""

        def write(db: Connection) -> None:
            db.execute("DELETE FROM probations WHERE tenant_id = ?", (tenant_id,))
            record(db, act)

        return self._database.write(write)

    def service_time(self) -> float:
        """Return the service time, which the records are in."""
        return self._database.service_time()


class Sessions(Table[SessionRow]):
    """The sessions of all tenants, live ones and those that ended recently, or have something left."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SessionRow, "sessions")
        self.leftovers = Leftovers(database, "sessions", "session_id", NEEDLESS_SESSION, lambda db, key: None)

    def insert(self, row: SessionRow) -> asyncio.Future[None]:
        """Insert a session. Raises ConflictError through the future if its request id exists."""
        return self._database.write(lambda db: insert(db, "sessions", row))

    def of_tenant(self, tenant_id: str, session_id: str) -> SessionRow | None:
        """Return a session of this tenant, also an ended one."""
        return self._one("WHERE session_id = ? AND tenant_id = ?", (session_id, tenant_id))

    def get(self, session_id: str) -> SessionRow | None:
        """Return a session of any tenant, also an ended one."""
        return self._one("WHERE session_id = ?", (session_id,))

    def of_request(self, tenant_id: str, request_id: str) -> SessionRow | None:
        """Return the session that a request id created."""
        return self._one("WHERE tenant_id = ? AND request_id = ?", (tenant_id, request_id))

    def get_live(self, session_id: str) -> SessionRow | None:
        """Return a session that has not ended."""
        return self._one("WHERE session_id = ? AND ended_at IS NULL", (session_id,))

    def adapters_gone(self, session_id: str) -> int:
        """Return the number below which an adapter without a row may have existed; 0 for an unknown session."""
        row = self._database.read_one("SELECT adapters_gone FROM sessions WHERE session_id = ?", (session_id,))
        return int(row["adapters_gone"]) if row is not None else 0

    def live_with_metadata(self, tenant_id: str, user_metadata: str) -> SessionRow | None:
        """Return the newest of a tenant's live sessions with exactly this metadata."""
        rest = "WHERE tenant_id = ? AND ended_at IS NULL AND user_metadata = ? ORDER BY created_at DESC LIMIT 1"
        return self._one(rest, (tenant_id, user_metadata))

    def live(self) -> list[SessionRow]:
        """Return the sessions that have not ended."""
        return self._all("WHERE ended_at IS NULL")

    def listing(self, tenant_id: str, limit: int, place: Place) -> Listing[SessionRow]:
        """Return a part of a tenant's live sessions, newest first."""
        return self._listing("session_id", "WHERE tenant_id = ? AND ended_at IS NULL", (tenant_id,), limit, place)

    def end(self, session_id: str, wall: float) -> asyncio.Future[int]:
        """End a session, if it has not ended. `wall`: the time of day. The future has the number of changed rows."""
        values = (wall, self._database.service_time(), session_id)

        def write(db: Connection) -> int:
            sql = "UPDATE sessions SET ended_at = ?, ended_service_s = ? WHERE session_id = ? AND ended_at IS NULL"
            number = db.execute(sql, values).rowcount
            db.execute("UPDATE samplers SET file_bytes = 0 WHERE session_id = ? AND file_bytes != 0", (session_id,))
            return number

        return self._database.write(write, is_deletion=True)

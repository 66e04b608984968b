"""The API keys: creation, rotation, revocation, and when each was last used.

Main invariant: an administrator's key remains that has no expiry and whose tenant is active, so the pool cannot be
locked. Each change is recorded in the audit log in its own transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.storage.access.admins import keeping_admins
from coordinator.storage.access.audit import Act, record
from coordinator.storage.database import Database
from coordinator.storage.rows import ApiKeyRow, Listing, Place, Table
from coordinator.storage.sqlite import Connection
from coordinator.storage.tenants import add_tenant

_LIVE_SUCCESSORS = """WITH RECURSIVE chain (key_id, successor, revoked_at, place) AS (
        SELECT key_id, successor, revoked_at, 0 FROM api_keys WHERE key_id = ?
        UNION ALL SELECT new.key_id, new.successor, new.revoked_at, place + 1
        FROM chain JOIN api_keys AS new ON new.key_id = chain.successor)
    SELECT key_id FROM chain WHERE place > 0 AND revoked_at IS NULL ORDER BY place"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key to insert."""

    key_id: str
    secret_sha256: bytes
    role: str
    expires_at: float | None
    """The time of day; None: never."""
    is_local: bool
    certificate_sha256: str


@dataclass(frozen=True, slots=True)
class Pace:
    """How many keys of one tenant may be rotated within a time."""

    rotations_max: int
    within_s: float


class TooManyRotationsError(Exception):
    """The tenant of a key rotates more keys than its pace allows."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s
        """Seconds after which one more may be rotated."""


class ApiKeys(Table[ApiKeyRow]):
    """All API keys, also revoked ones."""

    def __init__(self, database: Database) -> None:
        # No join, which a count of the keys would make for each key: SQLite looks a name up only where it is read.
        name = "(SELECT name FROM tenants WHERE tenants.tenant_id = api_keys.tenant_id) AS tenant_name"
        super().__init__(database, ApiKeyRow, f"(SELECT api_keys.*, {name} FROM api_keys)")  # noqa: S608 (our text)

    def unrevoked(self) -> list[ApiKeyRow]:
        """Return every key that was not revoked, also expired ones."""
        return self._all("WHERE revoked_at IS NULL")

    def listing(self, limit: int, place: Place) -> Listing[ApiKeyRow]:
        """Return a part of the keys, newest first, also revoked ones."""
        return self._listing("key_id", "WHERE TRUE", (), limit, place)

    def num_unrevoked(self, tenant_id: str) -> int:
        """Return the number of a tenant's keys that were not revoked."""
        sql = "SELECT COUNT(*) FROM api_keys WHERE tenant_id = ? AND revoked_at IS NULL"
        row = self._database.read_one(sql, (tenant_id,))
        return int(row[0]) if row is not None else 0

    def get(self, key_id: str) -> ApiKeyRow | None:
        """Return a key, also a revoked one."""
        return self._one("WHERE key_id = ?", (key_id,))

    def create(self, key: NewKey, tenant: str, new_tenant_id: str, act: Act) -> asyncio.Future[bool]:
        """Insert a key and, if it is new, its tenant. The future: False if that tenant is being deleted."""

        def write(db: Connection) -> bool:
            creation = Act(at=act.at, key_id=act.key_id, tenant=act.tenant, act="tenant.create", subject=tenant)
            add_tenant(db, new_tenant_id, creation)
            inserted = db.execute(
                "INSERT INTO api_keys (key_id, tenant_id, secret_sha256, role, created_at, expires_at, is_local,"
                " certificate_sha256) SELECT ?, tenant_id, ?, ?, ?, ?, ?, ? FROM tenants"
                " WHERE name = ? AND deletion_at IS NULL",
                (
                    key.key_id,
                    key.secret_sha256,
                    key.role,
                    act.at,
                    key.expires_at,
                    key.is_local,
                    key.certificate_sha256,
                    tenant,
                ),
            ).rowcount
            if inserted:
                record(db, act)
            return bool(inserted)

        return self._database.write(write)

    def rotate(
        self, key_id: str, successor: str, secret_sha256: bytes, grace_s: float, act: Act, pace: Pace | None = None
    ) -> asyncio.Future[bool]:
        """Give a valid key a successor, and end the key itself `grace_s` seconds later; 0: at once.

        The successor has the same tenant, role, expiry and bindings. The future: False if the key is revoked or
        expired, or has a successor. Raises TooManyRotationsError through the future.
        """

        def write(db: Connection) -> bool:
            if pace is not None:
                _check_pace(db, key_id, pace, act.at)
            inserted = db.execute(
                "INSERT INTO api_keys (key_id, tenant_id, secret_sha256, role, created_at, expires_at, is_local,"
                " certificate_sha256) SELECT ?, tenant_id, ?, role, ?, expires_at, is_local, certificate_sha256"
                " FROM api_keys WHERE key_id = ? AND revoked_at IS NULL AND successor = ''"
                " AND (expires_at IS NULL OR expires_at > ?)",
                (successor, secret_sha256, act.at, key_id, act.at),
            ).rowcount
            if not inserted:
                return False
            ends, column = (act.at + grace_s, "expires_at") if grace_s else (act.at, "revoked_at")
            db.execute(
                f"UPDATE api_keys SET successor = ?, {column} = MIN(COALESCE({column}, ?), ?) WHERE key_id = ?",  # noqa: S608
                (successor, ends, ends, key_id),
            )
            record(db, act)
            return True

        return self._database.write(write)

    def live_successors(self, key_id: str) -> list[str]:
        """Return the ids of the keys that replaced a key, one after another, and are not revoked, the oldest first."""
        return [row["key_id"] for row in self._database.read(_LIVE_SUCCESSORS, (key_id,))]

    def revoke(self, key_id: str, act: Act) -> asyncio.Future[bool]:
        """Revoke a key. The future: False if it was revoked before. Raises NoAdminError through the future."""

        def write(db: Connection) -> bool:
            with keeping_admins(db):
                revoked = db.execute(
                    "UPDATE api_keys SET revoked_at = ? WHERE key_id = ? AND revoked_at IS NULL", (act.at, key_id)
                ).rowcount
            if revoked:
                record(db, act)
            return bool(revoked)

        return self._database.write(write, is_deletion=True)

    def note_uses(self, uses: Mapping[str, float]) -> asyncio.Future[None]:
        """Store when keys were last used: key id to the time of day."""

        def write(db: Connection) -> None:
            for key_id, wall in uses.items():
                db.execute("UPDATE api_keys SET last_used_at = ? WHERE key_id = ?", (wall, key_id))

        return self._database.write(write)


def _check_pace(db: Connection, key_id: str, pace: Pace, now: float) -> None:
    """Raise TooManyRotationsError if the successors of the tenant's keys are newer than its pace allows."""
    found = db.execute(
        "SELECT new.created_at FROM api_keys AS new JOIN api_keys AS old ON old.successor = new.key_id"
        " WHERE old.tenant_id = (SELECT tenant_id FROM api_keys WHERE key_id = ?)"
        " ORDER BY new.created_at DESC LIMIT 1 OFFSET ?",
        (key_id, pace.rotations_max - 1),
    ).fetchone()
    if found is not None and found[0] + pace.within_s > now:
        raise TooManyRotationsError(found[0] + pace.within_s - now)

"""The audit log: an entry for each act of an administrator, written in the transaction of the act.

Main invariant: entries are never changed or deleted; triggers of the database refuse it. Entries have no secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.storage.database import Database
from coordinator.storage.rows import AuditRow, Table
from coordinator.storage.sqlite import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """An act of an administrator, to record."""

    at: float
    """The time of day."""
    key_id: str = ""
    """The acting key; empty: the pool itself, by the operator's command."""
    tenant: str = ""
    """The name of the acting key's tenant."""
    act: str
    """What was done: `key.create`, `tenant.create`, ..."""
    subject: str
    """To what: the id of a key, the name of a tenant."""
    details: Mapping[str, str] = field(default_factory=dict)
    """More by name, without secrets."""


def record(db: Connection, act: Act) -> None:
    """Append an act to the audit log, in the transaction of the caller."""
    db.execute(
        "INSERT INTO audit (at, key_id, tenant, act, subject, details) VALUES (?, ?, ?, ?, ?, ?)",
        (act.at, act.key_id, act.tenant, act.act, act.subject, json.dumps(dict(act.details), sort_keys=True)),
    )


class Audit(Table[AuditRow]):
    """The audit log."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, AuditRow, "audit")

    def newest(
        self,
        limit: int,
        *,
        before: int = 0,
        act: str = "",
        subject: str = "",
        key_id: str = "",
        start: float = 0.0,
    ) -> list[AuditRow]:
        """Return up to `limit` entries, the newest first, of those before entry `before` (0: of all).

        `act` is a whole act, or its part before the dot; `start` is a time of day. An empty filter takes every entry.
        """
        return self._all(
            "WHERE (? = 0 OR audit_id < ?) AND (? = '' OR act = ? OR act LIKE ? || '.%') AND (? = '' OR subject = ?)"
            " AND (? = '' OR key_id = ?) AND at >= ? ORDER BY audit_id DESC LIMIT ?",
            (before, before, act, act, act, subject, subject, key_id, key_id, start, limit),
        )

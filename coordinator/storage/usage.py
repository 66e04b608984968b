"""Metering: the usage of each tenant by kind of operation, counted in the write that stores an outcome."""

from __future__ import annotations

from coordinator.storage.database import Connection, Database
from coordinator.storage.rows import UsageRow
from coordinator.storage.tables import typed


class Usage:
    """The usage of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, tenant_id: str | None) -> list[UsageRow]:
        """Return a tenant's usage by kind of operation; None: the usage of every tenant."""
        rows = self._database.read(
            "SELECT name AS tenant_name, kind, num_operations, num_tokens, engine_s"
            " FROM usage JOIN tenants USING (tenant_id) WHERE ? IS NULL OR tenant_id = ? ORDER BY name, kind",
            (tenant_id, tenant_id),
        )
        return [typed(UsageRow, row) for row in rows]


def add_usage(db: Connection, tenant_id: str, kind: str, num_tokens: int, engine_s: float) -> None:
    """Add a finished operation to its tenant's usage."""
    db.execute(
        "INSERT INTO usage VALUES (?, ?, 1, ?, ?) ON CONFLICT (tenant_id, kind) DO UPDATE SET"
        " num_operations = num_operations + 1, num_tokens = num_tokens + excluded.num_tokens,"
        " engine_s = engine_s + excluded.engine_s",
        (tenant_id, kind, num_tokens, engine_s),
    )

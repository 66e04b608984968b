"""Records of probations in memory, with a service time that a test sets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coordinator.storage.access.audit import Act
from coordinator.storage.rows import ProbationRow
from coordinator.storage.tenants import Probations


@dataclass(slots=True)
class MemoryRecords(Probations):
    """Has no database; outlives a `Probation`, as the database does."""

    rows: dict[str, ProbationRow] = field(default_factory=dict)
    now: float = 1000.0

    def all(self) -> list[ProbationRow]:
        """Return every record."""
        return list(self.rows.values())

    def note(self, row: ProbationRow) -> None:
        """Store a record."""
        self.rows[row.tenant_id] = row

    def release(self, tenant_id: str, act: Act) -> asyncio.Future[None]:
        """Delete a record at once."""
        self.rows.pop(tenant_id, None)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def service_time(self) -> float:
        """Return the time that the test has set."""
        return self.now

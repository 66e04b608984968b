"""The workers that administrators have drained: a start does not start them. Does not depend on what a worker runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.storage.access.audit import Act, record
from coordinator.storage.database import Database
from coordinator.storage.rows import DrainedWorkerRow, Table, marks
from coordinator.storage.sqlite import Connection


class DrainedWorkers(Table[DrainedWorkerRow]):
    """The drained workers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, DrainedWorkerRow, "drained_workers")

    def all(self) -> list[DrainedWorkerRow]:
        """Return every drained worker, by its id."""
        return self._all("ORDER BY worker_id")

    def add(self, row: DrainedWorkerRow, act: Act) -> asyncio.Future[None]:
        """Record that a worker is drained, and the act."""

        def write(db: Connection) -> None:
            db.execute("INSERT OR REPLACE INTO drained_workers VALUES (?, ?)", (row.worker_id, row.base_model))
            record(db, act)

        return self._database.write(write)

    def remove(self, worker_id: str, act: Act) -> asyncio.Future[None]:
        """Record that a worker is not drained any more, and the act."""

        def write(db: Connection) -> None:
            db.execute("DELETE FROM drained_workers WHERE worker_id = ?", (worker_id,))
            record(db, act)

        return self._database.write(write)

    async def forget(self, worker_ids: Sequence[str]) -> None:
        """Delete the rows of workers that cannot stay drained."""
        if worker_ids:
            sql = f"DELETE FROM drained_workers WHERE worker_id IN ({marks(worker_ids)})"  # noqa: S608 (our text)
            await self._database.execute(sql, worker_ids, is_deletion=True)

"""What is durable of workers: which are drained, the classes that they reported last, the weights of their base models.

Does not depend on what a worker runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coordinator.storage.access.audit import Act, record
from coordinator.storage.database import Database
from coordinator.storage.rows import BaseModelRow, DrainedWorkerRow, Table, WorkerClassRow, marks
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


class WorkerClasses(Table[WorkerClassRow]):
    """The classes of workers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, WorkerClassRow, "worker_classes")

    def of_model(self, base_model: str) -> dict[str, str]:
        """Return the fingerprint of each worker of a base model, by its id."""
        return {row.worker_id: row.fingerprint for row in self._all("WHERE base_model = ?", (base_model,))}

    def put(self, row: WorkerClassRow) -> None:
        """Record what a worker has reported. Becomes durable with the next write."""
        values = (row.worker_id, row.base_model, row.fingerprint)

        def write(db: Connection) -> None:
            db.execute("INSERT OR REPLACE INTO worker_classes VALUES (?, ?, ?)", values)

        self._database.ride(f"class {row.worker_id}", write, "class")


class BaseModels(Table[BaseModelRow]):
    """The base models whose weights are known."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, BaseModelRow, "base_models")

    def in_use(self) -> list[BaseModelRow]:
        """Return those of which there are adapters or checkpoints."""
        return self._all(
            "WHERE name IN (SELECT base_model FROM adapters WHERE deleted_at IS NULL "
            "UNION SELECT base_model FROM checkpoints)"
        )

    def put(self, row: BaseModelRow) -> None:
        """Record the weights of a base model. Becomes durable with the next write."""

        def write(db: Connection) -> None:
            db.execute("INSERT OR REPLACE INTO base_models VALUES (?, ?)", (row.name, row.weights_id))

        self._database.ride(f"base model {row.name}", write, "base model")

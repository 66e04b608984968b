"""The durable log of a data directory: the database and its tables, put together. Has no SQL but the epoch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from coordinator.base.errors import Failure
from coordinator.base.time import Time
from coordinator.storage.access.api_keys import ApiKeys
from coordinator.storage.access.audit import Audit
from coordinator.storage.adapters import Adapters
from coordinator.storage.checkpoints import Checkpoints, Samplers, Snapshots
from coordinator.storage.cycles import Cycles
from coordinator.storage.database import Database
from coordinator.storage.disk import FailedSync, Reserve
from coordinator.storage.history import History
from coordinator.storage.identity import Identity
from coordinator.storage.operations import Operations
from coordinator.storage.records import Records
from coordinator.storage.sqlite import Connection, read_meta
from coordinator.storage.tenants import Probations, Sessions, Tenants
from coordinator.storage.usage import Usage
from coordinator.storage.workers import BaseModels, DrainedWorkers, WorkerClasses


class Store:
    """The log in a data directory, by tables."""

    def __init__(
        self,
        path: Path,
        time: Time,
        failure: Failure,
        *,
        connect: Callable[[Path], Connection] | None = None,
        reserve: Reserve | None = None,
        failed_sync: FailedSync | None = None,
    ) -> None:
        """Open or create the database; see `Database`."""
        self.database = Database(path, time, failure, connect=connect, reserve=reserve, failed_sync=failed_sync)
        self.operations = Operations(self.database)
        self.records = Records(self.database)
        self.history = History(self.database)
        self.adapters = Adapters(self.database)
        self.checkpoints = Checkpoints(self.database)
        self.samplers = Samplers(self.database)
        self.snapshots = Snapshots(self.database)
        self.sessions = Sessions(self.database)
        self.tenants = Tenants(self.database)
        self.usage = Usage(self.database)
        self.probations = Probations(self.database)
        self.drained_workers = DrainedWorkers(self.database)
        self.worker_classes = WorkerClasses(self.database)
        self.base_models = BaseModels(self.database)
        self.api_keys = ApiKeys(self.database)
        self.audit = Audit(self.database)
        self.cycles = Cycles(self.database)

    async def close(self) -> None:
        """Commit the queued writes, then close; later writes are refused. Idempotent."""
        await self.database.close()

    def service_time(self) -> float:
        """Return the seconds that the service has run in all its incarnations, see `Database.service_time`."""
        return self.database.service_time()

    def identity(self) -> Identity:
        """Return the pool's id, and the epoch and the service time that are durable."""
        pool_id, epoch, service_ms = (self.database.meta(key) for key in ("pool_id", "epoch", "service_ms"))
        return Identity(pool_id=pool_id, epoch=epoch, service_ms=service_ms)

    async def raise_epoch(self) -> int:
        """Begin a new incarnation of the coordinator and return its epoch. Call once, before the first append."""

        def write(db: Connection) -> int:
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
            return read_meta(db, "epoch")

        epoch = await self.database.write(write, is_deletion=True)  # a pool on a full disk must start, to delete
        self.operations.begin_epoch(epoch)
        return epoch

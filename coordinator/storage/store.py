"""The durable log of a data directory: the database and its tables, put together. Has no SQL but the epoch's."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

from coordinator.base.errors import Failure
from coordinator.base.time import Time
from coordinator.storage.adapters import Adapters
from coordinator.storage.checkpoints import Checkpoints, Samplers, Snapshots
from coordinator.storage.cycles import CycleCommit, Cycles
from coordinator.storage.database import Connection, Database, DiskFullError, read_meta
from coordinator.storage.operations import Operations
from coordinator.storage.tenants import ApiKeys, Sessions, Tenants, Usage

FULL_RETRY_S = 1.0
"""Pause before a commit is tried again on a full disk."""
_COUNTER_BITS = 32
"""Low bits of an append id: the counter within an epoch."""


class Store:
    """The log in a data directory, by tables."""

    def __init__(
        self, path: Path, time: Time, failure: Failure, *, connect: Callable[[Path], Connection] | None = None
    ) -> None:
        """Open or create the database; see `Database`."""
        self.database = Database(path, time, failure, connect=connect)
        self.operations = Operations(self.database)
        self.adapters = Adapters(self.database)
        self.checkpoints = Checkpoints(self.database)
        self.samplers = Samplers(self.database)
        self.snapshots = Snapshots(self.database)
        self.sessions = Sessions(self.database)
        self.tenants = Tenants(self.database)
        self.usage = Usage(self.database)
        self.api_keys = ApiKeys(self.database)
        self.cycles = Cycles(self.database)
        self._epoch = 0
        self._appends = itertools.count(1)
        self._is_stopping = False

    async def close(self) -> None:
        """Commit the queued writes, then close; later writes are refused. Idempotent."""
        await self.database.close()

    def service_time(self) -> float:
        """Return the seconds that the service has run in all its incarnations, see `Database.service_time`."""
        return self.database.service_time()

    async def raise_epoch(self) -> int:
        """Begin a new incarnation of the coordinator and return its epoch. Call once, before the first append."""

        def write(db: Connection) -> int:
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
            return read_meta(db, "epoch")

        self._epoch = await self.database.write(write)
        return self._epoch

    def new_append_id(self) -> int:
        """Return an id that no other append in this data directory has: the epoch, then a counter."""
        assert self._epoch, "an append id needs an epoch: raise it first"
        return self._epoch << _COUNTER_BITS | next(self._appends)

    async def persist(self, commit: CycleCommit) -> frozenset[str]:
        """Commit as `Cycles.commit`; while the disk is full, try again until `stop_retrying`. Raises StorageError."""
        while True:
            try:
                return await self.cycles.commit(commit)
            except DiskFullError:
                if self._is_stopping:
                    raise
                await asyncio.sleep(FULL_RETRY_S)

    def stop_retrying(self) -> None:
        """Stop retrying on a full disk: the next incarnation runs the uncommitted operations again."""
        self._is_stopping = True

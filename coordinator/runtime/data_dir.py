"""Opens a data directory: its lock, its database and its state folders.

Main invariant: the lock is held as long as the database is open. Does not depend on what the rows mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.base.failure import Failure
from coordinator.base.time import Time
from coordinator.checkpoints.folders import StateFolders
from coordinator.runtime.lock import DataDirLock
from coordinator.storage.database import Connection
from coordinator.storage.disk import Disk, RealDisk
from coordinator.storage.store import Store


@dataclass(frozen=True, slots=True)
class Seams:
    """Replacements for the machine's disk and database, for tests."""

    disk: Disk | None = None
    connect: Callable[[Path], Connection] | None = None


class DataDir:
    """An open data directory."""

    def __init__(self, path: Path, time: Time, failure: Failure, seams: Seams) -> None:
        """Take the lock, then open. Raises DataDirInUse, ValueError and OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = DataDirLock(path)
        try:
            self.store = Store(path / "tinkerpool.db", time, failure, connect=seams.connect)
            self.folders = StateFolders(path, seams.disk or RealDisk())
        except BaseException:
            self._lock.release()
            raise

    async def close(self) -> None:
        """Commit the queued writes, close the database and release the lock."""
        await self.store.close()
        self._lock.release()

    def abandon(self) -> None:
        """Release the lock and leave the database open, as the kernel does for a killed process."""
        self._lock.release()

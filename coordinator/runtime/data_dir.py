"""Opens a data directory: its lock, its database and its state folders.

At most one coordinator holds the lock; the kernel frees it when its process ends. Main invariant: the lock is held as
long as the database is open. Does not depend on what the rows mean.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator.base.errors import Failure
from coordinator.base.time import Time
from coordinator.storage.database import Connection
from coordinator.storage.disk import Disk, RealDisk
from coordinator.storage.folders import StateFolders
from coordinator.storage.store import Store


class DataDirInUse(Exception):
    """Another coordinator holds the data directory."""


class DataDirLock:
    """Holds a data directory until `release`."""

    def __init__(self, data_dir: Path) -> None:
        """Take the lock. Raises DataDirInUse."""
        self._file = (data_dir / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise DataDirInUse(
                f"{data_dir} is in use by another tinkerpool (process {owner}): stop that one, or choose another data "
                "directory"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Release the data directory for another coordinator."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Seams:
    """Replacements for the machine's disk, database and file lock, for tests."""

    disk: Disk | None = None
    connect: Callable[[Path], Connection] | None = None
    lock: Callable[[Path], DataDirLock] = DataDirLock
    """Takes the lock. A simulated kill releases it, as the kernel does for a killed process."""


class DataDir:
    """An open data directory."""

    def __init__(self, path: Path, time: Time, failure: Failure, seams: Seams) -> None:
        """Take the lock, then open. Raises DataDirInUse, ValueError and OSError."""
        path.mkdir(parents=True, exist_ok=True)
        self._lock = seams.lock(path)
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

"""Opens a data directory: its lock, its database and its state folders, after a check that they belong together.

At most one coordinator holds the lock; the kernel frees it when its process ends. Main invariants: the lock is held as
long as the database is open; a refused directory is left as it was. Does not depend on what the rows mean.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Failure
from coordinator.base.time import Time
from coordinator.runtime.mounts import check_local, mount_table
from coordinator.storage.disk import (
    FULL,
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    RESERVE_BYTES,
    Disk,
    FailedSync,
    RealDisk,
    Reserve,
)
from coordinator.storage.folders import StateFolders
from coordinator.storage.identity import (
    DATABASE,
    QUARANTINE,
    ROOTS,
    SIDE_FILE,
    DataDirError,
    Identity,
    check,
    identity_of,
    write_side_file,
)
from coordinator.storage.sqlite import Connection, RetryLaterError, open_read_only, read_closed
from coordinator.storage.store import Store
from tinkerpool.serving import LOCK_FILE

__all__ = ["DataDir", "DataDirError", "DataDirInUse", "DataDirLock", "Seams"]

logger = logging.getLogger(__name__)
LOCK_TRIES, LOCK_RETRY_S = 5, 0.02
"""How often to try to take the lock: a process that asks whether a coordinator holds it has it for microseconds."""
NOTE_S = 600.0
"""Seconds of service time between two notes of how far the database has come. An older copy of a killed pool's database
shows if it lacks more than this; a note costs three syncs."""
RESERVE = "reserve"
FAILED_SYNC = f"{DATABASE}-failed"
"""The note that a sync failed. The next start empties the log first, and removes it."""
OURS = (
    *(f"{DATABASE}*", SIDE_FILE, LOCK_FILE, RESERVE, *ROOTS, QUARANTINE, ".backup"),
    *("ray.json", "serve.log*", "serving.json", "tokenizers"),  # of the server and its commands
)
"""Patterns of the names in a data directory that tinkerpool makes: only these are closed to other users."""


class DataDirInUse(DataDirError):
    """Another coordinator holds the data directory."""


class DataDirLock:
    """Holds a data directory until `release`."""

    def __init__(self, data_dir: Path) -> None:
        """Take the lock. Raises DataDirInUse."""
        descriptor = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE)
        self._file = os.fdopen(descriptor, "ab+", buffering=0)
        if not self._is_taken():
            self._file.seek(0)
            owner = self._file.read().decode().strip() or "unknown"
            self._file.close()
            raise DataDirInUse(
                f"{data_dir} is in use by another tinkerpool (process {owner}): stop that one, or choose another data "
                "directory"
            )
        with suppress(OSError):  # on a full disk the lock holds without the name of its owner
            self._file.truncate(0)
            self._file.write(str(os.getpid()).encode())

    def release(self) -> None:
        """Release the data directory for another coordinator."""
        self._file.close()

    def _is_taken(self) -> bool:
        for _ in range(LOCK_TRIES):
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            sleep(LOCK_RETRY_S)
        return False


@dataclass(frozen=True, slots=True)
class Seams:
    """Replacements for the machine's disk, database and file lock, for tests."""

    disk: Disk | None = None
    connect: Callable[[Path], Connection] | None = None
    lock: Callable[[Path], DataDirLock] = DataDirLock
    """Takes the lock. A simulated kill releases it, as the kernel does for a killed process."""
    connect_read_only: Callable[[Path], Connection] = open_read_only
    mounts: Callable[[], str] = mount_table
    """Returns the kernel's table of mounts."""


class DataDir:
    """An open data directory."""

    def __init__(self, config: CoordinatorConfig, time: Time, failure: Failure, seams: Seams) -> None:
        """Check, take the lock, open. Raises DataDirError and OSError.

        On a full disk it opens, and takes deletions alone until there is room.
        """
        self._path = path = config.data_dir
        self._failure = failure
        self._noting: asyncio.Future[None] | None = None
        self._disk = seams.disk or RealDisk()
        check_local(path, seams.mounts())
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        reserve = Reserve(path / RESERVE, self._disk, config.disk_free_bytes_min)
        if not (path / LOCK_FILE).exists():  # no coordinator can hold it, and a refusal must not make it
            self._check(seams, reserve)
        self._lock = seams.lock(path)
        try:
            self._check(seams, reserve)
            self._disk.restrict(path, OURS)
            self.store = Store(
                path / DATABASE,
                time,
                failure,
                connect=seams.connect,
                reserve=reserve,
                failed_sync=FailedSync(path / FAILED_SYNC, self._disk),
            )
            reserve.take()
            if problem := self.store.database.problem():
                logger.error("%s", problem)
            self.folders = StateFolders(path, self._disk)
        except RetryLaterError as error:
            self._lock.release()
            raise DataDirError(str(error)) from None
        except BaseException:
            self._lock.release()
            raise

    async def begin_epoch(self) -> int:
        """Begin a new incarnation of the coordinator and return its epoch. Call once, before the first append.

        Raises OSError if the disk fails. On a full one the side file stays as it is: deletions must be possible.
        """
        epoch = await self.store.raise_epoch()
        identity = self.store.identity()
        try:
            write_side_file(self._path, identity, self._disk)
        except OSError as error:
            if error.errno not in FULL:
                raise
            logger.warning("the disk is full: %s is of an older epoch", SIDE_FILE)
        self.folders.begin_epoch(identity)
        return epoch

    async def keep_noting(self, time: Time) -> None:
        """Note now and then how far the database has come, so that an older copy shows also after a kill."""
        while True:
            await time.sleep(NOTE_S)
            noting = asyncio.get_running_loop().run_in_executor(None, self._note, self.store.identity())
            self._noting = noting
            await asyncio.shield(noting)

    async def close(self) -> None:
        """Note how far the database has come, commit the queued writes, close it and release the lock."""
        if self._noting is not None:
            await asyncio.wait((self._noting,))
        if not self._failure.is_reported:
            self._note(self.store.identity())
        await self.store.close()
        self._lock.release()

    def _check(self, seams: Seams, reserve: Reserve) -> None:
        read = functools.partial(
            read_closed, self._path / DATABASE, identity_of, seams.connect_read_only, is_alone=True
        )
        try:
            database = read()
        except ValueError as error:
            if reserve.free() >= RESERVE_BYTES or not reserve.release():  # a reader needs room for the log's index, too
                raise DataDirError(str(error)) from None
            database = read()
        check(self._path, database, self._disk)

    def _note(self, identity: Identity) -> None:
        """Write what is durable in the database to the side file."""
        try:
            write_side_file(self._path, identity, self._disk)
        except OSError as error:
            logger.warning("the side file cannot be written: %s", error)

"""SQLite: connections to a database file, and the errors of its statements. The only module that imports SQLite.

Opens a database for its one writer, for its readers, and for copies. Does not depend on any table but `meta`.
Main invariant: a commit on a connection of `open_connection` is durable when it returns.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from coordinator.storage.disk import PRIVATE_FILE
from coordinator.storage.migrations import MIGRATIONS
from coordinator.storage.schema import APPLICATION_ID, SCHEMA_VERSION

T = TypeVar("T")
logger = logging.getLogger(__name__)
Row = sqlite3.Row
Connection = sqlite3.Connection
SqlError = sqlite3.Error

WAL_BYTES_KEPT = 64 << 20
"""The write-ahead log shrinks to this size when it was copied into the database."""
LOCK_WAIT_S = 1.0
"""How long one attempt waits for a lock that another process holds. Queued writes wait as long, and so may a stop."""
LOCKED_STARTS_MAX = 10
"""Attempts to open a locked database. The start is blocked meanwhile, so that it takes a signal only after them."""
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
"""Errors, without their extension, of a lock that another process holds. The database is as it was before the write."""
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
"""Errors of a full disk, a quota, or a limit on file sizes. The database is as it was before the write."""


class StorageError(Exception):
    """The database refused a write. No part of that write is durable."""


class RetryLaterError(StorageError):
    """The database cannot take the write now, and takes the same write later."""


class DiskFullError(RetryLaterError):
    """The disk has no room for the write."""


class LockedError(RetryLaterError):
    """Another process holds the lock of the database."""


class ConflictError(StorageError):
    """A constraint forbids the row: its key exists."""


class StoreBrokenError(StorageError):
    """The disk fails. It is unknown whether the write is durable; this incarnation takes no more writes."""


def open_connection(path: Path) -> Connection:
    """Open a connection whose commits are synced. A new database can be read by its owner only, as its log."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE))
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_WAIT_S)
    db.row_factory = sqlite3.Row
    set_pragmas(db)
    return db


def closed_at(path: Path) -> tuple[int, int] | None:
    """Return when a database was last changed, in ns, and its size; None if it is missing or a process has it open."""
    if _log_of(path).exists() or not path.exists():
        return None
    found = path.stat()
    return found.st_mtime_ns, found.st_size


def open_read_only(path: Path, *, has_log: bool | None = None) -> Connection:
    """Open a connection that changes neither database nor write-ahead log, while a coordinator may run.

    Without a log nothing is locked: what is read is one moment only if `closed_at` is the same afterwards. `has_log`:
    whether the caller found a log; None: look for it.
    """
    # Without a log no process has the database open. SQLite would make a log, and leave it there.
    mode = "mode=ro" if (_log_of(path).exists() if has_log is None else has_log) else "immutable=1"
    db = sqlite3.connect(f"file:{quote(str(path))}?{mode}", uri=True, isolation_level=None, timeout=10.0)
    db.row_factory = sqlite3.Row
    return db


def open_target(path: Path) -> Connection:
    """Open the target of a copy: without a log, and not durable before its file is synced."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE))
    db = sqlite3.connect(path, isolation_level=None)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = OFF")
    return db


def read_closed(
    path: Path, read: Callable[[Connection], T], connect: Callable[[Path], Connection], *, is_alone: bool = False
) -> T | None:
    """Return what `read` returns for a database that this process has not open; None if it is missing or empty.

    `connect`: see `open_read_only`. `is_alone`: no other process opens the database meanwhile; then the folder is left
    as it was. Raises ValueError if the file is damaged or of another format.
    """
    if not path.exists() or not (path.stat().st_size or _log_of(path).exists()):
        return None
    memory = path.with_name(f"{path.name}-shm")
    had_memory = memory.exists()
    try:
        db = connect(path)
        try:
            return read(db) if schema_version(db, path) else None
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    finally:
        if is_alone and not had_memory:  # the index of the log, which SQLite makes and leaves there
            memory.unlink(missing_ok=True)


def growth_of(db: Connection, path: Path) -> int:
    """Return by how many bytes a database's file grows when its write-ahead log is copied into it."""
    pages, page_bytes = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    return max(0, pages * page_bytes - path.stat().st_size)


def problems_of(db: Connection, num_max: int = 20) -> list[str]:
    """Return what SQLite finds damaged in a database, up to a number; reads all of it."""
    try:
        found = [row[0] for row in db.execute(f"PRAGMA integrity_check({num_max})") if row[0] != "ok"]
        foreign = db.execute("PRAGMA foreign_key_check").fetchmany(num_max)
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return found + [f"a row of {row[0]} refers to a missing row of {row[2]}" for row in foreign]


@contextmanager
def writing_copy(path: Path) -> Iterator[None]:
    """Raise OSError for an error of SQLite in the block, which writes a copy."""
    try:
        yield
    except SqlError as error:
        raise OSError(errno.EIO, f"the copy cannot be written: {error}", str(path)) from None


def opened(path: Path, connect: Callable[[Path], Connection]) -> Connection:
    """Return a connection, as soon as no other process locks the database. Raises LockedError."""
    return until_unlocked(path, lambda: connect(path))


def until_unlocked(path: Path, attempt: Callable[[], T]) -> T:
    """Return what an attempt returns, as soon as no other process locks the database. Raises LockedError."""
    for number in range(LOCKED_STARTS_MAX):
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            if number == 0:
                logger.warning("another process has locked %s: waiting until it unlocks the database", path)
    raise LockedError(
        f"another process has locked {path}: end the program that writes to it (a shell of sqlite3, a backup), then "
        "start again"
    )


def set_pragmas(db: Connection) -> None:
    """Make commits durable and the write-ahead log bounded."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # in WAL mode no lower level syncs at commit
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    # Otherwise SQLite copies the log at the end of a COMMIT, and reports a failure of the copy as one of the commit.
    db.execute("PRAGMA wal_autocheckpoint = 0")


def is_full(error: Exception | None) -> bool:
    """Return whether this is the error of a full disk."""
    return isinstance(error, DiskFullError) or getattr(error, "sqlite_errorcode", 0) in _NO_ROOM


def is_locked(error: Exception | None) -> bool:
    """Return whether this is the error of a lock that another process holds."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKED


def is_fatal(error: SqlError) -> bool:
    """Return whether the durable content of the database is unknown after this error."""
    code = getattr(error, "sqlite_errorcode", 0)
    is_failure = code & 0xFF in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return is_failure and not is_full(error)


def as_storage_error(error: Exception) -> Exception:
    """Return the error of this room for an error of SQLite; any other error as it is."""
    if isinstance(error, sqlite3.IntegrityError):
        return ConflictError(str(error))
    if isinstance(error, SqlError):
        kind = DiskFullError if is_full(error) else LockedError if is_locked(error) else StorageError
        return kind(str(error))
    return error


def schema_version(db: Connection, path: Path) -> int:
    """Return the version of the database's tables; 0: it is new. Raises ValueError if this version cannot read it."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    if version and (application_id != APPLICATION_ID or version < min(MIGRATIONS, default=SCHEMA_VERSION)):
        raise ValueError(
            f"{path} was written by an older version of tinkerpool, whose data this version cannot read: use another "
            "data directory, or keep using that version"
        )
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"{path} was written by a newer tinkerpool (schema {version}, this one reads {SCHEMA_VERSION}): "
            "upgrade tinkerpool, or use another data directory"
        )
    return version


def read_meta(db: Connection, key: str) -> int:
    """Return a value of the table `meta`."""
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")

"""The database file: SQLite in WAL mode, one writer, group commit. The only module that imports SQLite.

A write is a function on the connection; all queued writes are committed as one transaction with one fsync, in the order
of their calls. So a later write is never durable before an earlier one. Reads use a connection of their own and see
committed rows only. Does not depend on any table but `meta`.

A full disk refuses writes, and takes them again once it has room; so does a database that another process has locked. A
disk that fails to sync, or returns damaged data,
ends this incarnation: it is unknown how much of the last commit is durable, and another sync would not show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from coordinator.base.errors import Failure
from coordinator.base.time import Time, month_of
from coordinator.storage.disk import PRIVATE_FILE, Reserve
from coordinator.storage.migrations import MIGRATIONS
from coordinator.storage.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION
from workers.contract.failpoints import failpoint

T = TypeVar("T")
logger = logging.getLogger(__name__)
Row = sqlite3.Row
Connection = sqlite3.Connection
Write = Callable[[Connection], Any]

WAL_BYTES_KEPT = 64 << 20
"""The write-ahead log shrinks to this size when it was copied into the database."""
LINGER_S = 0.002
"""How long an append waits for further writes, unless one is queued that cannot wait."""
CHECKPOINT_COMMITS, CHECKPOINT_BYTES = 100, 4 << 20
"""Commits, or bytes of payloads in them, after which the write-ahead log is copied into the database."""
RIDING_MAX = 1000
"""Riding writes (see `ride`) after which they get a commit of their own."""
SERVICE_TIME_STEP_S = 1.0
"""How much service time a crash may lose."""
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


@dataclass(frozen=True, slots=True)
class _Queued:
    """A write that waits for the next commit."""

    write: Write
    kind: str
    """The prefix of its failpoints; empty: it has none."""
    future: asyncio.Future[Any]
    can_linger: bool
    """Whether sharing a commit with the next writes is worth a short wait."""
    is_deletion: bool
    """Whether it may use the reserve of a full disk."""


class Database:
    """The database in a data directory. Open it, await its writes, close it."""

    def __init__(
        self,
        path: Path,
        time: Time,
        failure: Failure,
        *,
        connect: Callable[[Path], Connection] | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Open or create the database.

        Raises ValueError if another version of tinkerpool wrote it, and LockedError if another process locks it.

        If the disk fails, that is reported to `failure`, and later writes are refused. `connect` opens a connection; a
        simulation passes one with a disk that it controls.
        """
        self.num_commits = 0
        """Transactions committed in this incarnation, one fsync each."""
        self._checkpointed_commits = 0
        self._bytes_since_checkpoint = 0
        self._path = path
        self._time = time
        self._failure = failure
        self._reserve = reserve
        self._writer = _opened(path, connect or open_connection)
        try:
            _until_unlocked(path, self._prepare)
            # After a failed sync the write-ahead log may have holes on the disk that the page cache hides: empty it.
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._service_s = self._service_s_kept = read_meta(self._writer, "service_ms") / 1000
        except BaseException:
            self._writer.close()
            raise
        self._opened = time.monotonic()
        self._reader = _opened(path, connect or open_connection)
        self._reader.execute("PRAGMA query_only = ON")
        self._reading_thread = threading.get_ident()
        self._queued: list[_Queued] = []
        self._riding: dict[str, tuple[str, Write]] = {}
        self._hurry = asyncio.Event()
        self._committing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")
        self._broken: StoreBrokenError | None = None
        self._refusal: type[RetryLaterError] | None = None
        """Why the last commit refused writes; None: it did not."""
        self._is_closed = False

    async def close(self) -> None:
        """Commit the queued writes, then close; later writes are refused. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hurry.set()
        if self._committing is not None:
            await self._committing
        if self._broken is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._keep_service_time)
        self._thread.shutdown()
        self._writer.close()
        self._reader.close()

    def service_time(self) -> float:
        """Return the seconds that the service has run in all incarnations, without downtime and steps of the clock."""
        return self._service_s + self._time.monotonic() - self._opened

    def month(self) -> int:
        """Return the calendar month, UTC, that usage counts for now, see `month_of`."""
        return month_of(self._time.wall())

    def write(
        self, write: Callable[[Connection], T], kind: str = "", *, can_linger: bool = False, is_deletion: bool = False
    ) -> asyncio.Future[T]:
        """Queue a write; the future is done when it is durable. If it raises, only this write is rolled back.

        `is_deletion`: it frees more room than it needs, so it may use the reserve of a full disk.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._broken is not None or self._is_closed:
            future.set_exception(self._broken or StorageError("the database is closed"))
            return future
        self._queued.append(_Queued(write, kind, future, can_linger, is_deletion))
        if not can_linger:
            self._hurry.set()
        if self._committing is None:
            self._committing = loop.create_task(self._commit_all())
        return future

    def expect_bytes(self, num_bytes: int) -> None:
        """Count bytes of the next write: after enough of them the write-ahead log is copied into the database."""
        self._bytes_since_checkpoint += num_bytes

    def ride(self, key: str, write: Write, kind: str = "") -> None:
        """Queue a write that becomes durable with the next one; a crash may lose it. Replaces the last one of `key`."""
        self._riding[key] = (kind, write)
        if len(self._riding) >= RIDING_MAX and self._committing is None:
            self.write(lambda db: None)

    def read(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        """Return the rows of a query over committed data. Call this on the event loop's thread only.

        All reads share a connection: while one runs on another thread, the others see the data as of its start, without
        commits that they know of.
        """
        assert threading.get_ident() == self._reading_thread, "a read on another thread than the event loop's"
        return self._reader.execute(sql, parameters).fetchall()

    def read_one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Return the first row of a query over committed data, as `read` does."""
        assert threading.get_ident() == self._reading_thread, "a read on another thread than the event loop's"
        row: Row | None = self._reader.execute(sql, parameters).fetchone()
        return row

    def meta(self, key: str) -> int:
        """Return a committed value of the table `meta`."""
        return read_meta(self._reader, key)

    def execute(self, sql: str, parameters: Sequence[Any] = (), *, is_deletion: bool = False) -> asyncio.Future[int]:
        """Queue one statement as a write; the future has the number of rows that it changed."""
        return self.write(lambda db: db.execute(sql, parameters).rowcount, is_deletion=is_deletion)

    @property
    def has_reserve(self) -> bool:
        """Whether there is room that only deletions may use."""
        return self._reserve is not None and self._reserve.is_held

    async def take_reserve(self) -> None:
        """Make the reserve again, if a deletion has released it and there is room."""
        if self._reserve is not None and not self.has_reserve:
            await asyncio.to_thread(self._reserve.take)

    def _prepare(self) -> None:
        """Create the tables in a new file; migrate an older one. Raises ValueError if the file has another format."""
        db = self._writer
        found = _schema_version(db, self._path)
        db.execute("BEGIN IMMEDIATE")
        if found == SCHEMA_VERSION:
            db.execute("ROLLBACK")  # this thread is the only writer
            return
        if found:
            for version in range(found, SCHEMA_VERSION):
                _run_all(db, MIGRATIONS[version])
        else:
            _run_all(db, SCHEMA)
            db.execute("INSERT INTO meta VALUES ('pool_id', ?)", (int(secrets.token_hex(8), 16) >> 1,))
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
        if found:
            logger.info("%s was migrated from schema %d to %d", self._path, found, SCHEMA_VERSION)

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queued:
                await self._linger()
                queued, self._queued = self._queued, []
                riding, self._riding = self._riding, {}
                outcomes = await loop.run_in_executor(self._thread, self._commit_in_room, queued, list(riding.values()))
                if self._broken is not None:
                    self._failure.report(self._broken)
                self._note_refusals([error for _, error in outcomes])
                if self._refusal is LockedError:
                    self._riding = riding | self._riding
                for each, (value, error) in zip(queued, outcomes, strict=True):
                    _resolve(each.future, value, error)
                if self._broken is None and self._is_checkpoint_due():
                    await loop.run_in_executor(self._thread, self._checkpoint)
                    if self._broken is not None:
                        self._failure.report(self._broken)
                if self._broken is not None:
                    queued, self._queued = self._queued, []
                    for each in queued:
                        _resolve(each.future, None, self._broken)
        finally:
            self._committing = None

    def _note_refusals(self, errors: Iterable[Exception | None]) -> None:
        """Log when the database begins to refuse writes, and when it takes them again."""
        reason = next((error for error in errors if _is_full(error) or _is_locked(error)), None)
        refusal = None if reason is None else LockedError if _is_locked(reason) else DiskFullError
        if refusal is self._refusal or (refusal is None and self._is_reserve_used):
            return
        if self._refusal is not None:
            logger.warning("the database is unlocked" if self._refusal is LockedError else "the disk has room again")
        if refusal is LockedError:
            logger.error(
                "another process has locked %s: new operations are refused until it unlocks the database", self._path
            )
        elif refusal is DiskFullError:
            logger.error("the disk is full (%s): new operations are refused until there is room", reason)
        self._refusal = refusal

    async def _linger(self) -> None:
        """Wait shortly for related writes: a pass and its step are two calls, and one append."""
        if not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LINGER_S)
        self._hurry.clear()

    @property
    def _is_reserve_used(self) -> bool:
        return self._reserve is not None and not self._reserve.is_held

    def _commit_in_room(
        self, queued: Sequence[_Queued], riding: Sequence[tuple[str, Write]]
    ) -> list[tuple[Any, Exception | None]]:
        """Commit all writes. Release the reserve if a deletion finds no room; from then on commit deletions only."""
        if self._is_reserve_used:
            full = DiskFullError("the last room is kept for deletions")
            deletions = iter(self._commit([each for each in queued if each.is_deletion], ()))
            return [next(deletions) if each.is_deletion else (None, full) for each in queued]
        outcomes = self._commit(queued, riding)
        for index, each in enumerate(queued):
            is_refused = each.is_deletion and _is_full(outcomes[index][1])
            if is_refused and self._reserve is not None and (self._reserve.release() or self._is_reserve_used):
                [outcomes[index]] = self._commit([each], ())
        return outcomes

    def _commit(
        self, queued: Sequence[_Queued], riding: Sequence[tuple[str, Write]]
    ) -> list[tuple[Any, Exception | None]]:
        """Commit all writes in one transaction; only a write that raises fails: it is rolled back to its savepoint."""
        db = self._writer
        outcomes: list[tuple[Any, Exception | None]] = []
        kinds = dict.fromkeys([kind for kind, _ in riding if kind] + [each.kind for each in queued if each.kind])
        try:
            db.execute("BEGIN IMMEDIATE")
            for _, write in riding:
                write(db)
            self._note_service_time(db)
            for each in queued:
                db.execute("SAVEPOINT one")
                try:
                    outcomes.append((each.write(db), None))
                except Exception as error:
                    if not db.in_transaction:
                        raise  # some errors, as a full disk, roll the whole transaction back
                    db.execute("ROLLBACK TO one")
                    outcomes.append((None, error))
                db.execute("RELEASE one")
            for kind in kinds:
                failpoint(f"{kind}.before_commit")
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if _is_fatal(error):
                self._broken = self._broken_by(error)
                return [(None, self._broken)] * len(queued)
            if db.in_transaction:
                db.execute("ROLLBACK")
            if len(queued) == 1 or _is_locked(error):
                return [(None, error)] * len(queued)
            single = [self._commit([each], ()) for each in queued]  # there may be room for the smaller ones
            return [outcome for [outcome] in single]
        self.num_commits += 1
        for kind in kinds:
            failpoint(f"{kind}.after_commit")
        return outcomes

    def _is_checkpoint_due(self) -> bool:
        num_commits = self.num_commits - self._checkpointed_commits
        return (
            num_commits >= CHECKPOINT_COMMITS
            or (num_commits > 0 and self._is_reserve_used)
            or self._bytes_since_checkpoint >= CHECKPOINT_BYTES
        )

    def _checkpoint(self) -> None:
        """Copy the write-ahead log into the database. Commits are durable without it; on a full disk the log grows."""
        self._checkpointed_commits, self._bytes_since_checkpoint = self.num_commits, 0
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            if _is_fatal(error):
                self._broken = self._broken_by(error)
            else:
                logger.warning("the write-ahead log cannot be copied into the database: %s; retrying later", error)

    def _broken_by(self, error: sqlite3.Error) -> StoreBrokenError:
        return StoreBrokenError(f"the disk of {self._path} fails: {error}")

    def _keep_service_time(self) -> None:
        self._service_s_kept = -1.0
        self._commit([], ())

    def _note_service_time(self, db: Connection) -> None:
        now = self.service_time()
        if now - self._service_s_kept > SERVICE_TIME_STEP_S:
            db.execute("UPDATE meta SET value = ? WHERE key = 'service_ms'", (round(now * 1000),))
            self._service_s_kept = now


def open_connection(path: Path) -> Connection:
    """Open a connection whose commits are synced. A new database can be read by its owner only, as its log."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, PRIVATE_FILE))
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_WAIT_S)
    db.row_factory = sqlite3.Row
    set_pragmas(db)
    return db


def open_read_only(path: Path) -> Connection:
    """Open a connection that changes neither database nor write-ahead log, while a coordinator may run."""
    # Without a log no process has the database open. SQLite would make a log, and leave it there.
    mode = "mode=ro" if _log_of(path).exists() else "immutable=1"
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
            return read(db) if _schema_version(db, path) else None
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    finally:
        if is_alone and not had_memory:  # the index of the log, which SQLite makes and leaves there
            memory.unlink(missing_ok=True)


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
    except sqlite3.Error as error:
        raise OSError(errno.EIO, f"the copy cannot be written: {error}", str(path)) from None


def _opened(path: Path, connect: Callable[[Path], Connection]) -> Connection:
    return _until_unlocked(path, lambda: connect(path))


def _until_unlocked(path: Path, attempt: Callable[[], T]) -> T:
    """Return what an attempt returns, as soon as no other process locks the database. Raises LockedError."""
    for number in range(LOCKED_STARTS_MAX):
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            if not _is_locked(error):
                raise
            if number == 0:
                logger.warning("another process has locked %s: waiting until it unlocks the database", path)
    raise LockedError(
        f"another process has locked {path}: end the program that writes to it (a shell of sqlite3, a backup), then "
        "start again"
    )


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _run_all(db: Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        if statement.strip():
            db.execute(statement)


def _schema_version(db: Connection, path: Path) -> int:
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


def set_pragmas(db: Connection) -> None:
    """Make commits durable and the write-ahead log bounded."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # in WAL mode no lower level syncs at commit
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    # Otherwise SQLite copies the log at the end of a COMMIT, and reports a failure of the copy as one of the commit.
    db.execute("PRAGMA wal_autocheckpoint = 0")


def _is_full(error: Exception | None) -> bool:
    return isinstance(error, DiskFullError) or getattr(error, "sqlite_errorcode", 0) in _NO_ROOM


def _is_locked(error: Exception | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKED


def _is_fatal(error: sqlite3.Error) -> bool:
    """Return whether the durable content of the database is unknown after this error."""
    code = getattr(error, "sqlite_errorcode", 0)
    is_failure = code & 0xFF in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return is_failure and not _is_full(error)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, sqlite3.IntegrityError):
        future.set_exception(ConflictError(str(error)))
    elif isinstance(error, sqlite3.Error):
        kind = DiskFullError if _is_full(error) else LockedError if _is_locked(error) else StorageError
        future.set_exception(kind(str(error)))
    else:
        future.set_exception(error)


def read_meta(db: Connection, key: str) -> int:
    """Return a value of the table `meta`."""
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

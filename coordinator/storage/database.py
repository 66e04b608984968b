"""The database file: SQLite in WAL mode, one writer, group commit. The only module that imports SQLite; knows no tables
but `meta`.

A write is a function on the connection; all writes that wait are committed as one transaction with one fsync, in the
order they were handed in. So what is handed in later never becomes durable earlier. Readers use a connection of their
own and see committed data only.

A disk that is full refuses writes, and later takes them again. A disk that fails to sync, or whose data is damaged,
ends this life of the database: what the last commit left on it is not known, and syncing again would not tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.storage.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION
from workers.contract.failpoints import failpoint

T = TypeVar("T")
logger = logging.getLogger(__name__)
Row = sqlite3.Row
Connection = sqlite3.Connection
Write = Callable[[Connection], Any]

WAL_BYTES_KEPT = 64 << 20
"""The write-ahead log shrinks to this when it has been copied into the database."""
LINGER_S = 0.002
"""How long an append waits for another, unless something comes that cannot wait."""
CHECKPOINT_COMMITS, CHECKPOINT_BYTES = 100, 4 << 20
"""Commits, or bytes of requests in them, after which the write-ahead log is copied into the database."""
RIDING_MAX = 1000
"""Writes that wait for others after which they wait no more."""
SERVICE_TIME_STEP_S = 1.0
"""How much service time a crash may forget."""
_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
"""What a full disk gives, or a quota, or a limit on a file's size. Everything is as it was before the write."""


class StorageError(Exception):
    """The database did not take a write. Nothing of that write is durable."""


class DiskFullError(StorageError):
    """There is no room for it."""


class ConflictError(StorageError):
    """A constraint forbids the row: something of that key exists."""


class StoreBrokenError(StorageError):
    """The disk fails. Whether the write is durable is not known; this life of the store is over."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A write that waits for the next commit."""

    write: Write
    kind: str
    """What failpoints call it; empty: nothing."""
    future: asyncio.Future[Any]
    can_linger: bool
    """It would rather share a commit with what comes next than be durable at once."""


class Database:
    """The database in a data directory. Open it, await its writes, close it."""

    def __init__(
        self,
        path: Path,
        *,
        monotonic: Callable[[], float],
        connect: Callable[[Path], Connection] | None = None,
        on_broken: Callable[[StoreBrokenError], None] = lambda error: None,
    ) -> None:
        """Open or create the database. Raises ValueError if it was written by a newer version.

        `on_broken` is called once if the disk fails; nothing is written after that.
        """
        self.num_commits = 0
        """Transactions committed in this life, one fsync each."""
        self._checkpointed_commits = 0
        self._bytes_since_checkpoint = 0
        self._path = path
        self._monotonic = monotonic
        self._on_broken = on_broken
        self._writer = (connect or open_connection)(path)
        try:
            self._migrate()
            # The log of a life whose disk failed may have holes on the disk that only the page cache hides: begin anew.
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._service_s = self._service_s_kept = read_meta(self._writer, "service_ms") / 1000
        except BaseException:
            self._writer.close()
            raise
        self._opened = monotonic()
        self._reader = (connect or open_connection)(path)
        self._reader.execute("PRAGMA query_only = ON")
        self._waiting: list[_Waiting] = []
        self._riding: dict[str, tuple[str, Write]] = {}
        self._hurry = asyncio.Event()
        self._committing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store-writer")
        self._broken: StoreBrokenError | None = None
        self._is_full = False
        self._is_closed = False

    async def close(self) -> None:
        """Commit what waits, then close; what is handed in later is refused. Idempotent."""
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
        """Seconds that the service has run in all its lives: it knows neither downtime nor steps of the wall clock."""
        return self._service_s + self._monotonic() - self._opened

    def write(self, write: Callable[[Connection], T], kind: str = "", *, can_linger: bool = False) -> asyncio.Future[T]:
        """Hand in a write; the future is done when it is durable. A write that raises is undone alone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._broken is not None or self._is_closed:
            future.set_exception(self._broken or StorageError("the database is closed"))
            return future
        self._waiting.append(_Waiting(write, kind, future, can_linger))
        if not can_linger:
            self._hurry.set()
        if self._committing is None:
            self._committing = loop.create_task(self._commit_all())
        return future

    def expect_bytes(self, num_bytes: int) -> None:
        """So many are about to be written: after enough of them the log is copied into the database."""
        self._bytes_since_checkpoint += num_bytes

    def ride(self, key: str, write: Write, kind: str = "") -> None:
        """Hand in a write that may be lost: it becomes durable with the next one that may not."""
        self._riding[key] = (kind, write)
        if len(self._riding) >= RIDING_MAX and self._committing is None:
            self.write(lambda db: None)

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Rows of a query over committed data."""
        return self._reader.execute(sql, parameters).fetchall()

    def read_one(self, sql: str, parameters: Sequence[Any] = ()) -> Row | None:
        """The first row of a query over committed data."""
        row: Row | None = self._reader.execute(sql, parameters).fetchone()
        return row

    def meta(self, key: str) -> int:
        """A committed value of the table `meta`."""
        return read_meta(self._reader, key)

    def insert(self, table: str, **values: Any) -> asyncio.Future[None]:
        """Insert one row. Raises ConflictError through the future if a constraint forbids it."""
        return self.write(lambda db: insert_row(db, table, values))

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> asyncio.Future[int]:
        """Run one statement; the future has the number of rows it changed."""
        return self.write(lambda db: db.execute(sql, parameters).rowcount)

    def _migrate(self) -> None:
        db = self._writer
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"{self._path} was written by a newer tinkerpool (schema {version}, this one knows {SCHEMA_VERSION}): "
                "upgrade tinkerpool, or use another data directory"
            )
        scripts = [SCHEMA] if version == 0 else [MIGRATIONS[older] for older in range(version, SCHEMA_VERSION)]
        if not scripts:
            return
        db.execute("BEGIN IMMEDIATE")
        for statement in ";\n".join(scripts).split(";\n"):
            if statement.strip():
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    async def _commit_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await self._linger()
                waiting, self._waiting = self._waiting, []
                riding, self._riding = list(self._riding.values()), {}
                outcomes = await loop.run_in_executor(self._thread, self._commit, waiting, riding)
                if self._broken is not None:
                    self._on_broken(self._broken)
                self._note_room(outcomes)
                for each, (value, failure) in zip(waiting, outcomes, strict=True):
                    _resolve(each.future, value, failure)
                if self._broken is None and self._is_checkpoint_due():
                    await loop.run_in_executor(self._thread, self._checkpoint)
                    if self._broken is not None:
                        self._on_broken(self._broken)
                if self._broken is not None:
                    waiting, self._waiting = self._waiting, []
                    for each in waiting:
                        _resolve(each.future, None, self._broken)
        finally:
            self._committing = None

    def _note_room(self, outcomes: Iterable[tuple[Any, Exception | None]]) -> None:
        """Tell the operator when the disk is full, and when it is not any more."""
        reason = next((failure for _, failure in outcomes if _is_full(failure)), None)
        if reason is not None and not self._is_full:
            logger.error("the disk is full (%s): nothing new is accepted until there is room", reason)
        elif reason is None and self._is_full:
            logger.warning("the disk has room again")
        self._is_full = reason is not None

    async def _linger(self) -> None:
        """Give what belongs together the time to come: a pass and its step are two calls, and one append."""
        if not self._hurry.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), LINGER_S)
        self._hurry.clear()

    def _commit(
        self, waiting: Sequence[_Waiting], riding: Sequence[tuple[str, Write]]
    ) -> list[tuple[Any, Exception | None]]:
        """One transaction for all; a write that fails is rolled back to its savepoint and fails alone."""
        db = self._writer
        outcomes: list[tuple[Any, Exception | None]] = []
        kinds = dict.fromkeys([kind for kind, _ in riding if kind] + [each.kind for each in waiting if each.kind])
        try:
            db.execute("BEGIN IMMEDIATE")
            for _, write in riding:
                write(db)
            self._note_service_time(db)
            for each in waiting:
                db.execute("SAVEPOINT one")
                try:
                    outcomes.append((each.write(db), None))
                except Exception as error:
                    if not db.in_transaction:
                        raise  # a full disk, for example, has undone everything
                    db.execute("ROLLBACK TO one")
                    outcomes.append((None, error))
                db.execute("RELEASE one")
            for kind in kinds:
                failpoint(f"{kind}.before_commit")
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if _is_fatal(error):
                self._broken = self._failure(error)
                return [(None, self._broken)] * len(waiting)
            if db.in_transaction:
                db.execute("ROLLBACK")
            if len(waiting) == 1:
                return [(None, error)]
            alone = [self._commit([each], ()) for each in waiting]  # whoever needs less room may still find it
            return [outcome for [outcome] in alone]
        self.num_commits += 1
        for kind in kinds:
            failpoint(f"{kind}.after_commit")
        return outcomes

    def _is_checkpoint_due(self) -> bool:
        num_commits = self.num_commits - self._checkpointed_commits
        return num_commits >= CHECKPOINT_COMMITS or self._bytes_since_checkpoint >= CHECKPOINT_BYTES

    def _checkpoint(self) -> None:
        """Copy the log into the database. Commits are durable without; where a full disk forbids it, the log grows."""
        self._checkpointed_commits, self._bytes_since_checkpoint = self.num_commits, 0
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            if _is_fatal(error):
                self._broken = self._failure(error)
            else:
                logger.warning("the log cannot be copied into the database: %s; trying on", error)

    def _failure(self, error: sqlite3.Error) -> StoreBrokenError:
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
    """A connection as the store needs it: every commit is synced."""
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    db.row_factory = sqlite3.Row
    set_pragmas(db)
    return db


def set_pragmas(db: Connection) -> None:
    """What makes a commit durable, and the log bounded."""
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # in WAL mode nothing less syncs at commit
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    # Else SQLite would copy the log at the end of a COMMIT, and report a failure of that as one of the commit.
    db.execute("PRAGMA wal_autocheckpoint = 0")


def _is_full(error: Exception | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) in _NO_ROOM


def _is_fatal(error: sqlite3.Error) -> bool:
    """Whether what is on the disk is no longer known."""
    code = getattr(error, "sqlite_errorcode", 0)
    is_failure = code & 0xFF in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
    return is_failure and not _is_full(error)


def _resolve(future: asyncio.Future[Any], value: Any, failure: Exception | None) -> None:
    if future.cancelled():
        return
    if failure is None:
        future.set_result(value)
    elif isinstance(failure, sqlite3.IntegrityError):
        future.set_exception(ConflictError(str(failure)))
    elif isinstance(failure, sqlite3.Error):
        future.set_exception((DiskFullError if _is_full(failure) else StorageError)(str(failure)))
    else:
        future.set_exception(failure)


def insert_row(db: Connection, table: str, values: dict[str, Any]) -> None:
    """Insert a row, by column."""
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))  # noqa: S608 (our names)


def read_meta(db: Connection, key: str) -> int:
    """A value of the table `meta`."""
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

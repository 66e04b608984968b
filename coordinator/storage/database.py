"""The database file: SQLite in WAL mode, one writer, group commit.

A write is a function on the connection; all queued writes are committed as one transaction with one fsync, in the order
of their calls. So a later write is never durable before an earlier one. Reads use a connection of their own and see
committed rows only. Does not depend on any table but `meta`.

A full disk refuses writes, and takes them again once it has room; so does a database that another process has locked.
Deletions have a reserve. A disk that fails to sync, or returns damaged data, ends this incarnation: it is unknown how
much of the last commit is durable, and another sync would not show it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.base.errors import Failure
from coordinator.base.time import Time, day_of
from coordinator.observe.metrics import DATABASE_COMMIT_SECONDS, DATABASE_WRITES
from coordinator.storage.disk import RESERVE_BYTES, FailedSync, Reserve
from coordinator.storage.migrations import MIGRATIONS
from coordinator.storage.schema import APPLICATION_ID, SCHEMA, SCHEMA_VERSION
from coordinator.storage.sqlite import (
    Connection,
    DiskFullError,
    LockedError,
    RetryLaterError,
    Row,
    SqlError,
    StorageError,
    StoreBrokenError,
    as_storage_error,
    growth_of,
    is_fatal,
    is_full,
    is_locked,
    open_connection,
    opened,
    read_meta,
    schema_version,
    until_unlocked,
)
from workers.contract.failpoints import failpoint

T = TypeVar("T")
logger = logging.getLogger(__name__)
Write = Callable[[Connection], Any]

LINGER_S = 0.002
"""How long an append waits for further writes, unless one is queued that cannot wait."""
CHECKPOINT_COMMITS, CHECKPOINT_BYTES = 100, 4 << 20
"""Commits, or bytes of payloads in them, after which the write-ahead log is copied into the database."""
RIDING_MAX = 1000
"""Riding writes (see `ride`) after which they get a commit of their own."""
RIDING_KEPT_MAX = 10_000
"""Riding writes that are kept while the database refuses writes; the oldest are lost."""
SERVICE_TIME_STEP_S = 1.0
"""How much service time a crash may lose."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A write that waits for the next commit."""

    write: Write
    kind: str
    """The prefix of its failpoints; empty: it has none."""
    future: asyncio.Future[Any]
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
        failed_sync: FailedSync | None = None,
    ) -> None:
        """Open or create the database.

        On a full disk it opens, and then takes deletions alone until there is room, see `regain_room`. Raises
        ValueError if another version of tinkerpool wrote it, LockedError if another process locks it, and DiskFullError
        if it has to be made, migrated, or repaired after a failed sync, and the disk has no room for that.

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
        self._failed_sync = failed_sync
        if reserve is not None:
            reserve.make_room(0)  # to open it: SQLite keeps an index of the log in a file
        self._writer = opened(path, connect or open_connection)
        try:
            try:
                until_unlocked(path, self._prepare)
            except SqlError as error:
                if not is_full(error):
                    raise
                raise DiskFullError(
                    f"the disk has no room for the tables of {path}, which this start makes or migrates: free some, "
                    "then start again"
                ) from None
            self._is_log_left = not self._empty_log()
            """Whether the log of the last incarnation is to be copied into the database once the disk has room."""
            self._service_s = self._service_s_kept = read_meta(self._writer, "service_ms") / 1000
        except BaseException:
            self._writer.close()
            raise
        self._opened = time.monotonic()
        self._reader = opened(path, connect or open_connection)
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
            riding, self._riding = self._riding, {}  # calls that end now may ride on, in vain
            await asyncio.get_running_loop().run_in_executor(self._thread, self._keep_service_time, riding)
        self._thread.shutdown()
        self._writer.close()
        self._reader.close()

    def service_time(self) -> float:
        """Return the seconds that the service has run in all incarnations, without downtime and steps of the clock."""
        return self._service_s + self._time.monotonic() - self._opened

    def day(self) -> int:
        """Return the calendar day, UTC, that usage counts for now, see `day_of`."""
        return day_of(self._time.wall())

    def write(
        self, write: Callable[[Connection], T], kind: str = "", *, can_linger: bool = False, is_deletion: bool = False
    ) -> asyncio.Future[T]:
        """Queue a write; the future is done when it is durable. If it raises, only this write is rolled back.

        `can_linger`: sharing a commit with the next writes is worth a short wait.
        `is_deletion`: it frees more room than it needs, so it may use the reserve of a full disk.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._broken is not None or self._is_closed:
            future.set_exception(self._broken or StorageError("the database is closed"))
            return future
        self._queued.append(_Queued(write, kind, future, is_deletion))
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
        if len(self._riding) >= RIDING_MAX and self._committing is None and self._refusal is None:
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

    async def regain_room(self) -> None:
        """Copy the log that a full disk has left, and make the reserve again, once there is room for both."""
        if self._is_log_left:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._empty_log_again)
            if self._broken is not None:
                self._failure.report(self._broken)
        if self._reserve is not None and not self.has_reserve and not self._is_log_left:
            await asyncio.to_thread(self._reserve.take)

    def lack_of_room(self) -> str:
        """Return why the disk has no room for new work, for people; empty: it has."""
        if self._reserve is None or not (self._takes_deletions_only or self._reserve.is_low()):
            return ""
        free = f"the pool's disk has {self._reserve.free() / 1e6:,.0f} MB free"
        if self._takes_deletions_only:
            return f"{free}: only reads, results and deletions are served until there is more"
        return f"{free}: new work is taken from {self._reserve.floor_bytes / 1e6:,.0f} MB on"

    def problem(self) -> str:
        """Return why new work is refused, for people; empty: it is not."""
        if self._refusal is LockedError:
            return "another process has locked the pool's database: new work is refused until it unlocks it"
        full = "the pool's disk is full: new work is refused until there is room"
        return self.lack_of_room() or (full if self._refusal is DiskFullError else "")

    def _empty_log(self) -> bool:
        """Copy the write-ahead log into the database and empty it; return False if the disk has no room for that.

        Raises DiskFullError and LockedError if a sync has failed before: then nothing may be written behind a hole of
        the log, nor acknowledged.
        """
        has_room, is_busy = self._has_room_for_log(), False
        if has_room:
            try:
                is_busy = bool(self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0])
            except SqlError as error:
                if not is_full(error):
                    raise
                has_room = False
        if self._failed_sync is not None and self._failed_sync.is_noted():
            if not has_room:
                num_bytes = growth_of(self._writer, self._path) + RESERVE_BYTES
                raise DiskFullError(
                    f"a sync of {self._path} failed before, so its log may have holes, and the disk has no room to "
                    f"copy what is left of it: free {num_bytes / 1e6:,.0f} MB, then start again"
                )
            if is_busy:
                raise LockedError(f"another process reads {self._path}: end it (a backup?), then start again")
            self._failed_sync.clear()
        return has_room

    def _empty_log_again(self) -> None:
        try:
            self._is_log_left = not self._empty_log()
        except SqlError as error:
            self._note_failure(error)

    def _has_room_for_log(self) -> bool:
        return self._reserve is None or self._reserve.make_room(growth_of(self._writer, self._path))

    def _prepare(self) -> None:
        """Create the tables in a new file; migrate an older one. Raises ValueError if the file has another format."""
        db = self._writer
        found = schema_version(db, self._path)
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
                DATABASE_WRITES.inc(len(queued) + len(riding))
                with DATABASE_COMMIT_SECONDS.time():
                    outcomes = await loop.run_in_executor(self._thread, self._commit_in_room, queued, riding)
                if self._broken is not None:
                    self._failure.report(self._broken)
                self._note_refusals([error for _, error in outcomes])
                self._ride_again(riding)
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

    def _ride_again(self, riding: dict[str, tuple[str, Write]]) -> None:
        """Queue riding writes that were not committed; those of the same keys since then replace them."""
        kept = riding | self._riding
        for key in list(kept)[:-RIDING_KEPT_MAX]:
            del kept[key]
        self._riding = kept

    def _note_refusals(self, errors: Iterable[Exception | None]) -> None:
        """Log when the database begins to refuse writes, and when it takes them again."""
        reason = next((error for error in errors if is_full(error) or is_locked(error)), None)
        refusal = None if reason is None else LockedError if is_locked(reason) else DiskFullError
        if refusal is self._refusal or (refusal is None and self._takes_deletions_only):
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
    def _takes_deletions_only(self) -> bool:
        return self._reserve is not None and (self._is_log_left or not self._reserve.is_held)

    def _commit_in_room(
        self, queued: Sequence[_Queued], riding: dict[str, tuple[str, Write]]
    ) -> list[tuple[Any, Exception | None]]:
        """Commit all writes; leave in `riding` what was not committed.

        Release the reserve if a deletion finds no room; from then on commit deletions only.
        """
        if self._takes_deletions_only:
            full = DiskFullError("the last room is kept for deletions")
            deletions = iter(self._commit([each for each in queued if each.is_deletion], {}))
            return [next(deletions) if each.is_deletion else (None, full) for each in queued]
        outcomes = self._commit(queued, riding)
        for index, each in enumerate(queued):
            is_refused = each.is_deletion and is_full(outcomes[index][1])
            if is_refused and self._reserve is not None and (self._reserve.release() or self._takes_deletions_only):
                [outcomes[index]] = self._commit([each], {})
        return outcomes

    def _commit(
        self, queued: Sequence[_Queued], riding: dict[str, tuple[str, Write]]
    ) -> list[tuple[Any, Exception | None]]:
        """Commit all writes in one transaction; only a write that raises fails: it is rolled back to its savepoint.

        Empties `riding` once it is committed.
        """
        db = self._writer
        outcomes: list[tuple[Any, Exception | None]] = []
        kinds = dict.fromkeys(
            [kind for kind, _ in riding.values() if kind] + [each.kind for each in queued if each.kind]
        )
        try:
            db.execute("BEGIN IMMEDIATE")
            for _, write in riding.values():
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
        except SqlError as error:
            if self._note_failure(error):
                return [(None, self._broken)] * len(queued)
            if db.in_transaction:
                db.execute("ROLLBACK")
            if len(queued) == 1 or is_locked(error):
                return [(None, error)] * len(queued)
            single = [self._commit([each], riding) for each in queued]  # there may be room for the smaller ones
            return [outcome for [outcome] in single]
        self.num_commits += 1
        riding.clear()
        for kind in kinds:
            failpoint(f"{kind}.after_commit")
        return outcomes

    def _is_checkpoint_due(self) -> bool:
        num_commits = self.num_commits - self._checkpointed_commits
        return (
            num_commits >= CHECKPOINT_COMMITS
            or (num_commits > 0 and self._takes_deletions_only)
            or self._bytes_since_checkpoint >= CHECKPOINT_BYTES
        )

    def _checkpoint(self) -> None:
        """Copy the write-ahead log into the database. Commits are durable without it; on a full disk the log grows."""
        self._checkpointed_commits, self._bytes_since_checkpoint = self.num_commits, 0
        if self._takes_deletions_only and not self._has_room_for_log():
            return  # what a copy in part takes is room that the next deletion needs
        try:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except SqlError as error:
            if not self._note_failure(error):
                logger.warning("the write-ahead log cannot be copied into the database: %s; retrying later", error)

    def _note_failure(self, error: SqlError) -> bool:
        """Take no more writes if the disk fails; return whether it does."""
        if not is_fatal(error):
            return False
        self._broken = StoreBrokenError(f"the disk of {self._path} fails: {error}")
        if self._failed_sync is not None:
            self._failed_sync.note()
        return True

    def _keep_service_time(self, riding: dict[str, tuple[str, Write]]) -> None:
        """Commit the time of the service, and riding writes."""
        self._service_s_kept = -1.0
        self._commit([], riding)

    def _note_service_time(self, db: Connection) -> None:
        now = self.service_time()
        if now - self._service_s_kept > SERVICE_TIME_STEP_S:
            db.execute("UPDATE meta SET value = ? WHERE key = 'service_ms'", (round(now * 1000),))
            self._service_s_kept = now


def _run_all(db: Connection, statements: str) -> None:
    for statement in statements.split(";\n"):
        if statement.strip():
            db.execute(statement)


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(as_storage_error(error))

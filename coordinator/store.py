"""The durable log: SQLite in WAL mode, one writer, group commit. The only module that knows SQL.

A write is a function on the connection; all writes that wait are committed as one transaction with one fsync, in the
order they were handed in. So what is handed in later never becomes durable earlier: a cycle's commit cannot precede
the append of an operation in it. Readers use a connection of their own and see committed data only.

A disk that is full refuses writes, and later takes them again. A disk that fails to sync, or whose data is damaged,
ends this life of the store: what the last commit left on it is not known, and syncing again would not tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coordinator.schema import MIGRATIONS, SCHEMA, SCHEMA_VERSION
from workers.failpoints import failpoint

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
FULL_RETRY_S = 1.0
"""How often it is tried whether a full disk has room again."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """An operation to append, or one that has just been decided."""

    target_id: str
    seq: int
    tenant_id: str
    kind: str
    request_id: str
    body: bytes
    body_hash: bytes
    chunk_tokens: int
    outcome: bytes | None = None
    is_failed: bool = False
    num_tokens: int = 0
    engine_s: float = 0.0
    is_withdrawn: Callable[[], bool] = lambda: False
    """Whether its append has failed since: a row at its place is another operation's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A durable snapshot folder that now stands for everything of its adapter up to `seq`."""

    adapter_id: str
    seq: int
    folder: str
    sha256: str
    window_error: bytes = b""
    """The failure that has closed the gradient window there, a serialized v1.OperationError; empty: it is open."""


@dataclass(slots=True, kw_only=True)
class CycleCommit:
    """Everything that one cycle makes true, in one transaction."""

    cycle_id: int = 0
    """0: no cycle, only decided operations."""
    summary: bytes = b""
    finished: list[OperationRow] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    samplers: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[SnapshotRow] = field(default_factory=list)
    """Of loads, which no recovery could run again once their checkpoint is deleted."""
    replaced_snapshots: list[tuple[str, str]] = field(default_factory=list)
    """Adapter and folder of what nothing points at once this is durable; not stored."""
    replaced_checkpoints: list[tuple[str, str]] = field(default_factory=list)
    """The same; their rows go."""
    virtual_tokens: dict[str, float] = field(default_factory=dict)
    """Tenant to counter."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A write that waits for the next commit."""

    write: Write
    kind: str
    """What failpoints call it; empty: nothing."""
    future: asyncio.Future[Any]
    can_linger: bool
    """It would rather share a commit with what comes next than be durable at once."""


class Store:
    """The database in a data directory. Open it, await its writes, close it."""

    CYCLES_KEPT = 10_000

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
            self._service_s = self._service_s_kept = _meta(self._writer, "service_ms") / 1000
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
        self._gives_up = False
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

    async def persist(self, commit: CycleCommit) -> frozenset[str]:
        """`commit_cycle`, tried again for as long as the disk is full, until `give_up`. Raises StorageError."""
        while True:
            try:
                return await self.commit_cycle(commit)
            except DiskFullError:
                if self._gives_up:
                    raise
                await asyncio.sleep(FULL_RETRY_S)

    def give_up(self) -> None:
        """From now on a full disk is not waited for: what it does not take is run again by the next life."""
        self._gives_up = True

    def _ride(self, key: str, write: Write, kind: str = "") -> None:
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

    def insert(self, table: str, **values: Any) -> asyncio.Future[None]:
        """Insert one row. Raises ConflictError through the future if a constraint forbids it."""
        return self.write(lambda db: _insert(db, table, values))

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> asyncio.Future[int]:
        """Run one statement; the future has the number of rows it changed."""
        return self.write(lambda db: db.execute(sql, parameters).rowcount)

    def append(self, rows: Iterable[OperationRow]) -> asyncio.Future[None]:
        """Log operations, all or none. Those of an adapter linger: they run meanwhile, and nobody waits for the log."""
        rows = list(rows)
        now = self.service_time()
        self._bytes_since_checkpoint += sum(len(row.body) for row in rows)

        def write(db: Connection) -> None:
            for row in rows:
                is_finished = row.outcome is not None
                _insert(
                    db,
                    "operations",
                    {
                        "target_id": row.target_id,
                        "seq": row.seq,
                        "tenant_id": row.tenant_id,
                        "kind": row.kind,
                        "request_id": row.request_id or None,
                        "body": row.body,
                        "body_hash": row.body_hash,
                        "num_bytes": len(row.body),
                        "chunk_tokens": row.chunk_tokens,
                        "outcome": row.outcome,
                        "is_failed": row.is_failed,
                        "finished_service_s": now if is_finished else None,
                    },
                )
                if is_finished:
                    _count(db, row)

        return self.write(write, "append", can_linger=all(row.kind != "sample" for row in rows))

    def commit_cycle(self, commit: CycleCommit) -> asyncio.Future[frozenset[str]]:
        """Make a cycle's outcomes true: results, checkpoints, snapshots, fair-share counters and metering.

        The future has the adapters of which something ran whose append had failed. Nothing of theirs is stored, for it
        may hold its effect: no outcome, snapshot, checkpoint or sampler.
        """
        now = self.service_time()

        def write(db: Connection) -> frozenset[str]:
            lost = {row.target_id for row in commit.finished if row.is_withdrawn() or not _is_logged(db, row)}
            for row in commit.finished:
                if row.target_id not in lost:
                    _finish(db, row, now)
            for adapter_id, folder in commit.replaced_checkpoints:
                if adapter_id not in lost:
                    db.execute("DELETE FROM checkpoints WHERE folder = ?", (folder,))
            for checkpoint in commit.checkpoints:
                if checkpoint["adapter_id"] not in lost:
                    _insert(db, "checkpoints", checkpoint)
            for sampler in commit.samplers:
                if sampler["adapter_id"] not in lost:
                    _insert(db, "samplers", sampler)
            for snapshot in commit.snapshots:
                if snapshot.adapter_id not in lost:
                    _put_snapshot(db, snapshot)
            for tenant_id, counter in commit.virtual_tokens.items():
                db.execute("UPDATE tenants SET virtual_tokens = ? WHERE tenant_id = ?", (counter, tenant_id))
            if commit.cycle_id:
                db.execute("INSERT INTO cycles VALUES (?, ?)", (commit.cycle_id, commit.summary))
                db.execute("DELETE FROM cycles WHERE cycle_id <= ?", (commit.cycle_id - self.CYCLES_KEPT,))
                db.execute("DELETE FROM plans WHERE cycle_id <= ?", (commit.cycle_id,))
                # Loops of different base models commit out of order; the ids must not run backwards after a restart.
                db.execute("UPDATE meta SET value = MAX(value, ?) WHERE key = 'last_cycle_id'", (commit.cycle_id,))
            return frozenset(lost)

        return self.write(write, "cycle")

    def commit_snapshot(self, snapshot: SnapshotRow) -> asyncio.Future[str | None]:
        """Let a snapshot stand for everything up to its seq, and cut the log there.

        The future has the folder that it replaces, empty if none; None if the adapter was deleted meanwhile, or has a
        later one.
        """

        def write(db: Connection) -> str | None:
            sql = "SELECT 1 FROM adapters WHERE adapter_id = ? AND deleted_at IS NULL"
            is_there = db.execute(sql, (snapshot.adapter_id,)).fetchone() is not None
            old = db.execute(
                "SELECT seq, folder FROM snapshots WHERE adapter_id = ?", (snapshot.adapter_id,)
            ).fetchone()
            if not is_there or (old is not None and old["seq"] >= snapshot.seq):
                return None
            _put_snapshot(db, snapshot)
            return str(old["folder"]) if old is not None else ""

        return self.write(write, "snapshot")

    def note_plan(self, cycle_id: int, placements: dict[str, str]) -> None:
        """Note which adapters a cycle runs where.

        Becomes durable with the next write; its cycle's commit removes it.
        """

        def write(db: Connection) -> None:
            for adapter_id, worker_id in placements.items():
                db.execute("INSERT INTO plans VALUES (?, ?, ?)", (cycle_id, adapter_id, worker_id))

        self._ride(f"plan {cycle_id}", write, "plan")

    def plans(self) -> dict[int, list[str]]:
        """Cycles that were about to run and never committed, with their adapters, as far as was noted in time."""
        found: dict[int, list[str]] = {}
        for row in self.read("SELECT cycle_id, adapter_id FROM plans ORDER BY cycle_id, adapter_id"):
            found.setdefault(row["cycle_id"], []).append(row["adapter_id"])
        return found

    def note_fetched(self, target_id: str, seq: int) -> None:
        """Note that a result has been fetched, if it was not before. Becomes durable with the next write."""
        now = self.service_time()
        sql = (
            "UPDATE operations SET fetched_service_s = ? WHERE target_id = ? AND seq = ? AND fetched_service_s IS NULL"
        )
        self._ride(f"fetched {target_id}:{seq}", lambda db: db.execute(sql, (now, target_id, seq)))

    def drop_results(self, *, fetched_before: float, finished_before: float) -> asyncio.Future[int]:
        """Drop results that were fetched or finished before these moments of service time, where no recovery needs the
        operation any more. The future has their number."""
        return self.execute(
            "DELETE FROM operations WHERE body IS NULL AND (fetched_service_s < ? OR finished_service_s < ?)",
            (fetched_before, finished_before),
        )

    def read_body(self, target_id: str, seq: int) -> bytes:
        """The body of an operation that recovery still needs."""
        row = self.read_one("SELECT body FROM operations WHERE target_id = ? AND seq = ?", (target_id, seq))
        assert row is not None, f"{target_id}:{seq} is not in the log"
        assert row["body"] is not None, f"{target_id}:{seq} has left the log too early"
        return bytes(row["body"])

    def insert_adapter(self, values: dict[str, Any], start: SnapshotRow | None) -> asyncio.Future[None]:
        """A new adapter and, if that is not its seed, what it starts from: both or neither.

        Raises ConflictError through the future if there is one of that id or request id.
        """

        def write(db: Connection) -> None:
            _insert(db, "adapters", values)
            if start is not None:
                _put_snapshot(db, start)

        return self.write(write)

    def delete_adapter(
        self, adapter_id: str, finished: Sequence[OperationRow], wall: float
    ) -> asyncio.Future[str | None]:
        """Delete an adapter's training state, deciding its last operations. `wall` is the time of day.

        The future has its snapshot's folder, now without a row.
        """
        now, deleted_at = self.service_time(), wall

        def write(db: Connection) -> str | None:
            for operation in finished:
                if _is_logged(db, operation):
                    _finish(db, operation, now)
            row = db.execute("SELECT folder FROM snapshots WHERE adapter_id = ?", (adapter_id,)).fetchone()
            db.execute("UPDATE adapters SET deleted_at = ? WHERE adapter_id = ?", (deleted_at, adapter_id))
            db.execute("DELETE FROM snapshots WHERE adapter_id = ?", (adapter_id,))
            db.execute("UPDATE operations SET body = NULL WHERE target_id = ?", (adapter_id,))
            return str(row["folder"]) if row is not None else None

        return self.write(write)

    def raise_epoch(self) -> asyncio.Future[int]:
        """Begin a new life of the coordinator; the future has its number."""

        def write(db: Connection) -> int:
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
            return _meta(db, "epoch")

        return self.write(write)

    def last_cycle_id(self) -> int:
        """The id of the last committed cycle; 0 before the first."""
        return _meta(self._reader, "last_cycle_id")

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


def _insert(db: Connection, table: str, values: dict[str, Any]) -> None:
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))  # noqa: S608 (our names)


def _is_logged(db: Connection, row: OperationRow) -> bool:
    return db.execute("SELECT 1 FROM operations WHERE target_id = ? AND seq = ?", _key(row)).fetchone() is not None


def _finish(db: Connection, row: OperationRow, now: float) -> None:
    """Decide an operation."""
    changed = db.execute(
        "UPDATE operations SET outcome = ?, is_failed = ?, finished_service_s = ?, engine_s = ?"
        " WHERE target_id = ? AND seq = ? AND outcome IS NULL",
        (row.outcome, row.is_failed, now, row.engine_s, row.target_id, row.seq),
    ).rowcount
    assert changed == 1, f"{row.target_id}:{row.seq} was finished before"
    if row.kind == "sample":  # nothing replays a finished sample
        db.execute("UPDATE operations SET body = NULL WHERE target_id = ? AND seq = ?", _key(row))
    _count(db, row)


def _put_snapshot(db: Connection, snapshot: SnapshotRow) -> None:
    """Let it stand for everything up to its seq, and cut the log there."""
    db.execute(
        "INSERT OR REPLACE INTO snapshots (adapter_id, seq, folder, sha256, window_error) VALUES (?, ?, ?, ?, ?)",
        (snapshot.adapter_id, snapshot.seq, snapshot.folder, snapshot.sha256, snapshot.window_error),
    )
    db.execute(
        "UPDATE operations SET body = NULL WHERE target_id = ? AND seq <= ? AND outcome IS NOT NULL",
        (snapshot.adapter_id, snapshot.seq),
    )


def _key(row: OperationRow) -> tuple[str, int]:
    return row.target_id, row.seq


def _count(db: Connection, row: OperationRow) -> None:
    """Metering: charge a finished operation to its tenant."""
    db.execute(
        "INSERT INTO usage VALUES (?, ?, 1, ?, ?) ON CONFLICT (tenant_id, kind) DO UPDATE SET"
        " num_operations = num_operations + 1, num_tokens = num_tokens + excluded.num_tokens,"
        " engine_s = engine_s + excluded.engine_s",
        (row.tenant_id, row.kind, row.num_tokens, row.engine_s),
    )


def _meta(db: Connection, key: str) -> int:
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

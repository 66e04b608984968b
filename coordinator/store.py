"""The durable log: SQLite in WAL mode, one writer, group commit. The only module that knows SQL.

A write is a function on the connection; all writes that wait are committed as one transaction with one fsync, in the
order they were handed in. So what is handed in later never becomes durable earlier: a cycle's commit cannot precede
the append of an operation in it. Readers use a connection of their own and see committed data only.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coordinator.schema import SCHEMA, SCHEMA_VERSION

T = TypeVar("T")
Row = sqlite3.Row
Write = Callable[[sqlite3.Connection], Any]


class StorageError(Exception):
    """The database did not take a write: the disk is full or fails. Nothing of that write is durable."""


class ConflictError(StorageError):
    """A constraint forbids the row: something of that key exists."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A durable snapshot folder that now stands for everything of its adapter up to `seq`."""

    adapter_id: str
    seq: int
    folder: str
    sha256: str


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
    replaced_checkpoints: list[tuple[str, str]] = field(default_factory=list)
    """Adapter and folder of what is overwritten; nothing points there once this is durable. Not stored."""
    replaced_snapshots: dict[str, str] = field(default_factory=dict)
    """Adapter to the folder that nothing points at once its new snapshot is durable; not stored."""
    virtual_tokens: dict[str, float] = field(default_factory=dict)
    """Tenant to counter."""


class Store:
    """The database in a data directory. Open it, await its writes, close it."""

    CYCLES_KEPT = 10_000

    def __init__(self, path: Path, *, wall: Callable[[], float]) -> None:
        """Open or create the database. Raises ValueError if it was written by a newer version."""
        self._wall = wall
        self._path = path
        self._writer = _connect(path)
        try:
            self._migrate()
        except BaseException:
            self._writer.close()
            raise
        self._reader = _connect(path)
        self._reader.execute("PRAGMA query_only = ON")
        self._queue: queue.SimpleQueue[tuple[Write, asyncio.Future[Any], asyncio.AbstractEventLoop] | None] = (
            queue.SimpleQueue()
        )
        self._notes: deque[Write] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._commit_forever, name="store-writer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Commit what waits, then close; what is handed in later is refused."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def write(self, write: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Hand in a write; the future is done when it is durable. A write that raises is undone alone."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._is_closed:
            future.set_exception(StorageError("the database is closed"))
        else:
            self._queue.put((write, future, loop))
        return future

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
        """Log operations, all or none."""
        rows = list(rows)
        now = self._wall()

        def write(db: sqlite3.Connection) -> None:
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
                        "finished_at": now if is_finished else None,
                    },
                )
                if is_finished:
                    _count(db, row)

        return self.write(write)

    def commit_cycle(self, commit: CycleCommit) -> asyncio.Future[frozenset[str]]:
        """Make a cycle's outcomes true: results, checkpoints, snapshots, fair-share counters and metering.

        The future has the adapters of which something ran whose append had failed. Nothing that holds its effect is
        stored: no snapshot, checkpoint or sampler of theirs.
        """
        now = self._wall()

        def write(db: sqlite3.Connection) -> frozenset[str]:
            lost: set[str] = set()
            for row in commit.finished:
                if not _finish(db, row, now):
                    lost.add(row.target_id)
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
                if snapshot.adapter_id in lost:
                    continue
                _put_snapshot(db, snapshot)
                db.execute(
                    "UPDATE operations SET body = NULL WHERE target_id = ? AND seq <= ? AND outcome IS NOT NULL",
                    (snapshot.adapter_id, snapshot.seq),
                )
            for tenant_id, counter in commit.virtual_tokens.items():
                db.execute("UPDATE tenants SET virtual_tokens = ? WHERE tenant_id = ?", (counter, tenant_id))
            if commit.cycle_id:
                db.execute("INSERT INTO cycles VALUES (?, ?)", (commit.cycle_id, commit.summary))
                db.execute("DELETE FROM cycles WHERE cycle_id <= ?", (commit.cycle_id - self.CYCLES_KEPT,))
                db.execute("DELETE FROM plans WHERE cycle_id <= ?", (commit.cycle_id,))
                # Loops of different base models commit out of order; the ids must not run backwards after a restart.
                db.execute("UPDATE meta SET value = MAX(value, ?) WHERE key = 'last_cycle_id'", (commit.cycle_id,))
            return frozenset(lost)

        return self.write(write)

    def note_plan(self, cycle_id: int, placements: dict[str, str]) -> None:
        """Note which adapters a cycle runs where.

        Becomes durable with the next write; its cycle's commit removes it.
        """

        def write(db: sqlite3.Connection) -> None:
            for adapter_id, worker_id in placements.items():
                db.execute("INSERT INTO plans VALUES (?, ?, ?)", (cycle_id, adapter_id, worker_id))

        self._notes.append(write)

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

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "adapters", values)
            if start is not None:
                _put_snapshot(db, start)

        return self.write(write)

    def delete_adapter(self, adapter_id: str, finished: Sequence[OperationRow]) -> asyncio.Future[str | None]:
        """Delete an adapter's training state, deciding its last operations.

        The future has its snapshot's folder, now without a row.
        """
        now = self._wall()

        def write(db: sqlite3.Connection) -> str | None:
            for operation in finished:
                _finish(db, operation, now)
            row = db.execute("SELECT folder FROM snapshots WHERE adapter_id = ?", (adapter_id,)).fetchone()
            db.execute("UPDATE adapters SET deleted_at = ? WHERE adapter_id = ?", (now, adapter_id))
            db.execute("DELETE FROM snapshots WHERE adapter_id = ?", (adapter_id,))
            db.execute("UPDATE operations SET body = NULL WHERE target_id = ?", (adapter_id,))
            return str(row["folder"]) if row is not None else None

        return self.write(write)

    def raise_epoch(self) -> asyncio.Future[int]:
        """Begin a new life of the coordinator; the future has its number."""

        def write(db: sqlite3.Connection) -> int:
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
        if version == SCHEMA_VERSION:
            return
        db.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA.split(";\n"):
            if statement.strip():
                db.execute(statement)
        db.execute("INSERT INTO meta VALUES ('epoch', 0), ('last_cycle_id', 0)")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")

    def _commit_forever(self) -> None:
        while True:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            writes = [entry for entry in batch if entry is not None]
            if writes:
                self._commit(writes)
            if len(writes) < len(batch):
                return

    def _commit(self, writes: list[tuple[Write, asyncio.Future[Any], asyncio.AbstractEventLoop]]) -> None:
        """One transaction for all; a write that fails is rolled back to its savepoint and fails alone."""
        db = self._writer
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            db.execute("BEGIN IMMEDIATE")
            while self._notes:
                self._notes.popleft()(db)
            for write, _, _ in writes:
                db.execute("SAVEPOINT one")
                try:
                    outcomes.append((write(db), None))
                except Exception as error:
                    if not db.in_transaction:
                        raise  # a full disk, for example, has undone everything
                    db.execute("ROLLBACK TO one")
                    outcomes.append((None, error))
                db.execute("RELEASE one")
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if len(writes) > 1 and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                for each in writes:  # whoever needs less room may still find it
                    self._commit([each])
                return
            outcomes = [(None, error)] * len(writes)
        for (_, future, loop), (value, failure) in zip(writes, outcomes, strict=True):
            loop.call_soon_threadsafe(_resolve, future, value, failure)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")  # in WAL mode nothing less syncs at commit
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _resolve(future: asyncio.Future[Any], value: Any, failure: BaseException | None) -> None:
    if future.cancelled():
        return
    if failure is None:
        future.set_result(value)
    elif isinstance(failure, sqlite3.IntegrityError):
        future.set_exception(ConflictError(str(failure)))
    elif isinstance(failure, sqlite3.Error):
        future.set_exception(StorageError(str(failure)))
    else:
        future.set_exception(failure)


def _insert(db: sqlite3.Connection, table: str, values: dict[str, Any]) -> None:
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))  # noqa: S608 (our names)


def _finish(db: sqlite3.Connection, row: OperationRow, now: float) -> bool:
    """Decide an operation. False if its append failed: then it was never acknowledged and need not be finished."""
    changed = db.execute(
        "UPDATE operations SET outcome = ?, is_failed = ?, finished_at = ?, engine_s = ?"
        " WHERE target_id = ? AND seq = ? AND outcome IS NULL",
        (row.outcome, row.is_failed, now, row.engine_s, row.target_id, row.seq),
    ).rowcount
    if changed == 0:
        was_logged = db.execute("SELECT 1 FROM operations WHERE target_id = ? AND seq = ?", _key(row)).fetchone()
        assert not was_logged, f"{row.target_id}:{row.seq} was finished before"
        return False
    if row.kind == "sample":  # nothing replays a finished sample
        db.execute("UPDATE operations SET body = NULL WHERE target_id = ? AND seq = ?", _key(row))
    _count(db, row)
    return True


def _put_snapshot(db: sqlite3.Connection, snapshot: SnapshotRow) -> None:
    db.execute(
        "INSERT OR REPLACE INTO snapshots (adapter_id, seq, folder, sha256) VALUES (?, ?, ?, ?)",
        (snapshot.adapter_id, snapshot.seq, snapshot.folder, snapshot.sha256),
    )


def _key(row: OperationRow) -> tuple[str, int]:
    return row.target_id, row.seq


def _count(db: sqlite3.Connection, row: OperationRow) -> None:
    """Metering: charge a finished operation to its tenant."""
    db.execute(
        "INSERT INTO usage VALUES (?, ?, 1, ?, ?) ON CONFLICT (tenant_id, kind) DO UPDATE SET"
        " num_operations = num_operations + 1, num_tokens = num_tokens + excluded.num_tokens,"
        " engine_s = engine_s + excluded.engine_s",
        (row.tenant_id, row.kind, row.num_tokens, row.engine_s),
    )


def _meta(db: sqlite3.Connection, key: str) -> int:
    return int(db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

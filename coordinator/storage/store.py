"""What is written to the log and read back: operations, cycles, snapshots, in transactions that are true as a whole.

Knows the tables; `database` knows when a transaction is durable. A cycle's commit is handed in behind the appends of
its operations, so it cannot be durable before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.storage.database import Connection, Database, DiskFullError, Row, insert_row, read_meta
from coordinator.storage.schema import UNWRITTEN

FULL_RETRY_S = 1.0
"""How often it is tried whether a full disk has room again."""


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


class Store(Database):
    """The log in a data directory."""

    CYCLES_KEPT = 10_000

    def __init__(self, path: Path, **options: Any) -> None:
        """See `Database`."""
        super().__init__(path, **options)
        self._gives_up = False

    def append(self, rows: Iterable[OperationRow]) -> asyncio.Future[None]:
        """Log operations, all or none. Those of an adapter linger: they run meanwhile, and nobody waits for the log."""
        rows = list(rows)
        now = self.service_time()
        self.expect_bytes(sum(len(row.body) for row in rows))

        def write(db: Connection) -> None:
            for row in rows:
                is_finished = row.outcome is not None
                insert_row(
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
                    insert_row(db, "checkpoints", checkpoint)
            for sampler in commit.samplers:
                if sampler["adapter_id"] not in lost:
                    insert_row(db, "samplers", sampler)
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
        later one. Raises ConflictError through the future while weights saved there have no file.
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

    def commit_sampler_file(self, sampler_id: str, folder: str, sha256: str) -> asyncio.Future[int]:
        """Give an unnamed sampler that was committed without a file its durable folder. The future has how many rows
        have changed: none if there is no such sampler any more."""
        sql = f"UPDATE samplers SET folder = ?, sha256 = ? WHERE sampler_id = ? AND {UNWRITTEN}"  # noqa: S608
        return self.write(lambda db: db.execute(sql, (folder, sha256, sampler_id)).rowcount, "publish")

    def commit_checkpoint_file(
        self, path: str, seq: int, folder: str, sha256: str, size_bytes: int, fingerprint: str
    ) -> asyncio.Future[int]:
        """The same for the checkpoint that the save `seq` has made; its path may be another one's by now.

        `fingerprint`: of the numerics that made these weights, perhaps again.
        """
        sql = (
            "UPDATE checkpoints SET folder = ?, sha256 = ?, size_bytes = ?, fingerprint = ?"
            " WHERE path = ? AND seq = ? AND folder = ''"
        )
        values = (folder, sha256, size_bytes, fingerprint, path, seq)
        return self.write(lambda db: db.execute(sql, values).rowcount, "publish")

    def delete_checkpoint(self, path: str, seq: int) -> asyncio.Future[str]:
        """Delete the checkpoint that the save `seq` has made; the future has its folder, empty if there is none."""

        def write(db: Connection) -> str:
            place = (path, seq)
            row = db.execute("SELECT folder FROM checkpoints WHERE path = ? AND seq = ?", place).fetchone()
            db.execute("DELETE FROM checkpoints WHERE path = ? AND seq = ?", place)
            return str(row["folder"]) if row is not None else ""

        return self.write(write)

    def unwritten_samplers(self) -> list[Row]:
        """The unnamed samplers of live sessions whose weights are in no file: the log can make them again."""
        sql = f"SELECT samplers.* FROM samplers JOIN sessions USING (session_id) WHERE {UNWRITTEN} AND ended_at IS NULL"  # noqa: S608
        return self.read(sql)

    def unwritten_checkpoints(self) -> list[Row]:
        """The checkpoints whose weights are in no file."""
        return self.read("SELECT * FROM checkpoints WHERE folder = ''")

    def note_plan(self, cycle_id: int, placements: dict[str, str]) -> None:
        """Note which adapters a cycle runs where.

        Becomes durable with the next write; its cycle's commit removes it.
        """

        def write(db: Connection) -> None:
            for adapter_id, worker_id in placements.items():
                db.execute("INSERT INTO plans VALUES (?, ?, ?)", (cycle_id, adapter_id, worker_id))

        self.ride(f"plan {cycle_id}", write, "plan")

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
        self.ride(f"fetched {target_id}:{seq}", lambda db: db.execute(sql, (now, target_id, seq)))

    def drop_results(self, *, fetched_before: float, finished_before: float) -> asyncio.Future[int]:
        """Drop results that were fetched or finished before these moments of service time, where no recovery needs the
        operation any more. The future has their number.

        Until the second moment a place or request id that nothing else remembers stays taken, with an empty outcome.
        """

        def write(db: Connection) -> int:
            emptied = db.execute(
                "UPDATE operations SET outcome = x'', fetched_service_s = NULL WHERE body IS NULL"
                " AND fetched_service_s < ? AND (request_id IS NOT NULL OR kind = 'sample')",
                (fetched_before,),
            )
            dropped = db.execute(
                "DELETE FROM operations WHERE body IS NULL AND (fetched_service_s < ? OR finished_service_s < ?)",
                (fetched_before, finished_before),
            )
            return int(emptied.rowcount + dropped.rowcount)

        return self.write(write)

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
            insert_row(db, "adapters", values)
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
            return read_meta(db, "epoch")

        return self.write(write)

    def last_cycle_id(self) -> int:
        """The id of the last committed cycle; 0 before the first."""
        return self.meta("last_cycle_id")

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

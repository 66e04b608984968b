"""Cycles: the notes of planned ones, the rows that a cycle stages, and its commit in one transaction.

Does not depend on how a cycle runs. Main invariant: all effects of a cycle are stored, or none, except those of lost
adapters, which are never stored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.observe.metrics import DATABASE_BYTES
from coordinator.storage.checkpoints import delete_checkpoint, put_snapshot
from coordinator.storage.database import Database
from coordinator.storage.operations import finish, lost_targets
from coordinator.storage.records import put_record
from coordinator.storage.rows import (
    CheckpointRow,
    DecidedOperation,
    FileUse,
    SampleRecord,
    SamplerRow,
    SnapshotRow,
    insert,
)
from coordinator.storage.sqlite import Connection, RetryLaterError
from coordinator.storage.usage import add_file_use

RETRY_S = 1.0
"""Pause before a commit is tried again on a full disk, or in a locked database."""
CYCLES_KEPT = 10_000
"""Summaries of the last cycles that stay in the database."""
_UNCOUNT_FILE = """UPDATE samplers SET file_bytes = 0 WHERE sampler_id = ?
    AND EXISTS (SELECT 1 FROM sessions WHERE sessions.session_id = samplers.session_id AND ended_at IS NOT NULL)"""
"""The end of a session frees the files of its samplers, also those of a save that was running."""


@dataclass(slots=True, kw_only=True)
class StagedStates:
    """The rows of states that a cycle has written or holds. At most one staged checkpoint has a path."""

    checkpoints: list[CheckpointRow] = field(default_factory=list)
    samplers: list[SamplerRow] = field(default_factory=list)
    snapshots: list[SnapshotRow] = field(default_factory=list)
    """Snapshots of loads: a recovery could not run a load again once its checkpoint is deleted."""
    superseded_checkpoints: list[CheckpointRow] = field(default_factory=list)
    """Checkpoints that a later save of the same cycle overwrites: they are never stored."""
    replaced_checkpoints: list[CheckpointRow] = field(default_factory=list)
    """Stored checkpoints that are overwritten: their rows are deleted."""
    deleted_checkpoints: list[CheckpointRow] = field(default_factory=list)
    """Those of them that the commit has deleted, as they were then. The others were deleted meanwhile."""
    replaced_snapshots: list[tuple[str, str]] = field(default_factory=list)
    """Adapter and folder of snapshots that a load replaces: no row names the folders once this is durable."""

    def add_checkpoint(self, row: CheckpointRow, stored: CheckpointRow | None) -> None:
        """Stage a checkpoint; it replaces `stored`, and a checkpoint staged under its path."""
        self.superseded_checkpoints += [each for each in self.checkpoints if each.path == row.path]
        self.checkpoints = [each for each in self.checkpoints if each.path != row.path]
        if stored is not None and all(each.path != row.path for each in self.replaced_checkpoints):
            self.replaced_checkpoints.append(stored)
        self.checkpoints.append(row)

    def has_path(self, path: str) -> bool:
        """Return whether a checkpoint is staged under this path."""
        return any(row.path == path for row in self.checkpoints)

    def drop_samplers(self, versions: Collection[str]) -> None:
        """Remove these unnamed samplers."""
        self.samplers = [row for row in self.samplers if row.version not in versions]

    def add_snapshot(self, row: SnapshotRow, replaced: SnapshotRow | None) -> None:
        """Stage the snapshot of a load."""
        self.snapshots.append(row)
        if replaced is not None:
            self.replaced_snapshots.append((row.adapter_id, replaced.folder))


@dataclass(slots=True, kw_only=True)
class CycleCommit:
    """Everything that one cycle makes durable, in one transaction."""

    cycle_id: int = 0
    """0: no cycle, only decided operations."""
    open_ids: Sequence[int] = ()
    """Cycles that have not ended: the plans of all other ones up to this are deleted."""
    summary: bytes = b""
    finished: list[DecidedOperation] = field(default_factory=list)
    states: StagedStates = field(default_factory=StagedStates)
    virtual_tokens: dict[str, float] = field(default_factory=dict)
    """Fair-share counters by tenant."""
    file_uses: list[FileUse] = field(default_factory=list)
    records: list[SampleRecord] = field(default_factory=list)
    """Of samples in `finished`."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Adapters that ran for the first time, or in another class than before."""


class Cycles:
    """The cycles of all base models."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_stopping = False

    async def persist(self, commit: CycleCommit) -> frozenset[str]:
        """Commit as `commit`; while the disk is full or the database locked, try again until `stop_retrying`.

        Raises StorageError.
        """
        while True:
            try:
                return await self.commit(commit)
            except RetryLaterError:
                if self._is_stopping:
                    raise
                await asyncio.sleep(RETRY_S)

    def stop_retrying(self) -> None:
        """Stop retrying: the next incarnation runs the uncommitted operations again."""
        self._is_stopping = True

    def commit(self, commit: CycleCommit) -> asyncio.Future[frozenset[str]]:
        """Store a cycle's outcomes, checkpoints, samplers, snapshots, fair-share counters and metering.

        The future has the lost adapters (and samplers): those with an operation in `finished` whose append has
        failed. No outcome, snapshot, checkpoint or sampler of theirs is stored, because it may contain the
        effect of that operation. The commit is queued behind the appends, so it is never durable before them.
        """
        DATABASE_BYTES.inc(sum(len(each.outcome) + len(each.history) for each in commit.finished))
        now, day = self._database.service_time(), self._database.day()

        def write(db: Connection) -> frozenset[str]:
            lost = lost_targets(db, commit.finished)
            for operation in commit.finished:
                if operation.target_id not in lost:
                    finish(db, operation, now)
            for use in commit.file_uses:
                if use.adapter_id not in lost:
                    add_file_use(db, use, day)
            _store_states(db, commit.states, lost)
            for record in commit.records:
                if record.target_id not in lost:
                    put_record(db, record, now)
            for adapter_id, fingerprint in commit.fingerprints.items():
                db.execute("UPDATE adapters SET fingerprint = ? WHERE adapter_id = ?", (fingerprint, adapter_id))
            for tenant_id, counter in commit.virtual_tokens.items():
                db.execute("UPDATE tenants SET virtual_tokens = ? WHERE tenant_id = ?", (counter, tenant_id))
            if commit.cycle_id:
                _end_cycle(db, commit.cycle_id, commit.summary, commit.open_ids)
            return lost

        return self._database.write(write, "cycle")

    def note_plan(self, cycle_id: int, placements: Mapping[str, str]) -> None:
        """Note which adapters a cycle runs on which workers.

        Becomes durable with the next write; the commit of the cycle removes it.
        """

        def write(db: Connection) -> None:
            for adapter_id, worker_id in placements.items():
                db.execute("INSERT INTO plans VALUES (?, ?, ?)", (cycle_id, adapter_id, worker_id))

        self._database.ride(f"plan {cycle_id}", write, "plan")

    def plans(self) -> dict[int, list[str]]:
        """Return the noted cycles that never committed, with their adapters. Notes of the last ones may be missing."""
        found: dict[int, list[str]] = {}
        for row in self._database.read("SELECT cycle_id, adapter_id FROM plans ORDER BY cycle_id, adapter_id"):
            found.setdefault(row["cycle_id"], []).append(row["adapter_id"])
        return found

    def summary(self, cycle_id: int) -> bytes:
        """Return a cycle as a serialized v1.Cycle; empty if it is not one of the last `CYCLES_KEPT`."""
        row = self._database.read_one("SELECT summary FROM cycles WHERE cycle_id = ?", (cycle_id,))
        return bytes(row["summary"]) if row is not None else b""

    def last_id(self) -> int:
        """Return the highest id of a committed cycle; 0 before the first."""
        return self._database.meta("last_cycle_id")


def _store_states(db: Connection, states: StagedStates, lost: frozenset[str]) -> None:
    states.deleted_checkpoints.clear()  # of an attempt that was rolled back
    for replaced in states.replaced_checkpoints:
        if replaced.adapter_id not in lost and (deleted := delete_checkpoint(db, replaced.path, replaced.seq)):
            states.deleted_checkpoints.append(deleted)
    for checkpoint in states.checkpoints:
        if checkpoint.adapter_id not in lost:
            insert(db, "checkpoints", checkpoint)
    for sampler in states.samplers:
        if sampler.adapter_id not in lost:
            insert(db, "samplers", sampler)
            db.execute(_UNCOUNT_FILE, (sampler.sampler_id,))
    for snapshot in states.snapshots:
        if snapshot.adapter_id not in lost:
            put_snapshot(db, snapshot)


def _end_cycle(db: Connection, cycle_id: int, summary: bytes, open_ids: Sequence[int]) -> None:
    db.execute("INSERT INTO cycles VALUES (?, ?)", (cycle_id, summary))
    db.execute("DELETE FROM cycles WHERE cycle_id <= ?", (cycle_id - CYCLES_KEPT,))
    db.execute(
        "DELETE FROM plans WHERE cycle_id <= ? AND cycle_id NOT IN (SELECT value FROM json_each(?))",
        (cycle_id, json.dumps(open_ids)),
    )
    # Loops of different base models commit out of order; the ids must not run backwards after a restart.
    db.execute("UPDATE meta SET value = MAX(value, ?) WHERE key = 'last_cycle_id'", (cycle_id,))

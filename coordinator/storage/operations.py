"""The operation log: appended operations, their payloads and outcomes. Each outcome is charged to its tenant.

Does not depend on what an operation means: payloads and outcomes are bytes. Main invariant: a seq of an adapter or
sampler exists at most once, and gets at most one outcome.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from coordinator.base.time import month_of
from coordinator.observe.metrics import DATABASE_BYTES
from coordinator.storage.database import Database
from coordinator.storage.history import put_entry
from coordinator.storage.records import renew_records
from coordinator.storage.rows import (
    DecidedOperation,
    NewOperation,
    OperationRow,
    Table,
    UnfetchedOperation,
    columns,
    insert,
    typed,
)
from coordinator.storage.sqlite import Connection, Row
from coordinator.storage.usage import add_month, add_usage

DROPPED_MAX = 500
"""Results that one transaction drops, so that it takes milliseconds: the writes of cycles wait for it."""
_COUNTER_BITS = 32
"""Low bits of an append id: the counter within an epoch."""
_WITH_OUTCOMES = "operations LEFT JOIN outcomes USING (target_id, seq)"
_IS_COVERED = """NOT EXISTS (SELECT 1 FROM payloads
    WHERE payloads.target_id = operations.target_id AND payloads.seq = operations.seq)"""
"""Condition for operations that no recovery runs again."""


class Operations(Table[OperationRow]):
    """The operations of all adapters and samplers."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, OperationRow, _WITH_OUTCOMES)
        self._epoch = 0
        self._appends = itertools.count(1)

    def begin_epoch(self, epoch: int) -> None:
        """Number the appends of this epoch. Call once, before the first append."""
        self._epoch = epoch

    def new_append_id(self) -> int:
        """Return an id that no other append in this data directory has: the epoch, then a counter."""
        assert self._epoch, "an append id needs an epoch: begin it first"
        return self._epoch << _COUNTER_BITS | next(self._appends)

    def append(self, rows: Iterable[NewOperation]) -> asyncio.Future[None]:
        """Log operations, all or none. Raises ConflictError through the future if a seq or request id exists.

        An adapter's operations run before they are durable, so their append may wait for more writes. Samples are
        started only after their append, so it does not wait.
        """
        rows = list(rows)
        now, day = self._database.service_time(), self._database.day()
        num_bytes = sum(len(row.payload) for row in rows)
        self._database.expect_bytes(num_bytes)
        DATABASE_BYTES.inc(num_bytes)

        def write(db: Connection) -> None:
            for row in rows:
                _append(db, row, now, day)

        return self._database.write(write, "append", can_linger=all(row.kind != "sample" for row in rows))

    def find(self, target_id: str, seq: int) -> OperationRow | None:
        """Return an operation."""
        return self._one("WHERE target_id = ? AND seq = ?", (target_id, seq))

    def owner(self, target_id: str, seq: int) -> str | None:
        """Return the tenant of an operation; None if there is none, or its result was dropped."""
        row = self._database.read_one(
            "SELECT tenant_id FROM operations WHERE target_id = ? AND seq = ? AND outcome_bytes IS NOT 0",
            (target_id, seq),
        )
        return str(row["tenant_id"]) if row is not None else None

    def result_bytes(self, tenant_id: str, target_id: str, seq: int) -> int:
        """Return the size of the result of a tenant's operation; 0 if it has none."""
        row = self._database.read_one(
            "SELECT outcome_bytes FROM operations WHERE target_id = ? AND seq = ? AND tenant_id = ?",
            (target_id, seq, tenant_id),
        )
        return int(row["outcome_bytes"] or 0) if row is not None else 0

    def seq_of_request(self, target_id: str, request_id: str) -> int | None:
        """Return the sequence number that a request id got."""
        row = self._database.read_one(
            "SELECT seq FROM operations WHERE target_id = ? AND request_id = ?", (target_id, request_id)
        )
        return int(row["seq"]) if row is not None else None

    def last_seq(self, target_id: str) -> int:
        """Return the highest sequence number of an adapter or sampler; 0 if it has no operation."""
        row = self._database.read_one("SELECT MAX(seq) AS seq FROM operations WHERE target_id = ?", (target_id,))
        assert row is not None
        return int(row["seq"] or 0)

    def payload(self, target_id: str, seq: int) -> bytes:
        """Return the payload of an operation that recovery still needs."""
        row = self._database.read_one("SELECT payload FROM payloads WHERE target_id = ? AND seq = ?", (target_id, seq))
        assert row is not None, f"{target_id}:{seq} is not in the log, or has left it too early"
        return bytes(row["payload"])

    def since(self, target_id: str, seq: int) -> list[tuple[OperationRow, bytes | None]]:
        """Return the operations above a sequence number, in order, each with its payload if it is still logged."""
        return self._with_payloads("target_id = ? AND seq > ? ORDER BY seq", (target_id, seq))

    def unfinished_samples(self) -> list[tuple[OperationRow, bytes | None]]:
        """Return the sample operations without an outcome, each with its payload."""
        return self._with_payloads("outcome_bytes IS NULL AND kind = 'sample' ORDER BY target_id, seq", ())

    def unfetched(self, target_id: str, first_seq: int, last_seq: int, rows_max: int) -> list[UnfetchedOperation]:
        """Return the first finished operations of a range of sequence numbers that were not fetched, in order."""
        rows = self._database.read(
            "SELECT seq, is_failed, outcome_bytes AS num_bytes FROM operations WHERE target_id = ?"
            " AND seq BETWEEN ? AND ? AND outcome_bytes > 0 AND fetched_service_s IS NULL"
            " ORDER BY seq LIMIT ?",
            (target_id, first_seq, last_seq, rows_max),
        )
        return [typed(UnfetchedOperation, row) for row in rows]

    def note_fetched(self, target_id: str, seq: int) -> None:
        """Note that a result was fetched, if it was not before. Becomes durable with the next write."""
        now = self._database.service_time()
        sql = (
            "UPDATE operations SET fetched_service_s = ? WHERE target_id = ? AND seq = ? AND fetched_service_s IS NULL"
        )
        self._database.ride(f"fetched {target_id}:{seq}", lambda db: db.execute(sql, (now, target_id, seq)))

    async def drop_results(self, *, fetched_before: float, finished_before: float) -> None:
        """Drop results that were fetched or finished before these moments of service time, if no recovery needs the
        operation.

        Until the second moment a seq or request id that no other row records stays taken, with an empty outcome.
        """
        while await self._database.write(lambda db: _drop_slice(db, fetched_before, finished_before)) == DROPPED_MAX:
            pass

    def _with_payloads(self, condition: str, parameters: Sequence[object]) -> list[tuple[OperationRow, bytes | None]]:
        source = f"{_WITH_OUTCOMES} LEFT JOIN payloads USING (target_id, seq)"
        sql = f"SELECT {columns(OperationRow)}, payload FROM {source} WHERE {condition}"  # noqa: S608 (our names)
        rows: list[Row] = self._database.read(sql, parameters)
        return [(typed(OperationRow, row), row["payload"]) for row in rows]


def _drop_slice(db: Connection, fetched_before: float, finished_before: float) -> int:
    """Drop at most `DROPPED_MAX` results; return how many rows were changed. See `Operations.drop_results`."""
    found = db.execute(
        f"SELECT target_id, seq FROM operations WHERE fetched_service_s < ? AND {_IS_COVERED}"  # noqa: S608 (our names)
        " AND (request_id IS NOT NULL OR kind = 'sample') LIMIT ?",
        (fetched_before, DROPPED_MAX),
    )
    emptied = [tuple(row) for row in found]
    for key in emptied:
        db.execute("DELETE FROM outcomes WHERE target_id = ? AND seq = ?", key)
        db.execute(
            "UPDATE operations SET outcome_bytes = 0, fetched_service_s = NULL WHERE target_id = ? AND seq = ?", key
        )
    if len(emptied) == DROPPED_MAX:  # the rows to delete are what is left of the fetched ones afterwards
        return DROPPED_MAX
    deleted = db.execute(
        "DELETE FROM operations WHERE (target_id, seq) IN (SELECT target_id, seq FROM operations"  # noqa: S608
        f" WHERE (fetched_service_s < ? OR finished_service_s < ?) AND {_IS_COVERED} LIMIT ?)",
        (fetched_before, finished_before, DROPPED_MAX - len(emptied)),
    ).rowcount
    return int(len(emptied) + deleted)


def lost_targets(db: Connection, decided: Iterable[DecidedOperation]) -> frozenset[str]:
    """Return the adapters and samplers with an operation here whose append is not in the log.

    Run inside the transaction that stores the outcomes: an append may fail until then, and its seq may belong to
    another operation afterwards.
    """
    return frozenset(o.target_id for o in decided if not _is_logged(db, o.target_id, o.seq, o.append_id))


def finish_logged(db: Connection, decided: Iterable[DecidedOperation], now: float) -> None:
    """Store the outcomes of those operations whose appends are in the log."""
    for operation in decided:
        if _is_logged(db, operation.target_id, operation.seq, operation.append_id):
            finish(db, operation, now)


def finish(db: Connection, operation: DecidedOperation, now: float) -> None:
    """Store the outcome of a logged operation and charge it to its tenant. An operation is decided at most once.

    `now`: service time.
    """
    key = (operation.target_id, operation.seq, operation.append_id)
    changed = db.execute(
        "UPDATE operations SET outcome_bytes = ?, is_failed = ?, finished_service_s = ?, engine_s = ?"
        " WHERE target_id = ? AND seq = ? AND append_id = ? AND outcome_bytes IS NULL",
        (len(operation.outcome), operation.is_failed, now, operation.engine_s, *key),
    ).rowcount
    assert changed == 1, f"{operation.target_id}:{operation.seq} was finished before"
    _put_outcome(db, operation.target_id, operation.seq, operation.outcome)
    if operation.kind == "sample":  # no replay runs a finished sample
        db.execute("DELETE FROM payloads WHERE target_id = ? AND seq = ?", key[:2])
    add_usage(
        db,
        operation.tenant_id,
        operation.target_id,
        operation.kind,
        operation.day,
        num_tokens=operation.num_tokens,
        engine_s=operation.engine_s,
    )
    if operation.history:
        put_entry(db, operation.tenant_id, operation.target_id, operation.seq, operation.history, now)
    if operation.num_tokens:
        add_month(db, operation.tenant_id, month_of(operation.day), operation.num_tokens)


def drop_payloads(db: Connection, adapter_id: str) -> None:
    """Drop all payloads of an adapter that is deleted."""
    db.execute("DELETE FROM payloads WHERE target_id = ?", (adapter_id,))


def drop_covered_payloads(db: Connection, adapter_id: str, seq: int) -> None:
    """Drop the payloads of decided operations up to `seq`: a snapshot replaces them in a recovery."""
    db.execute(
        "DELETE FROM payloads WHERE target_id = ? AND seq <= ? AND EXISTS (SELECT 1 FROM operations"
        " WHERE target_id = payloads.target_id AND seq = payloads.seq AND outcome_bytes IS NOT NULL)",
        (adapter_id, seq),
    )


def _append(db: Connection, row: NewOperation, now: float, day: int) -> None:
    insert(
        db,
        "operations",
        row,
        without=("payload", "outcome", "records"),
        num_bytes=len(row.payload),
        outcome_bytes=len(row.outcome) if row.outcome is not None else None,
        finished_service_s=now if row.outcome is not None else None,
    )
    db.execute("INSERT INTO payloads VALUES (?, ?, ?)", (row.target_id, row.seq, row.payload))
    if row.records:
        renew_records(db, row.records, now)
    if row.outcome is not None:
        _put_outcome(db, row.target_id, row.seq, row.outcome)
        add_usage(db, row.tenant_id, row.target_id, row.kind, day, num_tokens=0, engine_s=0.0)


def _put_outcome(db: Connection, target_id: str, seq: int, outcome: bytes) -> None:
    db.execute("INSERT INTO outcomes VALUES (?, ?, ?)", (target_id, seq, outcome))


def _is_logged(db: Connection, target_id: str, seq: int, append_id: int) -> bool:
    found = db.execute(
        "SELECT 1 FROM operations WHERE target_id = ? AND seq = ? AND append_id = ?", (target_id, seq, append_id)
    )
    return found.fetchone() is not None

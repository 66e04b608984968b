"""Records of sampled sequences, for passes whose loss compares trainer and sampler: see `payloads.provenance`.

A record is stored with the outcome of its sample, in one transaction, and outlives it. Each use renews it, in the
transaction that logs the use. Does not depend on what a record means. Main invariants: a session that has ended gets no
record; a dropped record is gone with all its sequences.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from coordinator.storage.database import Database
from coordinator.storage.rows import SampleRecord, SequenceRecord, SequenceRow, Table, insert
from coordinator.storage.sqlite import Connection

DROPPED_MAX = 500
"""Records that one transaction drops: the writes of cycles wait for it."""
_SEQUENCES = "sequence_records JOIN sample_records USING (target_id, seq)"


class Records(Table[SequenceRow]):
    """The records of all sessions."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SequenceRow, _SEQUENCES)

    def find(self, tenant_id: str, target_id: str, seq: int, index: int) -> SequenceRow | None:
        """Return a tenant's sequence of a live session; None if there is none, or it has expired."""
        return self._one(
            "JOIN sessions USING (session_id) WHERE target_id = ? AND seq = ? AND sequence_index = ?"
            " AND sample_records.tenant_id = ? AND ended_at IS NULL",
            (target_id, seq, index, tenant_id),
        )

    async def drop_session(self, session_id: str) -> None:
        """Drop the records of a session that has ended."""
        await self._drop("session_id = ?", session_id)

    async def drop_unused(self, before: float) -> None:
        """Drop the records last used before this moment of service time."""
        await self._drop("used_service_s < ?", before)

    async def _drop(self, condition: str, value: object) -> None:
        found = f"FROM sample_records WHERE {condition}"
        deletion = (
            "DELETE FROM sample_records WHERE (target_id, seq) IN"  # noqa: S608 (our names)
            f" (SELECT target_id, seq {found} LIMIT ?)"
        )

        def write(db: Connection) -> None:
            db.execute(deletion, (value, DROPPED_MAX))

        while self._database.read_one(f"SELECT 1 {found}", (value,)) is not None:
            await self._database.write(write, is_deletion=True)


def put_record(db: Connection, record: SampleRecord, now: float) -> None:
    """Store the record of a sample, unless its session has ended. `now`: service time."""
    live = db.execute(
        "SELECT 1 FROM sessions WHERE session_id = ? AND ended_at IS NULL", (record.session_id,)
    ).fetchone()
    if live is None:
        return
    insert(db, "sample_records", record, without=("sequences",), used_service_s=now)
    for index, sequence in enumerate(record.sequences):
        _put_sequence(db, record, index, sequence)


def renew_records(db: Connection, keys: Iterable[tuple[str, int]], now: float) -> None:
    """Let the time of these records (sampler, seq of the sample) begin again; those that are gone stay gone."""
    for key in keys:
        db.execute("UPDATE sample_records SET used_service_s = ? WHERE target_id = ? AND seq = ?", (now, *key))


def _put_sequence(db: Connection, record: SampleRecord, index: int, sequence: SequenceRecord) -> None:
    values: Collection[object] = (record.target_id, record.seq, index, sequence.tokens, sequence.logprobs)
    db.execute("INSERT INTO sequence_records VALUES (?, ?, ?, ?, ?)", tuple(values))

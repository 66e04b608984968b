"""The history: an entry for each finished operation, written with its outcome, and for metrics that users report.

Does not depend on what an entry says: it is a serialized v1.HistoryEntry. Main invariant: a tenant loses entries by its
own number of them and by their age only, whatever others do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.storage.database import Database
from coordinator.storage.rows import EXAMINED_MAX, HistoryRow, Table, insert
from coordinator.storage.sqlite import Connection

DROPPED_MAX = 500
"""Entries that one transaction drops: the writes of cycles wait for it."""
REPEATS_MAX = 64
"""The last reports of a target that a new one may repeat: a client has fewer at a time without a reply."""


class History(Table[HistoryRow]):
    """The entries of all tenants."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, HistoryRow, "history")

    def of_operation(self, tenant_id: str, target_id: str, seq: int) -> HistoryRow | None:
        """Return the entry of a tenant's operation; None if there is none any more."""
        return self._one("WHERE target_id = ? AND seq = ? AND tenant_id = ?", (target_id, seq, tenant_id))

    def page(self, tenant_id: str, target_id: str, after_id: int, rows_max: int) -> list[HistoryRow]:
        """Return a tenant's entries of an adapter or sampler behind this id, oldest first."""
        condition = "WHERE target_id = ? AND tenant_id = ? AND entry_id > ? ORDER BY entry_id LIMIT ?"
        return self._all(condition, (target_id, tenant_id, after_id, rows_max))

    def of_session(self, tenant_id: str, session_id: str, after_id: int) -> tuple[list[HistoryRow], int]:
        """Examine the tenant's next entries behind an id; return those of the session, oldest first.

        Also returns the id of the last entry that was examined; 0: there was none.
        """
        examined = "(SELECT entry_id FROM history WHERE tenant_id = ? AND entry_id > ? ORDER BY entry_id LIMIT ?)"
        last = self._database.read_one(
            f"SELECT MAX(entry_id) AS entry_id FROM {examined}",  # noqa: S608 (our names)
            (tenant_id, after_id, EXAMINED_MAX),
        )
        if last is None or last["entry_id"] is None:
            return [], 0
        condition = "WHERE tenant_id = ? AND entry_id BETWEEN ? AND ? AND target_id BETWEEN ? AND ? ORDER BY entry_id"
        of_target = (f"{session_id}:", f"{session_id};")  # the ids of its adapters and samplers
        rows = self._all(condition, (tenant_id, after_id + 1, last["entry_id"], *of_target))
        return rows, int(last["entry_id"])

    def report(
        self, tenant_id: str, target_id: str, entry: bytes, is_repeat: Callable[[bytes], bool]
    ) -> asyncio.Future[None]:
        """Add an entry that belongs to no operation, unless it repeats one of the target's last such entries."""
        now = self._database.service_time()
        last = (
            "SELECT entry FROM history WHERE target_id = ? AND seq = 0 AND tenant_id = ? ORDER BY entry_id DESC LIMIT ?"
        )

        def write(db: Connection) -> None:
            rows = db.execute(last, (target_id, tenant_id, REPEATS_MAX)).fetchall()
            if not any(is_repeat(row["entry"]) for row in rows):
                put_entry(db, tenant_id, target_id, 0, entry, now)

        return self._database.write(write)

    async def drop(self, before: float, rows_max: int) -> None:
        """Drop the entries from before this moment of service time, and each tenant's oldest beyond `rows_max`."""
        oldest = "(SELECT * FROM history ORDER BY entry_id LIMIT ?)"  # entries are in the order of their age
        sql = f"DELETE FROM history WHERE entry_id IN (SELECT entry_id FROM {oldest} WHERE at_service_s < ?)"  # noqa: S608
        while (first := self._one("ORDER BY entry_id LIMIT 1")) is not None and first.at_service_s < before:
            await self._database.execute(sql, (DROPPED_MAX, before), is_deletion=True)
        sql = "SELECT tenant_id, history_rows FROM tenants WHERE history_rows > ?"
        for row in self._database.read(sql, (rows_max,)):
            num_left = row["history_rows"] - rows_max
            while num_left > 0:
                num = min(num_left, DROPPED_MAX)
                of_tenant = "SELECT entry_id FROM history WHERE tenant_id = ? ORDER BY entry_id LIMIT ?"
                sql = f"DELETE FROM history WHERE entry_id IN ({of_tenant})"  # noqa: S608
                await self._database.execute(sql, (row["tenant_id"], num), is_deletion=True)
                num_left -= num


def put_entry(db: Connection, tenant_id: str, target_id: str, seq: int, entry: bytes, now: float) -> None:
    """Add an entry. `seq`: of its operation; 0: it has none. `now`: service time."""
    row = HistoryRow(tenant_id=tenant_id, target_id=target_id, seq=seq, at_service_s=now, entry=entry)
    insert(db, "history", row, without=("entry_id",))

"""The adapters and their specs. Rows stay after a deletion, until nothing needs them."""

from __future__ import annotations

import asyncio
import bisect
import json
from collections.abc import Mapping, Sequence

from coordinator.storage.checkpoints import put_snapshot
from coordinator.storage.database import Database
from coordinator.storage.operations import drop_payloads, finish_logged
from coordinator.storage.rows import (
    AdapterRow,
    DecidedOperation,
    FileUse,
    Leftovers,
    Listing,
    Place,
    SnapshotRow,
    SortKey,
    Table,
    adapter_reference,
    insert,
    marks,
)
from coordinator.storage.sqlite import Connection
from coordinator.storage.usage import add_file_use

NEEDLESS_ADAPTER = """deleted_service_s < :before
    AND NOT EXISTS (SELECT 1 FROM operations WHERE target_id = adapter_id)
    AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.adapter_id = adapters.adapter_id)
    AND NOT EXISTS (
        SELECT 1 FROM samplers WHERE samplers.adapter_id = adapters.adapter_id AND samplers.adapter_id != '')"""
"""Condition for adapters that were deleted long ago, whose results are past their keep time, and that no checkpoint or
sampler needs: these read its spec."""


class Adapters(Table[AdapterRow]):
    """The adapters of all tenants, also deleted ones."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, AdapterRow, "adapters")
        self.leftovers = Leftovers(database, "adapters", "adapter_id", NEEDLESS_ADAPTER, _note_gone)

    def insert(self, row: AdapterRow, start: SnapshotRow | None, use: FileUse | None = None) -> asyncio.Future[None]:
        """Insert an adapter together with the snapshot that it starts from; None: it starts from its seed.

        `use`: what making that snapshot took.

        Raises ConflictError through the future if its id or request id exists.
        """

        day = self._database.day()

        def write(db: Connection) -> None:
            insert(db, "adapters", row)
            if start is not None:
                put_snapshot(db, start)
            if use is not None:
                add_file_use(db, use, day)

        return self._database.write(write)

    def delete(self, adapter_id: str, finished: Sequence[DecidedOperation], wall: float) -> asyncio.Future[str | None]:
        """Delete an adapter's training state and commit the outcomes of its last operations. `wall`: the time of day.

        The future has the folder of its snapshot, which no row names from then on; None if it had none.
        """
        now = self._database.service_time()

        def write(db: Connection) -> str | None:
            finish_logged(db, finished, now)
            row = db.execute("SELECT folder FROM snapshots WHERE adapter_id = ?", (adapter_id,)).fetchone()
            db.execute(
                "UPDATE adapters SET deleted_at = ?, deleted_service_s = ? WHERE adapter_id = ?",
                (wall, now, adapter_id),
            )
            db.execute("DELETE FROM snapshots WHERE adapter_id = ?", (adapter_id,))
            drop_payloads(db, adapter_id)
            return str(row["folder"]) if row is not None else None

        return self._database.write(write, is_deletion=True)

    def rename(self, adapter_id: str, name: str) -> asyncio.Future[int]:
        """Give an adapter another name; empty: none. The future has the number of changed rows."""
        return self._database.execute("UPDATE adapters SET name = ? WHERE adapter_id = ?", (name, adapter_id))

    def note_use(self, adapter_id: str, wall: float) -> None:
        """Store when an adapter was used. Becomes durable with the next write: that of the operation."""
        sql = "UPDATE adapters SET used_at = ? WHERE adapter_id = ?"
        self._database.ride(f"use of {adapter_id}", lambda db: db.execute(sql, (wall, adapter_id)))

    def get(self, adapter_id: str) -> AdapterRow | None:
        """Return an adapter, also a deleted one."""
        return self._one("WHERE adapter_id = ?", (adapter_id,))

    def of_tenant(self, tenant_id: str, adapter_id: str) -> AdapterRow | None:
        """Return an adapter of this tenant, also a deleted one."""
        return self._one("WHERE adapter_id = ? AND tenant_id = ?", (adapter_id, tenant_id))

    def of_request(self, session_id: str, request_id: str) -> AdapterRow | None:
        """Return the adapter that a request id created."""
        return self._one("WHERE session_id = ? AND request_id = ?", (session_id, request_id))

    def not_deleted(self) -> list[AdapterRow]:
        """Return the adapters that are not deleted, oldest first."""
        return self._all("WHERE deleted_at IS NULL ORDER BY created_at, adapter_id")

    def listing(
        self, tenant_id: str, limit: int, place: Place, *, name_prefix: str = "", reference: str = ""
    ) -> Listing[AdapterRow]:
        """Return a part of a tenant's adapters that are not deleted, newest first.

        `name_prefix`: only those whose name begins with it; `reference`: only those that have exactly this name, or an
        id that `adapter_reference` finds. Both are found in an index.
        """
        rest, parameters = _condition(tenant_id, name_prefix, reference)
        return self._listing("adapter_id", rest, parameters, limit, place)

    def sort_keys(self, tenant_id: str, *, name_prefix: str = "", reference: str = "") -> list[SortKey]:
        """Return all adapters that `listing` has, in its order."""
        return self._sort_keys("adapter_id", *_condition(tenant_id, name_prefix, reference))

    def with_labels(self, adapters: Sequence[SortKey], labels: Mapping[str, str]) -> tuple[list[SortKey], int]:
        """Return those of some adapters that have all these labels, and the bytes of metadata that were read."""
        adapter_ids = [adapter_id for _, adapter_id in adapters]
        sql = f"SELECT adapter_id, user_metadata FROM adapters WHERE adapter_id IN ({marks(adapter_ids)})"  # noqa: S608
        texts = {row["adapter_id"]: row["user_metadata"] for row in self._database.read(sql, adapter_ids)}
        having = {each for each, text in texts.items() if labels.items() <= json.loads(text).items()}
        return [each for each in adapters if each[1] in having], sum(map(len, texts.values()))

    def listing_of(self, tenant_id: str, adapters: Sequence[SortKey], limit: int, place: Place) -> Listing[AdapterRow]:
        """Return a part of some of a tenant's adapters, which are in the order of `listing`."""
        read = self._reader("adapter_id", *_condition(tenant_id))
        start = place.skip
        if place.after is not None:
            start += bisect.bisect_right(adapters, _newest_first(place.after), key=_newest_first)
        return Listing(list(adapters[start : start + limit]), len(adapters) > start + limit, len(adapters), read)

    def ids_of_session(self, session_id: str, *, with_deleted: bool = False) -> list[str]:
        """Return the ids of a session's adapters, oldest first."""
        rows = self._database.read(
            "SELECT adapter_id FROM adapters WHERE session_id = ? AND (? OR deleted_at IS NULL) ORDER BY created_at",
            (session_id, with_deleted),
        )
        return [row["adapter_id"] for row in rows]


def _newest_first(adapter: SortKey) -> SortKey:
    created_at, adapter_id = adapter
    return -created_at, adapter_id


def _condition(tenant_id: str, name_prefix: str = "", reference: str = "") -> tuple[str, list[str | int]]:
    """Return the condition of the rows of a listing, with its parameters."""
    rest = "WHERE tenant_id = ? AND deleted_at IS NULL"
    parameters: list[str | int] = [tenant_id]
    if name_prefix:
        rest += " AND substr(name, 1, ?) = ?"
        parameters += [len(name_prefix), name_prefix]
    if reference:
        condition, values = adapter_reference(reference)
        rest += f" AND (name = ? OR {condition})"
        parameters += [reference, *values]
    return rest, parameters


def _note_gone(db: Connection, adapter_id: str) -> None:
    """Note in its session that an adapter of this number existed, so that the number is never given again."""
    number = int(adapter_id.rpartition(":")[2])
    db.execute(
        "UPDATE sessions SET adapters_gone = MAX(adapters_gone, ?) WHERE session_id ="
        " (SELECT session_id FROM adapters WHERE adapter_id = ?)",
        (number + 1, adapter_id),
    )

"""Stored states: users' checkpoints, samplers, and the snapshots that recovery starts from.

A row names a folder of `folders`. Weights for sampling are committed before their folder is durable; until then their
rows have no folder, and the log must be able to rematerialize them (trigger `snapshots_keep_the_log` of `schema`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from coordinator.storage.database import Database
from coordinator.storage.operations import drop_covered_payloads
from coordinator.storage.rows import (
    CheckpointRow,
    Leftovers,
    Listing,
    Place,
    SamplerRow,
    SnapshotRow,
    Table,
    adapter_reference,
    columns,
    insert,
    marks,
    typed,
)
from coordinator.storage.schema import UNWRITTEN
from coordinator.storage.sqlite import Connection
from tinkerpool.names import SCHEME


class Checkpoints(Table[CheckpointRow]):
    """The checkpoints of all tenants."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, CheckpointRow, "checkpoints")

    def by_path(self, path: str) -> CheckpointRow | None:
        """Return the checkpoint that has a path now."""
        return self._one("WHERE path = ?", (path,))

    def of_save(self, path: str, seq: int) -> CheckpointRow | None:
        """Return the checkpoint of the save `seq`; None if it was deleted or overwritten."""
        return self._one("WHERE path = ? AND seq = ?", (path, seq))

    def readable(self, tenant_id: str, path: str, *, is_public_enough: bool) -> CheckpointRow | None:
        """Return a checkpoint of this tenant; also a public one of another tenant if that is enough."""
        condition = "WHERE path = ? AND (tenant_id = ? OR (? AND is_public))"
        return self._one(condition, (path, tenant_id, is_public_enough))

    def listing(
        self, tenant_id: str, kinds: Sequence[str], adapter_id: str, limit: int, place: Place, *, reference: str = ""
    ) -> Listing[CheckpointRow]:
        """Return a part of a tenant's checkpoints of some kinds, newest first. `adapter_id`: empty for any adapter.

        `reference`: only those of adapters that its first part means, as in a listing of adapters but also of deleted
        ones, whose path goes on with the rest of it, and ends with it if it has a checkpoint's name.
        """
        condition = f"WHERE tenant_id = ? AND kind IN ({marks(kinds)})"
        parameters: list[str | int] = [tenant_id, *kinds]
        if adapter_id:
            condition += " AND adapter_id = ?"
            parameters.append(adapter_id)
        if reference:
            adapter, slash, rest = reference.partition("/")
            rest = slash + rest
            # With a name it is the whole rest: one more character would be that of another checkpoint's name.
            num_compared = len(rest) + bool(rest[1:].partition("/")[2])
            of_id, values = adapter_reference(adapter)
            of_name = "adapter_id IN (SELECT adapter_id FROM adapters WHERE tenant_id = ? AND name = ? AND name != '')"
            condition += f" AND substr(path, ? + length(adapter_id), ?) = ? AND ({of_id} OR {of_name})"
            parameters += [len(SCHEME) + 1, num_compared, rest, *values, tenant_id, adapter]
        return self._listing("path", condition, parameters, limit, place)

    def newest(self, tenant_id: str, adapter_ids: Sequence[str], kinds: Sequence[str]) -> list[CheckpointRow]:
        """Return the newest checkpoint of each of these kinds of each of these adapters of a tenant: of the last save.

        Older ones, which may have much metadata, are not read.
        """
        newest = (
            "SELECT path FROM checkpoints AS older WHERE older.adapter_id = a.value AND older.kind = k.value"
            " AND older.tenant_id = ? ORDER BY older.seq DESC LIMIT 1"
        )
        condition = f"WHERE path IN (SELECT ({newest}) FROM json_each(?) AS a, json_each(?) AS k)"  # noqa: S608
        return self._all(condition, (tenant_id, json.dumps(list(adapter_ids)), json.dumps(list(kinds))))

    def of_tenant(self, tenant_id: str) -> list[CheckpointRow]:
        """Return all checkpoints of a tenant."""
        return self._all("WHERE tenant_id = ?", (tenant_id,))

    def expired(self) -> list[CheckpointRow]:
        """Return the checkpoints whose time to live has passed, in service time."""
        return self._all("WHERE expires_service_s <= ?", (self._database.service_time(),))

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return the number and the bytes of each tenant's checkpoints."""
        sql = "SELECT tenant_id, COUNT(*), SUM(size_bytes) FROM checkpoints GROUP BY tenant_id"
        return {row[0]: (int(row[1]), int(row[2])) for row in self._database.read(sql)}

    def unwritten(self) -> list[CheckpointRow]:
        """Return the checkpoints without a folder."""
        return self._all("WHERE folder = ''")

    def folders(self) -> set[str]:
        """Return the folders that rows name."""
        return {row["folder"] for row in self._database.read("SELECT folder FROM checkpoints")}

    def set_expiry(self, path: str, expires_at: float | None, expires_service_s: float | None) -> asyncio.Future[int]:
        """Set when a checkpoint is deleted; None: never."""
        return self._database.execute(
            "UPDATE checkpoints SET expires_at = ?, expires_service_s = ? WHERE path = ?",
            (expires_at, expires_service_s, path),
        )

    def set_public(self, path: str, *, is_public: bool) -> asyncio.Future[int]:
        """Set whether every tenant may read a checkpoint."""
        return self._database.execute("UPDATE checkpoints SET is_public = ? WHERE path = ?", (is_public, path))

    def commit_file(
        self, path: str, seq: int, folder: str, sha256: str, size_bytes: int, fingerprint: str
    ) -> asyncio.Future[CheckpointRow | None]:
        """Give the checkpoint of the save `seq` its durable folder, if it has none; another save may have its path.

        `fingerprint`: of the numerics that computed these weights, which may have been a replay. The future has the
        row as it was; None if there is none.
        """
        condition = "WHERE path = ? AND seq = ? AND folder = ''"
        sql = f"UPDATE checkpoints SET folder = ?, sha256 = ?, size_bytes = ?, fingerprint = ? {condition}"  # noqa: S608

        def write(db: Connection) -> CheckpointRow | None:
            row = db.execute(f"SELECT {columns(CheckpointRow)} FROM checkpoints {condition}", (path, seq)).fetchone()  # noqa: S608
            db.execute(sql, (folder, sha256, size_bytes, fingerprint, path, seq))
            return typed(CheckpointRow, row) if row is not None else None

        return self._database.write(write, "publish")

    def delete(self, path: str, seq: int, *, is_expiry: bool = False) -> asyncio.Future[CheckpointRow | None]:
        """Delete the checkpoint of the save `seq`. The future has its row as it was; None if it is missing.

        `is_expiry`: only if its time to live has passed in this transaction; its owner may have changed it meanwhile.
        """
        expired_by = self._database.service_time() if is_expiry else None
        return self._database.write(lambda db: delete_checkpoint(db, path, seq, expired_by), is_deletion=True)


def delete_checkpoint(db: Connection, path: str, seq: int, expired_by: float | None = None) -> CheckpointRow | None:
    """Delete the checkpoint of the save `seq`, in a transaction; return its row as it was, None if it is missing.

    `expired_by`: only if its time to live has passed at this service time; None: in any case.
    """
    condition = "FROM checkpoints WHERE path = ? AND seq = ? AND (? IS NULL OR expires_service_s <= ?)"
    parameters = (path, seq, expired_by, expired_by)
    row = db.execute(f"SELECT {columns(CheckpointRow)} {condition}", parameters).fetchone()
    db.execute(f"DELETE {condition}", parameters)
    return typed(CheckpointRow, row) if row is not None else None


NEEDLESS_SAMPLER = """EXISTS (
        SELECT 1 FROM sessions WHERE sessions.session_id = samplers.session_id AND ended_service_s < :before)
    AND NOT EXISTS (SELECT 1 FROM operations WHERE target_id = sampler_id)"""
"""Condition for samplers whose session ended long ago, and whose results are past their keep time."""


class Samplers(Table[SamplerRow]):
    """The samplers of all sessions. Rows of ended sessions stay for a while, without folders."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SamplerRow, "samplers")
        self.leftovers = Leftovers(database, "samplers", "sampler_id", NEEDLESS_SAMPLER, lambda db, key: None)

    def insert(self, row: SamplerRow) -> asyncio.Future[None]:
        """Insert a sampler. Raises ConflictError through the future if its id or request id exists."""
        return self._database.write(lambda db: insert(db, "samplers", row))

    def get(self, sampler_id: str) -> SamplerRow | None:
        """Return a sampler."""
        return self._one("WHERE sampler_id = ?", (sampler_id,))

    def of_tenant(self, tenant_id: str, sampler_id: str) -> SamplerRow | None:
        """Return a sampler of this tenant."""
        return self._one("WHERE sampler_id = ? AND tenant_id = ?", (sampler_id, tenant_id))

    def of_request(self, session_id: str, request_id: str) -> SamplerRow | None:
        """Return the sampler that a request id created."""
        return self._one("WHERE session_id = ? AND request_id = ?", (session_id, request_id))

    def ids_of_session(self, session_id: str) -> list[str]:
        """Return the ids of a session's samplers, oldest first."""
        sql = "SELECT sampler_id FROM samplers WHERE session_id = ? ORDER BY created_at"
        return [row["sampler_id"] for row in self._database.read(sql, (session_id,))]

    def folders_of_session(self, session_id: str) -> list[str]:
        """Return the folders of a session's unnamed samplers."""
        sql = "SELECT folder FROM samplers WHERE session_id = ? AND folder != ''"
        return [row["folder"] for row in self._database.read(sql, (session_id,))]

    def newest_inflight(self, adapter_id: str) -> SamplerRow | None:
        """Return the newest of an adapter's samplers that follow its training."""
        return self._one("WHERE adapter_id = ? AND is_inflight ORDER BY rowid DESC LIMIT 1", (adapter_id,))

    def unwritten(self) -> list[SamplerRow]:
        """Return the unnamed samplers of live sessions without a folder."""
        condition = f"WHERE {UNWRITTEN} AND session_id IN (SELECT session_id FROM sessions WHERE ended_at IS NULL)"  # noqa: S608
        return self._all(condition)

    def folders(self) -> set[str]:
        """Return the folders that samplers of live sessions name."""
        rows = self._database.read(
            "SELECT folder FROM samplers JOIN sessions USING (session_id) WHERE ended_at IS NULL"
        )
        return {row["folder"] for row in rows}

    def commit_file(self, sampler_id: str, folder: str, sha256: str) -> asyncio.Future[int]:
        """Give an unnamed sampler its durable folder, if it has none. The future has the number of changed rows."""
        sql = f"UPDATE samplers SET folder = ?, sha256 = ? WHERE sampler_id = ? AND {UNWRITTEN}"  # noqa: S608
        return self._database.write(lambda db: db.execute(sql, (folder, sha256, sampler_id)).rowcount, "publish")


class Snapshots(Table[SnapshotRow]):
    """The newest snapshot of each adapter."""

    def __init__(self, database: Database) -> None:
        super().__init__(database, SnapshotRow, "snapshots")

    def get(self, adapter_id: str) -> SnapshotRow | None:
        """Return an adapter's snapshot; None if it starts from its seed."""
        return self._one("WHERE adapter_id = ?", (adapter_id,))

    def all(self) -> list[SnapshotRow]:
        """Return every snapshot."""
        return self._all("")

    def folders(self) -> set[str]:
        """Return the folders that rows name."""
        return {row.folder for row in self.all()}

    def commit(self, snapshot: SnapshotRow) -> asyncio.Future[str | None]:
        """Replace an adapter's snapshot and drop the payloads that the new one covers.

        The future has the folder of the replaced snapshot, empty if there was none; None if nothing was stored, because
        the adapter was deleted or has a later snapshot. Raises ConflictError through the future while weights that were
        saved up to `snapshot.seq` have no folder.
        """

        def write(db: Connection) -> str | None:
            sql = "SELECT 1 FROM adapters WHERE adapter_id = ? AND deleted_at IS NULL"
            exists = db.execute(sql, (snapshot.adapter_id,)).fetchone() is not None
            old = db.execute(
                "SELECT seq, folder FROM snapshots WHERE adapter_id = ?", (snapshot.adapter_id,)
            ).fetchone()
            if not exists or (old is not None and old["seq"] >= snapshot.seq):
                return None
            put_snapshot(db, snapshot)
            return str(old["folder"]) if old is not None else ""

        return self._database.write(write, "snapshot")


def put_snapshot(db: Connection, snapshot: SnapshotRow) -> None:
    """Replace an adapter's snapshot and drop the payloads that the new one covers."""
    db.execute(
        "INSERT OR REPLACE INTO snapshots (adapter_id, seq, folder, sha256, window) VALUES (?, ?, ?, ?, ?)",
        (snapshot.adapter_id, snapshot.seq, snapshot.folder, snapshot.sha256, snapshot.window),
    )
    drop_covered_payloads(db, snapshot.adapter_id, snapshot.seq)

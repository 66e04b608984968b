"""A database of an older schema is migrated at its first start, with its rows; afterwards it is like a new one."""

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.base.errors import Failure
from coordinator.storage.copies import take_over
from coordinator.storage.database import Database
from coordinator.storage.identity import Identity
from coordinator.storage.rows import START
from coordinator.storage.schema import APPLICATION_ID, ROW_BYTES, SCHEMA_VERSION
from coordinator.storage.sqlite import Connection, DiskFullError, open_connection, open_read_only, read_closed
from coordinator.storage.store import Store
from tests.support.database import query
from tests.support.toy_pool import FakeTime

OLDEST = 5
SCHEMA_5 = Path(__file__).resolve().parents[2] / "support" / "schema_5.sql"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of schema 5 with a tenant and its keys."""
    path = tmp_path / "tinkerpool.db"
    db = sqlite3.connect(path)
    db.executescript(SCHEMA_5.read_text())
    db.execute("INSERT INTO meta VALUES ('pool_id', 77)")
    db.execute("INSERT INTO tenants VALUES ('t', 'alice', 2.0, 30, 4.0)")
    db.execute("INSERT INTO api_keys VALUES ('k1', 't', x'01', 1, 5.0, NULL)")
    db.execute("INSERT INTO api_keys VALUES ('k2', 't', x'02', 0, 6.0, 7.0)")
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {OLDEST}")
    db.commit()
    db.close()
    return path


def layout(path: Path) -> dict[str, object]:
    """Return the columns of each table, and the text of each index and trigger."""
    found: dict[str, object] = {}
    for row in query(path, "SELECT type, name, sql FROM sqlite_master ORDER BY name"):
        if row["type"] == "table":
            columns = query(
                path, f"SELECT name, type, \"notnull\", dflt_value, pk FROM pragma_table_info('{row['name']}')"
            )
            found[row["name"]] = sorted(tuple(column) for column in columns)
        else:
            found[row["name"]] = row["sql"]
    return found


def test_a_migrated_database_has_the_tables_indexes_and_triggers_of_a_new_one(old: Path, tmp_path: Path) -> None:
    asyncio.run(Database(old, FakeTime(), Failure()).close())
    asyncio.run(Database(tmp_path / "new.db", FakeTime(), Failure()).close())
    assert layout(old) == layout(tmp_path / "new.db")
    assert query(old, "PRAGMA user_version")[0][0] == SCHEMA_VERSION


def test_a_migration_without_room_says_so_and_is_made_once_there_is_room(old: Path) -> None:
    before = layout(old)

    def connect(path: Path) -> Connection:
        db = open_connection(path)
        [num_pages] = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count = {num_pages}")  # of this connection: a full disk
        return db

    with pytest.raises(DiskFullError, match=r"no room for the tables of .* free some, then start again"):
        Database(old, FakeTime(), Failure(), connect=connect)
    assert layout(old) == before
    asyncio.run(Database(old, FakeTime(), Failure()).close())
    assert query(old, "PRAGMA user_version")[0][0] == SCHEMA_VERSION


async def test_a_migration_keeps_operations_with_payload_and_outcome(old: Path) -> None:
    db = sqlite3.connect(old)
    payload_and_outcome = {1: (None, b""), 2: (None, b"done"), 3: (b"request", b"failed"), 4: (b"request", None)}
    for seq, (payload, outcome) in payload_and_outcome.items():
        db.execute(
            "INSERT INTO operations (target_id, seq, append_id, tenant_id, kind, request_id, payload, payload_hash,"
            " num_bytes, chunk_tokens, outcome, is_failed, engine_s) VALUES"
            " ('a', ?, ?, 't', 'optim_step', ?, ?, x'05', 7, 16, ?, ?, 0.5)",
            (seq, seq << 8, f"r{seq}", payload, outcome, seq == 3),
        )
    db.commit()
    db.close()
    store = Store(old, FakeTime(), Failure())
    found = store.operations.since("a", 0)
    await store.close()
    assert [(row.seq, payload, row.outcome_bytes, row.outcome) for row, payload in found] == [
        (1, None, 0, None),
        (2, None, 4, b"done"),
        (3, b"request", 6, b"failed"),
        (4, b"request", None, None),
    ]
    assert [(row.append_id, row.request_id, row.num_bytes, row.chunk_tokens) for row, _ in found] == [
        (seq << 8, f"r{seq}", 7, 16) for seq in payload_and_outcome
    ]


async def test_a_migration_counts_the_bytes_of_a_tenants_rows(old: Path) -> None:
    db = sqlite3.connect(old)
    db.execute(
        "INSERT INTO sessions (session_id, tenant_id, user_metadata, created_at) VALUES ('s', 't', '{\"é\": 1}', 1)"
    )
    for seq, payload, outcome in ((1, b"request", None), (2, None, b"results")):
        db.execute(
            "INSERT INTO operations (target_id, seq, append_id, tenant_id, kind, payload, payload_hash, num_bytes,"
            " chunk_tokens, outcome) VALUES ('a', ?, ?, 't', 'forward', ?, x'05', 7, 16, ?)",
            (seq, seq, payload, outcome),
        )
    db.commit()
    db.close()
    store = Store(old, FakeTime(), Failure())
    assert store.tenants.row_bytes("t") == 3 * ROW_BYTES + len('{"é": 1}'.encode()) + 7 + 7
    await store.close()


async def test_a_migration_keeps_the_rows(old: Path) -> None:
    store = Store(old, FakeTime(), Failure())
    [tenant] = store.tenants.all()
    limits = store.tenants.limits()
    listing = store.api_keys.listing(100, START)
    keys = {row.key_id: row for row in listing.read(listing.keys)}
    await store.close()
    assert (tenant.name, limits[tenant.tenant_id], tenant.virtual_tokens) == ("alice", {"weight": "2.0"}, 30)
    assert (keys["k1"].role, keys["k1"].secret_sha256, keys["k1"].revoked_at) == ("admin", b"\x01", None)
    assert (keys["k2"].role, keys["k2"].revoked_at, keys["k2"].tenant_name) == ("member", 7.0, "alice")


async def test_usage_before_a_migration_counts_for_no_day(old: Path) -> None:
    db = sqlite3.connect(old)
    db.execute("INSERT INTO usage VALUES ('t', 'sample', 3, 40, 0.5, 6, 0.25)")
    db.commit()
    db.close()
    store = Store(old, FakeTime(), Failure())
    [total], first_day = store.usage.of("t"), store.usage.first_day()
    rows = list(store.usage.by(("day", "model", "adapter", "kind"), "t", 0))
    since = list(store.usage.by(("kind",), "t", first_day))
    await store.close()
    assert [(row.day, row.base_model, row.adapter_id) for row in rows] == [(0, "", "*")]
    assert (total.num_operations, total.num_tokens, total.engine_s, total.file_bytes, total.file_s) == (
        *(3, 40, 0.5),
        *(6, 0.25),
    )
    assert (rows[0].num_operations, rows[0].num_tokens, rows[0].engine_s, rows[0].file_bytes, rows[0].file_s) == (
        *(3, 40, 0.5),
        *(6, 0.25),
    )
    assert since == []
    assert first_day > 20260101, "the day of the migration"


async def test_an_adapter_of_before_has_no_name_and_counts_as_used_at_the_migration(old: Path) -> None:
    db = sqlite3.connect(old)
    db.execute(
        "INSERT INTO adapters (adapter_id, tenant_id, session_id, payload, base_model, rank, alpha, seed, train_attn,"
        " train_mlp, train_unembed, user_metadata, created_at)"
        " VALUES ('s:train:0', 't', 's', x'', 'toy', 8, 32, 1, 1, 1, 1, '{}', 5)"
    )
    db.commit()
    db.close()
    began = int(time.time())
    store = Store(old, FakeTime(), Failure())
    row = store.adapters.get("s:train:0")
    await store.close()
    assert row is not None
    assert (row.name, row.created_at) == ("", 5)
    assert began <= row.used_at <= time.time()


def test_an_older_database_is_read_without_migrating_it(old: Path) -> None:
    def version(db: Connection) -> int:
        return int(db.execute("PRAGMA user_version").fetchone()[0])

    assert read_closed(old, version, open_read_only) == OLDEST
    assert query(old, "SELECT name FROM sqlite_master WHERE name = 'audit'") == []


def test_a_copy_of_an_older_schema_becomes_another_pools(old: Path) -> None:
    with closing(open_connection(old)) as db:
        take_over(db, Identity(pool_id=78, epoch=9), [], 1.0)
    assert [row["value"] for row in query(old, "SELECT value FROM meta WHERE key IN ('pool_id', 'epoch')")] == [9, 78]

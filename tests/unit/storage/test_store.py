"""The durable log alone: order, atomicity and what a second opening finds."""

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage.database import ConflictError, StorageError
from coordinator.storage.schema import SCHEMA_VERSION
from coordinator.storage.store import CycleCommit, OperationRow, SnapshotRow, Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    await store.insert("tenants", tenant_id="t", name="alice", created_at=0.0)
    yield store
    await store.close()


def operation(seq: int, **values: Any) -> OperationRow:
    fields: dict[str, Any] = {
        "target_id": "a",
        "seq": seq,
        "tenant_id": "t",
        "kind": "forward_backward",
        "request_id": "",
        "body": b"body",
        "body_hash": b"hash",
        "chunk_tokens": 16,
    }
    return OperationRow(**fields | values)


async def test_a_write_is_on_disk_when_its_future_is_done(store: Store, tmp_path: Path) -> None:
    await store.append([operation(1)])
    with sqlite3.connect(f"file:{tmp_path / 'log.db'}?mode=ro", uri=True) as other:
        assert other.execute("SELECT seq FROM operations").fetchall() == [(1,)]
    other.close()


async def test_every_commit_is_synced(store: Store) -> None:
    assert store._writer.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert store._writer.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


async def test_waiting_writes_share_a_commit_and_keep_their_order(store: Store) -> None:
    is_free = threading.Event()
    busy = store.write(lambda db: is_free.wait(10))
    commits: list[str] = []
    store._writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    writes = [
        store.write(lambda db, i=i: db.execute("INSERT INTO cycles VALUES (?, '')", (100 - i,)).lastrowid)  # type: ignore[misc]
        for i in range(20)
    ]
    is_free.set()
    await asyncio.gather(busy, *writes)
    store._writer.set_trace_callback(None)
    assert [await write for write in writes] == list(range(100, 80, -1))
    assert len(commits) <= 2


async def test_a_write_that_fails_fails_alone(store: Store) -> None:
    is_free = threading.Event()
    busy = store.write(lambda db: is_free.wait(10))

    def half(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO cycles VALUES (7, '')")
        raise ValueError("half-way")

    good, bad, conflict, last = (
        store.append([operation(1)]),
        store.write(half),
        store.append([operation(2), operation(1)]),
        store.append([operation(3)]),
    )
    is_free.set()
    await asyncio.gather(busy, good, last)
    with pytest.raises(ValueError, match="half-way"):
        await bad
    with pytest.raises(ConflictError):
        await conflict
    assert [row["seq"] for row in store.read("SELECT seq FROM operations")] == [1, 3]
    assert not store.read("SELECT * FROM cycles")


async def test_nothing_is_lost_when_the_store_is_opened_again(store: Store, tmp_path: Path) -> None:
    pending = [store.append([operation(seq)]) for seq in range(1, 51)]
    await store.close()
    await asyncio.gather(*pending)
    again = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    assert [row["seq"] for row in again.read("SELECT seq FROM operations ORDER BY seq")] == list(range(1, 51))
    await again.close()


async def test_a_closed_store_refuses_instead_of_never_answering(tmp_path: Path) -> None:
    store = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    await store.close()
    with pytest.raises(StorageError):
        await asyncio.wait_for(store.execute("SELECT 1"), 5)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(ValueError, match=r"newer tinkerpool .* upgrade"):
        Store(tmp_path / "log.db", monotonic=lambda: 1.0)


async def test_a_database_of_the_first_version_is_brought_up_to_date_and_keeps_what_it_has(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.executescript((Path(__file__).parents[2] / "data" / "schema_v1.sql").read_text())
        db.execute("INSERT INTO tenants (tenant_id, name, created_at) VALUES ('t', 'alice', 0)")
        for seq, outcome in ((1, b"ok"), (2, None)):
            db.execute(
                "INSERT INTO operations (target_id, seq, tenant_id, kind, body, body_hash, num_bytes, chunk_tokens,"
                " outcome, finished_at) VALUES ('a', ?, 't', 'optim_step', x'01', x'02', 1, 16, ?, ?)",
                (seq, outcome, 1.7e9 if outcome else None),
            )
        db.execute("INSERT INTO snapshots VALUES ('a', 0, 'folder', 'sha')")
    db.close()
    store = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    rows = store.read("SELECT seq, outcome, finished_service_s, fetched_service_s FROM operations ORDER BY seq")
    assert [tuple(row) for row in rows] == [(1, b"ok", 0.0, None), (2, None, None, None)]
    assert [tuple(row) for row in store.read("SELECT * FROM snapshots")] == [("a", 0, "folder", "sha", b"")]
    assert (await store.raise_epoch(), store.last_cycle_id(), store.service_time()) == (4, 7, 0.0)
    await store.close()
    fresh = Store(tmp_path / "fresh.db", monotonic=lambda: 1.0)
    assert columns(store_path=tmp_path / "log.db") == columns(store_path=tmp_path / "fresh.db")
    await fresh.close()


async def test_a_database_of_the_second_version_is_brought_up_to_date_and_publishes_nothing(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.executescript((Path(__file__).parents[2] / "data" / "schema_v2.sql").read_text())
        db.execute("INSERT INTO tenants (tenant_id, name, created_at) VALUES ('t', 'alice', 0)")
        db.execute(
            "INSERT INTO checkpoints VALUES ('tinker://p', 't', 'a', 'weights', 'f', 1, 's', 1, 'toy', 8, '', '{}',"
            " 1.0, NULL, NULL)"
        )
    db.close()
    store = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    assert [tuple(row) for row in store.read("SELECT path, is_public FROM checkpoints")] == [("tinker://p", 0)]
    await store.close()
    fresh = Store(tmp_path / "fresh.db", monotonic=lambda: 1.0)
    assert columns(store_path=tmp_path / "log.db") == columns(store_path=tmp_path / "fresh.db")
    await fresh.close()


@pytest.mark.parametrize("version", [3, 4])
async def test_a_database_of_a_later_version_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.executescript((Path(__file__).parents[2] / "data" / f"schema_v{version}.sql").read_text())
        db.execute("INSERT INTO snapshots VALUES ('a', 7, 'folder', 'sha', x'')")
    db.close()
    store = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    assert [tuple(row) for row in store.read("SELECT * FROM snapshots")] == [("a", 7, "folder", "sha", b"")]
    await store.close()
    fresh = Store(tmp_path / "fresh.db", monotonic=lambda: 1.0)
    assert columns(store_path=tmp_path / "log.db") == columns(store_path=tmp_path / "fresh.db")
    await fresh.close()


def columns(store_path: Path) -> dict[str, set[str]]:
    with sqlite3.connect(store_path) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {table: {str(row[1]) for row in db.execute(f"PRAGMA table_info({table})")} for table in tables}
        indexes = db.execute(
            "SELECT name, sql FROM sqlite_master WHERE type IN ('index', 'trigger') AND sql IS NOT NULL"
        )
        found |= {name: {sql} for name, sql in indexes}
    db.close()
    return found


async def test_a_seq_and_a_request_id_exist_once(store: Store) -> None:
    await store.append([operation(1, request_id="r")])
    other_contents = operation(1, kind="optim_step", body_hash=b"other")
    for other in (operation(1), other_contents, operation(2, request_id="r")):
        with pytest.raises(ConflictError):
            await store.append([other])
    await store.append([operation(2), operation(3), operation(1, target_id="b", request_id="r")])
    with pytest.raises(ConflictError):
        await store.append([operation(0)])


async def test_readers_see_only_what_is_committed(store: Store) -> None:
    is_written, may_commit = threading.Event(), threading.Event()

    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO cycles VALUES (1, '')")
        is_written.set()
        may_commit.wait(10)

    future = store.write(write)
    await asyncio.to_thread(is_written.wait, 10)
    assert not store.read("SELECT * FROM cycles")
    may_commit.set()
    await future
    assert len(store.read("SELECT * FROM cycles")) == 1


async def test_the_reader_cannot_write(store: Store) -> None:
    with pytest.raises(sqlite3.OperationalError):
        store.read("DELETE FROM tenants")


async def test_cycle_ids_never_run_backwards_when_loops_commit_out_of_order(store: Store) -> None:
    await store.commit_cycle(CycleCommit(cycle_id=8))
    await store.commit_cycle(CycleCommit(cycle_id=7))
    assert store.last_cycle_id() == 8


async def test_each_life_has_a_new_epoch(store: Store, tmp_path: Path) -> None:
    epochs = [await store.raise_epoch(), await store.raise_epoch()]
    await store.close()
    again = Store(tmp_path / "log.db", monotonic=lambda: 1.0)
    assert [*epochs, await again.raise_epoch()] == [1, 2, 3]
    await again.close()


async def test_an_operation_is_finished_once_and_metered_once(store: Store) -> None:
    await store.append([operation(1)])
    done = operation(1, outcome=b"first", num_tokens=5, engine_s=0.5)
    await store.commit_cycle(CycleCommit(finished=[done]))
    with pytest.raises(AssertionError, match="finished before"):
        await store.commit_cycle(CycleCommit(finished=[operation(1, outcome=b"second", num_tokens=5)]))
    row = store.read_one("SELECT outcome FROM operations")
    usage = store.read_one("SELECT * FROM usage")
    assert row is not None
    assert usage is not None
    assert row["outcome"] == b"first"
    assert (usage["num_operations"], usage["num_tokens"], usage["engine_s"]) == (1, 5, 0.5)


async def test_an_operation_that_was_withdrawn_does_not_finish_the_one_in_its_place(store: Store) -> None:
    """Its append failed while it ran; its cycle's commit waited for a full disk, and the place was taken meanwhile."""
    await store.append([operation(1, body=b"other"), operation(2)])
    commit = CycleCommit(
        finished=[operation(1, outcome=b"old", is_withdrawn=lambda: True), operation(2, outcome=b"behind it")]
    )
    assert await store.commit_cycle(commit) == {"a"}
    assert [row["outcome"] for row in store.read("SELECT outcome FROM operations")] == [None, None]


async def test_nothing_is_stored_that_holds_the_effect_of_an_operation_that_was_not_logged(store: Store) -> None:
    commit = CycleCommit(
        finished=[operation(1, outcome=b"ok")],
        snapshots=[SnapshotRow(adapter_id="a", seq=1, folder="f", sha256="s")],
        checkpoints=[{"adapter_id": "a"}],
        samplers=[{"adapter_id": "a"}],
    )
    assert await store.commit_cycle(commit) == {"a"}
    for table in ("operations", "snapshots", "checkpoints", "samplers", "usage"):
        assert not store.read(f"SELECT * FROM {table}")


async def test_a_snapshot_drops_the_bodies_that_it_covers_and_no_others(store: Store) -> None:
    await store.append([operation(seq) for seq in (1, 2, 3, 4)])
    finished = [operation(seq, outcome=b"ok") for seq in (1, 2, 4)]
    snapshot = SnapshotRow(adapter_id="a", seq=3, folder="f", sha256="s")
    await store.commit_cycle(CycleCommit(finished=finished, snapshots=[snapshot]))
    assert [row["body"] for row in store.read("SELECT body FROM operations ORDER BY seq")] == [
        None,
        None,
        b"body",
        b"body",
    ]


async def test_no_snapshot_cuts_the_log_at_weights_without_a_file_until_they_have_one_or_their_session_ends(
    store: Store,
) -> None:
    def at(seq: int) -> SnapshotRow:
        return SnapshotRow(adapter_id="s:train:0", seq=seq, folder=f"f{seq}", sha256="x")

    for session in ("s", "t"):
        await store.insert("sessions", session_id=session, tenant_id="t", user_metadata="{}", created_at=0.0)
    await store.insert_adapter(adapter_row("s:train:0"), at(0))
    rows = [sampler_row("s:sample:0", "s", 12), sampler_row("s:sample:1", "t", 9)]
    await store.commit_cycle(CycleCommit(samplers=rows))
    for seq in (9, 12, 100):
        with pytest.raises(ConflictError, match="no file"):
            await store.commit_snapshot(at(seq))
    assert await store.commit_snapshot(at(8)) == "f0"
    await store.execute("UPDATE sessions SET ended_at = 1 WHERE session_id = 't'")
    assert await store.commit_snapshot(at(11)) == "f8"
    with pytest.raises(ConflictError, match="no file"):
        await store.commit_cycle(CycleCommit(snapshots=[at(13)]))
    assert await store.commit_sampler_file("s:sample:0", "weights", "y") == 1
    assert await store.commit_sampler_file("s:sample:0", "others", "z") == 0
    assert await store.commit_snapshot(at(13)) == "f11"


async def test_no_snapshot_cuts_the_log_at_a_checkpoint_without_a_file_until_it_has_one_or_is_deleted(
    store: Store,
) -> None:
    def at(seq: int) -> SnapshotRow:
        return SnapshotRow(adapter_id="s:train:0", seq=seq, folder=f"f{seq}", sha256="x")

    await store.insert("sessions", session_id="s", tenant_id="t", user_metadata="{}", created_at=0.0)
    await store.insert_adapter(adapter_row("s:train:0"), at(0))
    await store.commit_cycle(CycleCommit(checkpoints=[checkpoint_row("p", 5), checkpoint_row("q", 9)]))
    assert [row["path"] for row in store.unwritten_checkpoints()] == ["p", "q"]
    assert await store.commit_snapshot(at(4)) == "f0"
    for seq in (5, 9, 100):
        with pytest.raises(ConflictError, match="no file"):
            await store.commit_snapshot(at(seq))
    assert await store.commit_checkpoint_file("p", 4, "others", "z", 1, "toy") == 0, "its path is another save's"
    assert await store.commit_checkpoint_file("p", 5, "weights", "y", 77, "another") == 1
    assert await store.commit_snapshot(at(8)) == "f4"
    assert await store.delete_checkpoint("q", 8) == "", "that one is gone"
    with pytest.raises(ConflictError, match="no file"):
        await store.commit_snapshot(at(9))
    assert await store.delete_checkpoint("q", 9) == ""
    assert await store.commit_snapshot(at(9)) == "f8"
    [row] = store.read("SELECT path, folder, sha256, size_bytes, fingerprint FROM checkpoints")
    assert tuple(row) == ("p", "weights", "y", 77, "another")
    assert await store.delete_checkpoint("p", 5) == "weights"


def checkpoint_row(path: str, seq: int) -> dict[str, Any]:
    """What a save of weights for sampling commits before its file is there."""
    return {
        "path": path,
        "tenant_id": "t",
        "adapter_id": "s:train:0",
        "kind": "sampler_weights",
        "folder": "",
        "size_bytes": 7,
        "sha256": "",
        "seq": seq,
        "base_model": "toy",
        "rank": 8,
        "fingerprint": "toy",
        "user_metadata": "{}",
        "created_at": 0.0,
    }


def sampler_row(sampler_id: str, session_id: str, seq: int) -> dict[str, Any]:
    """What an unnamed save commits before its file is there."""
    return {
        "sampler_id": sampler_id,
        "tenant_id": "t",
        "session_id": session_id,
        "body": b"",
        "base_model": "toy",
        "model_path": "",
        "adapter_id": "s:train:0",
        "version": f"s:train:0:{seq}",
        "folder": "",
        "sha256": "",
        "created_at": 0.0,
    }


def adapter_row(adapter_id: str) -> dict[str, Any]:
    """What makes an adapter."""
    return {
        "adapter_id": adapter_id,
        "tenant_id": "t",
        "session_id": "s",
        "body": b"",
        "base_model": "toy",
        "rank": 8,
        "alpha": 32.0,
        "seed": 0,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "user_metadata": "{}",
        "created_at": 0.0,
    }


async def test_an_adapter_and_what_it_starts_from_are_created_together(store: Store) -> None:
    await store.insert("sessions", session_id="s", tenant_id="t", user_metadata="{}", created_at=0.0)
    adapter = adapter_row("s:train:0")
    await store.insert_adapter(adapter, SnapshotRow(adapter_id="s:train:0", seq=0, folder="first", sha256="x"))
    with pytest.raises(ConflictError):
        await store.insert_adapter(adapter, SnapshotRow(adapter_id="s:train:0", seq=0, folder="second", sha256="x"))
    assert [row["folder"] for row in store.read("SELECT folder FROM snapshots")] == ["first"]


async def test_a_plan_is_noted_with_the_next_write_and_gone_with_its_cycle(store: Store) -> None:
    store.note_plan(1, {"a": "w0"})
    await store.append([operation(1)])
    assert [tuple(row) for row in store.read("SELECT * FROM plans")] == [(1, "a", "w0")]
    await store.commit_cycle(CycleCommit(cycle_id=1))
    assert not store.read("SELECT * FROM plans")


async def test_only_the_last_cycles_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "CYCLES_KEPT", 3)
    for cycle_id in range(1, 8):
        await store.commit_cycle(CycleCommit(cycle_id=cycle_id))
    assert [row["cycle_id"] for row in store.read("SELECT cycle_id FROM cycles")] == [5, 6, 7]


async def test_a_full_disk_fails_who_needs_the_room_and_the_store_goes_on_afterwards(store: Store) -> None:
    num_pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
    store._writer.execute(f"PRAGMA max_page_count = {num_pages}")
    is_free = threading.Event()
    busy = store.write(lambda db: is_free.wait(10))
    small, large, other = (
        store.append([operation(1)]),
        store.append([operation(2, body=bytes(1 << 20))]),
        store.append([operation(3)]),
    )
    is_free.set()
    await asyncio.gather(busy, small, other)
    with pytest.raises(StorageError, match="full"):
        await large
    store._writer.execute("PRAGMA max_page_count = 1000000")
    await store.append([operation(2, body=bytes(1 << 20))])
    assert [row["seq"] for row in store.read("SELECT seq FROM operations")] == [1, 2, 3]

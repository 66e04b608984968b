"""Group commit and the format of the file: order, atomicity, and which files are refused."""

import asyncio
import errno
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import cast

import pytest

from coordinator.base.errors import Failure
from coordinator.storage import database as database_module
from coordinator.storage import sqlite as sqlite_module
from coordinator.storage.cycles import CycleCommit, Cycles
from coordinator.storage.database import Database
from coordinator.storage.disk import FailedSync, RealDisk, Reserve
from coordinator.storage.schema import SCHEMA_VERSION
from coordinator.storage.sqlite import (
    Connection,
    DiskFullError,
    LockedError,
    StorageError,
    StoreBrokenError,
    open_connection,
    open_read_only,
    read_closed,
    set_pragmas,
)
from tests.support.database import query
from tests.support.disk.apsw_connection import ApswConnection, locked_error
from tests.support.disk.lossy_vfs import LossyVfs, close_quietly, sync_error
from tests.support.logs import logged_by
from tests.support.toy_pool import FakeTime


def opened(path: Path) -> Database:
    return Database(path, FakeTime(), Failure())


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = opened(tmp_path / "log.db")
    yield database
    await database.close()


def insert_cycle(database: Database, cycle_id: int, summary: bytes = b"") -> asyncio.Future[int]:
    return database.execute("INSERT INTO cycles VALUES (?, ?)", (cycle_id, summary))


def cycle_ids(database: Database) -> list[int]:
    return [row["cycle_id"] for row in database.read("SELECT cycle_id FROM cycles ORDER BY cycle_id")]


async def test_a_write_is_on_disk_when_its_future_is_done(database: Database, tmp_path: Path) -> None:
    await insert_cycle(database, 1)
    assert [tuple(row) for row in query(tmp_path / "log.db", "SELECT cycle_id FROM cycles")] == [(1,)]


async def test_every_commit_is_synced(database: Database) -> None:
    # `synchronous` is a setting of a connection: only the writer's own connection has it.
    assert database._writer.execute("PRAGMA synchronous").fetchone()[0] == 2
    assert database._writer.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


async def test_queued_writes_share_a_commit_and_keep_their_order(database: Database) -> None:
    is_free = threading.Event()
    busy = database.write(lambda db: is_free.wait(60))
    order: list[int] = []
    writes = [database.write(lambda db, i=i: order.append(i)) for i in range(20)]  # type: ignore[misc]
    is_free.set()
    await asyncio.gather(busy, *writes)
    assert order == list(range(20))
    assert database.num_commits <= 2


async def test_a_failed_write_fails_no_other_write(database: Database) -> None:
    is_free = threading.Event()
    busy = database.write(lambda db: is_free.wait(60))

    def half(db: Connection) -> None:
        db.execute("INSERT INTO cycles VALUES (7, '')")
        raise ValueError("half-way")

    good, bad, last = insert_cycle(database, 1), database.write(half), insert_cycle(database, 3)
    is_free.set()
    await asyncio.gather(busy, good, last)
    with pytest.raises(ValueError, match="half-way"):
        await bad
    assert cycle_ids(database) == [1, 3]


async def test_a_closed_database_raises_instead_of_hanging(tmp_path: Path) -> None:
    database = opened(tmp_path / "log.db")
    await database.close()
    with pytest.raises(StorageError):
        await asyncio.wait_for(insert_cycle(database, 1), 60)


def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    asyncio.run(opened(path).close())
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    db.close()
    with pytest.raises(ValueError, match=r"newer tinkerpool .* upgrade"):
        opened(path)


def test_the_first_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    asyncio.run(opened(path).close())
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 1")
    db.close()
    with pytest.raises(ValueError, match=r"older version of tinkerpool.* use another data directory"):
        opened(path)


def test_reading_a_database_that_is_closed_or_was_killed_changes_no_file(tmp_path: Path) -> None:
    def version(db: Connection) -> int:
        return int(db.execute("PRAGMA user_version").fetchone()[0])

    path = tmp_path / "log.db"
    assert read_closed(path, version, open_read_only) is None
    database = opened(path)
    (tmp_path / "killed").mkdir()
    for name in ("log.db", "log.db-wal"):
        shutil.copy(tmp_path / name, tmp_path / "killed" / name)
    asyncio.run(database.close())
    for folder in (tmp_path, tmp_path / "killed"):
        before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        assert read_closed(folder / "log.db", version, open_read_only, is_alone=True) == SCHEMA_VERSION
        assert {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()} == before


@pytest.mark.parametrize("version", [1, 5])
def test_a_file_with_an_older_numbering_of_schemas_is_refused_with_what_to_do(tmp_path: Path, version: int) -> None:
    with sqlite3.connect(tmp_path / "log.db") as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(ValueError, match=r"older version of tinkerpool.* use another data directory"):
        opened(tmp_path / "log.db")
    assert query(tmp_path / "log.db", "SELECT name FROM sqlite_master WHERE name = 'operations'") == []


async def test_readers_see_only_committed_rows(database: Database) -> None:
    is_written, may_commit = threading.Event(), threading.Event()

    def write(db: Connection) -> None:
        db.execute("INSERT INTO cycles VALUES (1, '')")
        is_written.set()
        may_commit.wait(60)

    future = database.write(write)
    await asyncio.to_thread(is_written.wait, 10)
    assert cycle_ids(database) == []
    may_commit.set()
    await future
    assert cycle_ids(database) == [1]


async def test_the_reader_cannot_write(database: Database) -> None:
    with pytest.raises(sqlite3.OperationalError):
        database.read("DELETE FROM tenants")


async def test_a_full_disk_fails_the_writes_that_need_room_and_no_later_ones(database: Database) -> None:
    # `max_page_count` is a setting of a connection: it makes the writer's file as full as a disk.
    num_pages = database._writer.execute("PRAGMA page_count").fetchone()[0]
    database._writer.execute(f"PRAGMA max_page_count = {num_pages}")
    is_free = threading.Event()
    busy = database.write(lambda db: is_free.wait(60))
    small, large, other = (
        insert_cycle(database, 1),
        insert_cycle(database, 2, bytes(1 << 20)),
        insert_cycle(database, 3),
    )
    is_free.set()
    await asyncio.gather(busy, small, other)
    with pytest.raises(StorageError, match="full"):
        await large
    database._writer.execute("PRAGMA max_page_count = 1000000")
    await insert_cycle(database, 2, bytes(1 << 20))
    assert cycle_ids(database) == [1, 2, 3]


async def test_riding_writes_are_committed_with_the_first_write_that_a_full_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "RIDING_KEPT_MAX", 3)
    database = opened(tmp_path / "log.db")

    def no_room(db: Connection) -> None:
        db.execute("ROLLBACK")  # as SQLite does
        raise sqlite3.OperationalError("database or disk is full")

    def ride(cycle_id: int) -> None:
        database.ride(f"{cycle_id}", lambda db: db.execute("INSERT INTO cycles VALUES (?, '')", (cycle_id,)))

    for cycle_id in range(10, 15):
        ride(cycle_id)
    with pytest.raises(StorageError, match="full"):
        await database.write(no_room)
    ride(15)
    small, large = insert_cycle(database, 1), database.write(no_room)
    with pytest.raises(StorageError, match="full"):
        await large
    await small
    assert cycle_ids(database) == [1, 12, 13, 14, 15], "of more than are kept, the newest"
    ride(16)
    await database.close()
    database = opened(tmp_path / "log.db")
    assert cycle_ids(database)[-1] == 16, "a stop loses none"
    await database.close()


async def test_a_locked_database_refuses_writes_and_a_commit_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_module, "LOCK_WAIT_S", 0.01)
    monkeypatch.setattr("coordinator.storage.cycles.RETRY_S", 0.001)
    database = opened(tmp_path / "log.db")
    other = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    database.ride("mark", lambda db: db.execute("INSERT INTO cycles VALUES (9, '')"))
    persisting = asyncio.create_task(Cycles(database).persist(CycleCommit(cycle_id=1)))
    for cycle_id in (2, 3):
        with pytest.raises(LockedError):
            await insert_cycle(database, cycle_id)
    assert not persisting.done()
    other.execute("COMMIT")
    other.close()
    await asyncio.wait_for(persisting, 60)
    await insert_cycle(database, 4)
    assert cycle_ids(database) == [1, 4, 9], "riding writes of a refused commit are committed with the next one"
    await database.close()
    assert [message.partition(str(tmp_path))[0] for message in logged_by("coordinator.storage", caplog)] == [
        "another process has locked ",
        "the database is unlocked",
    ]


async def test_a_call_that_ends_while_the_database_closes_does_not_fail_the_stop(tmp_path: Path) -> None:
    database = opened(tmp_path / "log.db")

    def write(db: sqlite3.Connection) -> None:
        db.execute("INSERT INTO cycles VALUES (1, '')")
        database.ride("another", lambda db: db.execute("INSERT INTO cycles VALUES (2, '')"))

    database.ride("one", write)
    await database.close()
    reopened = opened(tmp_path / "log.db")
    assert cycle_ids(reopened) == [1]
    await reopened.close()


async def test_a_stop_in_a_locked_database_ends_the_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "LOCK_WAIT_S", 0.01)
    monkeypatch.setattr("coordinator.storage.cycles.RETRY_S", 0.001)
    database = opened(tmp_path / "log.db")
    other = sqlite3.connect(tmp_path / "log.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    cycles = Cycles(database)
    persisting = asyncio.create_task(cycles.persist(CycleCommit(cycle_id=1)))
    cycles.stop_retrying()
    with pytest.raises(LockedError):
        await asyncio.wait_for(persisting, 60)
    await asyncio.wait_for(database.close(), 60)
    other.close()


async def test_a_start_waits_for_a_locked_database_and_then_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_attempts = 0

    def connect(path: Path) -> Connection:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts < num_locked:
            raise locked_error()
        return open_connection(path)

    num_locked = 4
    await Database(tmp_path / "log.db", FakeTime(), Failure(), connect=connect).close()
    messages = logged_by("coordinator.storage", caplog)
    assert [message.partition(": ")[2] for message in messages] == ["waiting until it unlocks the database"]
    num_locked = 1000
    with pytest.raises(LockedError, match="end the program that writes to it"):
        Database(tmp_path / "log.db", FakeTime(), Failure(), connect=connect)


@dataclass(slots=True)
class SmallDisk:
    """A file system that can be full, with a reserve; opens databases that use both."""

    folder: Path
    vfs: LossyVfs
    disk: RealDisk
    reserve: Reserve
    failure: Failure = field(default_factory=Failure)

    def open(self) -> Database:
        def connect(path: Path) -> Connection:
            connection = cast("Connection", ApswConnection(path, vfs=self.vfs.name))
            set_pragmas(connection)
            return connection

        failed_sync = FailedSync(self.folder / "failed", self.disk)
        self.reserve = Reserve(self.folder / "reserve", self.disk)
        return Database(
            self.folder / "log.db",
            FakeTime(),
            self.failure,
            connect=connect,
            reserve=self.reserve,
            failed_sync=failed_sync,
        )

    def kill(self, database: Database) -> None:
        """End the process that has a database open."""
        self.vfs.kill()
        for connection in (database._writer, database._reader):  # private: a killed process closes nothing
            close_quietly(connection)
        self.vfs.restart()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    vfs = LossyVfs("full", Random(0))

    class CountingDisk(RealDisk):
        def write(self, path: Path, content: bytes) -> None:
            if vfs.is_full and content:
                raise OSError(errno.ENOSPC, "no space left")
            super().write(path, content)

        def remove(self, path: Path) -> None:
            vfs.room += sum(each.stat().st_size for each in path.glob("*"))
            super().remove(path)

        def free(self, folder: Path) -> int:
            return vfs.room if vfs.is_full else super().free(folder)

    disk = CountingDisk()
    yield SmallDisk(tmp_path, vfs, disk, Reserve(tmp_path / "reserve", disk))
    vfs.unregister()


async def test_each_deletion_on_a_full_disk_leaves_the_reserve_to_the_next_one(small_disk: SmallDisk) -> None:
    """Otherwise the write-ahead log would grow with each, until it is copied into the database at the next chance."""
    database = small_disk.open()
    vfs, reserve = small_disk.vfs, small_disk.reserve
    assert reserve.take()
    await asyncio.gather(*(insert_cycle(database, cycle_id) for cycle_id in range(60)))
    vfs.is_full = True
    room = []
    for cycle_id in range(60):
        await database.execute("DELETE FROM cycles WHERE cycle_id = ?", (cycle_id,), is_deletion=True)
        room.append(vfs.room)
    assert not reserve.is_held
    assert room[-1] == room[5], "the last deletions took no more room"
    await database.close()


async def test_deletions_work_on_a_full_disk_and_nothing_else_uses_their_room(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    database = small_disk.open()
    vfs, reserve = small_disk.vfs, small_disk.reserve
    assert reserve.take()
    for cycle_id in range(500):
        insert_cycle(database, cycle_id, bytes(10_000))
    await insert_cycle(database, 500)
    vfs.is_full = True
    for cycle_id in range(500):
        await database.execute("DELETE FROM cycles WHERE cycle_id = ?", (cycle_id,), is_deletion=True)
        if cycle_id % 50 == 0:
            await database.regain_room()
            with pytest.raises(DiskFullError):
                await insert_cycle(database, 501 + cycle_id)
    assert not reserve.is_held
    assert cycle_ids(database) == [500]
    vfs.is_full = False
    with pytest.raises(DiskFullError):
        await insert_cycle(database, 501)
    await database.regain_room()
    assert reserve.is_held
    await insert_cycle(database, 501)
    await database.close()
    assert [message.partition(" (")[0] for message in logged_by("coordinator.storage", caplog)] == [
        "the disk is full",
        "the disk has room again",
    ]


async def test_a_start_on_a_full_disk_takes_deletions_alone_until_the_log_is_copied(small_disk: SmallDisk) -> None:
    """What the log of the killed process adds to the database has no room, not even that of the reserve."""
    before = small_disk.open()
    assert small_disk.reserve.take()
    await asyncio.gather(*(insert_cycle(before, number, bytes(100_000)) for number in range(100)))
    small_disk.kill(before)
    small_disk.vfs.is_full = True
    database = small_disk.open()
    assert not small_disk.reserve.take()
    assert "only reads, results and deletions are served" in database.lack_of_room()
    assert len(cycle_ids(database)) == 100
    await database.execute("DELETE FROM cycles WHERE cycle_id = ?", (7,), is_deletion=True)
    with pytest.raises(DiskFullError):
        await insert_cycle(database, 100)
    await database.regain_room()
    assert database.problem()
    small_disk.vfs.is_full = False
    await database.regain_room()
    await insert_cycle(database, 100)
    assert not database.problem()
    assert len(cycle_ids(database)) == 100
    await database.close()


async def test_a_start_on_a_full_disk_releases_the_reserve_for_the_log_of_the_last_process(
    small_disk: SmallDisk,
) -> None:
    before = small_disk.open()
    assert small_disk.reserve.take()
    await asyncio.gather(*(insert_cycle(before, number, bytes(10_000)) for number in range(100)))
    small_disk.kill(before)
    small_disk.vfs.is_full = True
    database = small_disk.open()
    assert small_disk.vfs.room > 0
    assert not (small_disk.folder / "log.db-wal").stat().st_size, "the log is in the database"
    await database.execute("DELETE FROM cycles WHERE cycle_id = ?", (7,), is_deletion=True)
    await database.close()


async def test_after_a_failed_sync_a_start_needs_room_for_the_whole_log(small_disk: SmallDisk) -> None:
    """Behind a hole of the log, which the page cache hides, no commit would survive a power cut."""
    before = small_disk.open()
    assert small_disk.reserve.take()
    await asyncio.gather(*(insert_cycle(before, number, bytes(100_000)) for number in range(100)))

    def fail(operation: str, _: str) -> None:
        if operation == "sync":
            raise sync_error()

    small_disk.vfs.on_operation = fail
    with pytest.raises(StoreBrokenError):
        await insert_cycle(before, 100)
    small_disk.vfs.on_operation = lambda operation, file: None
    small_disk.kill(before)
    small_disk.vfs.is_full = True
    with pytest.raises(DiskFullError, match=r"its log may have holes.* free 1\d MB, then start again"):
        small_disk.open()
    small_disk.vfs.is_full = False
    await small_disk.open().close()
    assert not (small_disk.folder / "failed").exists()


async def test_new_work_is_refused_below_the_floor_of_free_space(tmp_path: Path) -> None:
    class MeasuredDisk(RealDisk):
        num_free = 1 << 30

        def free(self, folder: Path) -> int:
            return self.num_free

    disk = MeasuredDisk()
    reserve = Reserve(tmp_path / "reserve", disk, floor_bytes=300_000_000)
    database = Database(tmp_path / "log.db", FakeTime(), Failure(), reserve=reserve)
    reserve.take()
    assert not database.lack_of_room()
    disk.num_free = 299_000_000
    assert database.lack_of_room() == "the pool's disk has 299 MB free: new work is taken from 300 MB on"
    await insert_cycle(database, 1)
    await database.close()


async def test_a_read_on_another_thread_is_refused(database: Database) -> None:
    """While it ran, reads of the event loop would not see what was committed since its start."""
    with pytest.raises(AssertionError, match="another thread"):
        await asyncio.to_thread(database.read, "SELECT 1")
    with pytest.raises(AssertionError, match="another thread"):
        await asyncio.to_thread(database.read_one, "SELECT 1")

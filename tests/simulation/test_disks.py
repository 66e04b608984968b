"""The simulated disks lose unsynced writes at a power cut and nothing else; otherwise the simulation proves nothing."""

import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.simulation.disk import SimDisk
from tests.support.disk.apsw_connection import ApswConnection
from tests.support.disk.lossy_vfs import LossyVfs, close_quietly, sync_error


@pytest.fixture
def vfs() -> Iterator[LossyVfs]:
    lossy = LossyVfs("lossy-test", Random(0))
    yield lossy
    lossy.unregister()


def open_database(vfs: LossyVfs, path: Path, synchronous: str = "FULL") -> ApswConnection:
    database = ApswConnection(path, vfs=vfs.name)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(f"PRAGMA synchronous = {synchronous}")
    return database


def num_rows_lost(vfs: LossyVfs, path: Path, synchronous: str, num_power_cuts: int) -> int:
    """Commit rows and cut the power at drawn moments; return the number of committed rows that were lost."""
    random, num_committed, num_lost = Random(1), 0, 0
    for _ in range(num_power_cuts):
        last = random.randrange(1, 80)
        seen = [0]

        def on_operation(_operation: str, _file: str, seen: list[int] = seen, last: int = last) -> None:
            seen[0] += 1
            if seen[0] == last:
                vfs.kill()

        vfs.on_operation = on_operation
        databases = []
        try:
            databases = [open_database(vfs, path, synchronous)]
            databases.append(open_database(vfs, path, synchronous))
            writer, reader = databases
            writer.execute("CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY, text TEXT)")
            num_found = reader.execute("SELECT COUNT(*) AS found FROM rows").fetchall()[0]["found"]
            num_lost += max(0, num_committed - num_found)
            num_committed = num_found
            while True:
                writer.execute("BEGIN IMMEDIATE")
                writer.execute("INSERT INTO rows (text) VALUES (?)", ("x" * random.randrange(3000),))
                writer.execute("COMMIT")
                num_committed += 1
        except sqlite3.OperationalError:
            pass
        for database in databases:
            close_quietly(database)
        vfs.power_cut(random.choice((0.0, 0.5, 0.9)))
        vfs.restart()
    vfs.on_operation = lambda operation, file: None
    database = open_database(vfs, path)
    assert database.execute("PRAGMA integrity_check").fetchall()[0][0] == "ok"
    database.close()
    return num_lost


def test_a_database_that_syncs_loses_nothing_in_power_cuts(vfs: LossyVfs, tmp_path: Path) -> None:
    assert num_rows_lost(vfs, tmp_path / "x.db", "FULL", 60) == 0


def test_a_database_that_does_not_sync_at_commit_loses_rows_in_power_cuts(vfs: LossyVfs, tmp_path: Path) -> None:
    assert num_rows_lost(vfs, tmp_path / "x.db", "NORMAL", 20) > 0


def test_unsynced_writes_survive_the_kill_of_their_process(vfs: LossyVfs, tmp_path: Path) -> None:
    database = open_database(vfs, tmp_path / "x.db", "OFF")
    database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY)")
    database.execute("INSERT INTO rows VALUES (7)")
    vfs.kill()
    close_quietly(database)
    vfs.restart()
    database = open_database(vfs, tmp_path / "x.db")
    assert [row["number"] for row in database.execute("SELECT number FROM rows")] == [7]
    database.close()


def test_a_full_disk_and_a_failing_sync_raise_the_errors_of_sqlite3(vfs: LossyVfs, tmp_path: Path) -> None:
    database = open_database(vfs, tmp_path / "x.db")
    database.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY)")
    vfs.is_full = True
    with pytest.raises(sqlite3.OperationalError) as full:
        database.execute("INSERT INTO rows VALUES (1)")
    vfs.is_full = False

    def fail(operation: str, _file: str) -> None:
        if operation == "sync":
            raise sync_error()

    vfs.on_operation = fail
    with pytest.raises(sqlite3.OperationalError) as failing:
        database.execute("INSERT INTO rows VALUES (2)")
    vfs.on_operation = lambda operation, file: None
    assert full.value.sqlite_errorcode == sqlite3.SQLITE_FULL
    assert failing.value.sqlite_errorcode == sqlite3.SQLITE_IOERR_FSYNC
    assert database.execute("INSERT INTO rows VALUES (3)").rowcount == 1
    with pytest.raises(sqlite3.IntegrityError):
        database.execute("INSERT INTO rows VALUES (3)")
    assert database.execute("SELECT * FROM rows").fetchall() == [(3,)]
    database.close()


@pytest.fixture
def disk(tmp_path: Path) -> SimDisk:
    return SimDisk(tmp_path, Random(0), lambda operation, file: None)


def test_synced_files_in_synced_folders_survive(disk: SimDisk, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    disk.make_folder(folder)
    disk.write(folder / "file", b"content")
    for path in (folder / "file", folder, tmp_path / "a", tmp_path):
        disk.sync(path)
    disk.power_cut(0.0)
    assert disk.read(folder / "file") == b"content"


def test_a_file_in_an_unsynced_folder_is_gone_and_an_unsynced_file_is_torn(disk: SimDisk, tmp_path: Path) -> None:
    for name in ("one", "two"):
        disk.make_folder(tmp_path / name)
    disk.sync(tmp_path)
    disk.write(tmp_path / "one" / "file", b"content")
    disk.sync(tmp_path / "one" / "file")
    disk.write(tmp_path / "two" / "file", b"content" * 100)
    disk.sync(tmp_path / "two")
    disk.power_cut(0.0)
    assert disk.names(tmp_path / "one") == []
    assert len(disk.read(tmp_path / "two" / "file")) < 700


def test_a_rename_is_not_durable_before_its_folder_is_synced(disk: SimDisk, tmp_path: Path) -> None:
    disk.make_folder(tmp_path / "old")
    disk.sync(tmp_path)
    disk.rename(tmp_path / "old", tmp_path / "new")
    disk.power_cut(0.0)
    assert disk.names(tmp_path) == ["old"]


def test_a_full_disk_refuses_folders_and_files(disk: SimDisk, tmp_path: Path) -> None:
    disk.is_full = True
    with pytest.raises(OSError, match="No space left") as folder:
        disk.make_folder(tmp_path / "a")
    with pytest.raises(OSError, match="No space left") as file:
        disk.write(tmp_path / "file", b"content")
    assert folder.value.errno == file.value.errno == errno.ENOSPC

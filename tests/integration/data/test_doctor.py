"""The doctor reports damage, and what a start would do, also beside a running pool, and changes nothing."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from coordinator.runtime.data_dir import FAILED_SYNC, RESERVE
from coordinator.runtime.doctor import Report, examine
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import QUARANTINE_S
from coordinator.storage.identity import DATABASE, SIDE_FILE
from tests.support.disk.backups import flip_a_byte, folder_of, quiet, trained, unreadable
from tests.support.toy_pool import running_pool


def report_on(data_dir: Path, pid: int | None = None, *, is_verified: bool = True) -> Report:
    return examine(data_dir, pid, is_verified=is_verified, on_progress=quiet)


def listing(data_dir: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(data_dir).as_posix(): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in data_dir.rglob("*")
    }


async def pool_at(path: Path) -> str:
    async with running_pool(path, replay_s_max=1e-6) as pool:
        return await trained(pool)


async def test_a_sound_pool_has_no_problem_running_or_stopped(tmp_path: Path) -> None:
    async with running_pool(tmp_path, replay_s_max=1e-6) as pool:
        await trained(pool)
        report = await asyncio.to_thread(report_on, tmp_path, os.getpid())
        identity = pool.store.identity()
    assert (report.problems, report.notes) == ([], [])
    facts = dict(report.facts)
    assert facts["pool"] == f"process {os.getpid()} is running on it"
    assert facts["identity"].startswith(f"{identity.name}, epoch 1, ")
    assert facts["states"] == "2 checkpoints, 1 snapshots, 1 samplers, all read and compared"
    assert "GB free" in facts["file system"]
    before = listing(tmp_path)
    assert report_on(tmp_path).problems == []
    assert listing(tmp_path) == before


async def test_lost_and_damaged_states_are_problems_and_damage_inside_only_with_verify(tmp_path: Path) -> None:
    adapter = await pool_at(tmp_path)
    flip_a_byte(folder_of(tmp_path, "/named"))
    assert report_on(tmp_path, is_verified=False).problems == []
    [problem] = report_on(tmp_path).problems
    assert (
        problem
        == f"1 states cannot be read, or do not match their checksums: checkpoint tinker://{adapter}/sampler_weights/named"
    )
    shutil.rmtree(folder_of(tmp_path, "/kept"))
    [problem] = report_on(tmp_path, is_verified=False).problems
    assert problem == f"1 states are lost: their folders are missing: checkpoint tinker://{adapter}/weights/kept"


async def test_a_state_that_the_disk_cannot_read_is_a_problem_with_verify(tmp_path: Path) -> None:
    adapter = await pool_at(tmp_path)
    with unreadable(folder_of(tmp_path, "/kept")):
        [problem] = report_on(tmp_path).problems
    assert problem.startswith("1 states cannot be read")
    assert problem.endswith(f": checkpoint tinker://{adapter}/weights/kept")


async def test_orphans_and_quarantined_folders_are_notes_with_dates(tmp_path: Path) -> None:
    await pool_at(tmp_path)
    async with running_pool(tmp_path) as pool:
        orphan = pool.store.identity().new_folder()
    (tmp_path / "snapshots" / orphan).mkdir(mode=0o700)
    report = report_on(tmp_path)
    assert report.problems == []
    assert [note for note in report.notes if f"snapshots/{orphan}" in note and "have no row" in note]
    async with running_pool(tmp_path):
        pass
    [note] = report_on(tmp_path).notes
    assert f"-snapshots-{orphan} (since 20" in note
    assert f"deleted after {QUARANTINE_S / 86400:.1f} more days of service" in note


@pytest.mark.parametrize(
    ("name", "sentence"), [(DATABASE, "is missing or empty"), (f"{SIDE_FILE} of another pool", "mixes two pools")]
)
async def test_a_start_that_would_be_refused_is_a_problem_with_its_reason(
    tmp_path: Path, name: str, sentence: str
) -> None:
    pool = tmp_path / "pool"
    await pool_at(pool)
    if name == DATABASE:
        (pool / DATABASE).unlink()
    else:
        async with running_pool(tmp_path / "other"):
            pass
        shutil.copy(tmp_path / "other" / SIDE_FILE, pool / SIDE_FILE)
    [problem] = report_on(pool).problems
    assert problem.startswith("a start would be refused: ")
    assert sentence in problem


async def test_a_full_disk_is_a_note_and_after_a_failed_sync_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool_at(tmp_path)
    shutil.rmtree(tmp_path / RESERVE)
    monkeypatch.setattr(RealDisk, "free", lambda *_: 100_000_000)
    [note] = report_on(tmp_path).notes
    assert note.startswith("the disk has 100 MB free: new work is refused below 268 MB")
    monkeypatch.setattr(RealDisk, "free", lambda *_: 0)
    [note] = report_on(tmp_path).notes
    assert note == "the disk is full: a start serves reads, results and deletions alone until 4 MB more are free"
    (tmp_path / FAILED_SYNC).touch(0o600)
    report = report_on(tmp_path)
    assert report.problems == [
        "a start would be refused: a sync failed, and the disk has no room to copy the log: free 4 MB more"
    ]
    assert not report.notes


async def test_a_damaged_database_is_a_problem(tmp_path: Path) -> None:
    await pool_at(tmp_path)
    with sqlite3.connect(tmp_path / DATABASE) as db:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute("UPDATE adapters SET session_id = 'nobody'")
    db.close()
    [problem] = report_on(tmp_path).problems
    assert problem == f"1 faults in {DATABASE}; restore a backup: a row of adapters refers to a missing row of sessions"


async def test_rights_of_other_users_are_a_note(tmp_path: Path) -> None:
    await pool_at(tmp_path / "pool")
    (tmp_path / "pool" / SIDE_FILE).chmod(0o644)
    report = report_on(tmp_path / "pool")
    assert report.problems == []
    assert report.notes == [f"1 files or folders can be opened by other users; a start closes them: {SIDE_FILE}"]


def test_a_directory_that_does_not_exist_is_a_problem_and_is_not_made(tmp_path: Path) -> None:
    [problem] = report_on(tmp_path / "pool").problems
    assert "does not exist" in problem
    assert not (tmp_path / "pool").exists()

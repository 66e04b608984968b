"""`backup`, `restore` and `doctor` in this process: output, exit codes, and one sentence for what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.runtime.backup import back_up
from coordinator.storage.identity import DATABASE
from tests.support.command_line import Run
from tests.support.disk.backups import flip_a_byte, folder_of, quiet, trained
from tests.support.toy_pool import running_pool


@pytest.fixture
async def pool(tmp_path: Path) -> Path:
    """The default data directory, of a stopped pool with states of every kind."""
    async with running_pool(tmp_path / "home" / "pool") as toys:
        await trained(toys)
    return tmp_path / "home" / "pool"


def test_a_pool_is_backed_up_checked_and_restored(run: Run, pool: Path, tmp_path: Path) -> None:
    backup, new = tmp_path / "my backup", tmp_path / "new"
    done = run("backup", backup)
    assert (done.code, done.err) == (0, "")
    assert "3 states, " in done.out
    assert f"tinkerpool restore '{backup}' NEW_DATA_DIR" in done.out
    checked = run("doctor", "--data-dir", backup, "--verify")
    assert (checked.code, "note: it is a backup" in checked.out) == (0, True)
    done = run("restore", backup, new)
    assert (done.code, f"Start it: tinkerpool up --data-dir {new}" in done.out) == (0, True)
    for path in (pool, new):
        done = run("doctor", "--data-dir", path, "--verify")
        assert (done.code, done.out.splitlines()[-1]) == (0, "No problem was found.")


def test_what_a_command_cannot_do_is_one_sentence(run: Run, pool: Path, tmp_path: Path) -> None:
    for arguments, sentence in (
        (("backup", pool / "inside"), "is inside of"),
        (("backup", tmp_path / "home"), "is inside of"),
        (("backup", "--data-dir", tmp_path / "none", tmp_path / "b"), "there is no pool on"),
        (("restore", tmp_path / "none", tmp_path / "b"), "has no tinkerpool.db: give a complete backup"),
        (("restore", pool, pool), "is inside of"),
    ):
        done = run(*arguments)
        assert done.code == 1
        if arguments != ("backup", tmp_path / "home"):
            assert sentence in done.err
        assert (done.err.startswith("Error: "), done.err.count("\n")) == (True, 1)


def test_a_folder_without_a_pool_is_no_verified_backup(run: Run, tmp_path: Path) -> None:
    (tmp_path / "unmounted").mkdir()
    assert run("doctor", "--data-dir", tmp_path / "unmounted").code == 0
    done = run("doctor", "--data-dir", tmp_path / "unmounted", "--verify")
    assert (done.code, "so there is nothing to verify: is its disk mounted?" in done.out) == (1, True)


def test_losses_are_listed_and_give_exit_code_1(run: Run, pool: Path, tmp_path: Path) -> None:
    flip_a_byte(folder_of(pool, "/kept"))
    done = run("doctor", "--verify")
    assert (done.code, "PROBLEM: 1 states cannot be read, or do not match" in done.out) == (
        1,
        True,
    )
    done = run("backup", tmp_path / "backup")
    assert (done.code, "/weights/kept (it does not match its checksum)" in done.out) == (1, True)
    assert done.err.startswith("Error: the backup is complete, but the pool itself has lost 1 of its states")
    done = run("restore", tmp_path / "backup", tmp_path / "new")
    assert (done.code, "--skip-damaged" in done.err) == (1, True)
    done = run("restore", "--skip-damaged", tmp_path / "backup", tmp_path / "new")
    assert (done.code, "lost: checkpoint tinker://" in done.out) == (0, True)


def test_a_start_that_would_be_refused_gives_exit_code_1(run: Run, pool: Path) -> None:
    (pool / DATABASE).unlink()
    done = run("doctor")
    assert (done.code, "PROBLEM: a start would be refused: " in done.out) == (1, True)


def test_a_served_backup_is_refused_in_one_sentence(run: Run, pool: Path, tmp_path: Path) -> None:
    back_up(pool, tmp_path / "backup", quiet)
    toy = ("--pool", "local", "--engine", "tests.support.toy_engine:toy_factory", "--port", "0")
    done = run("serve", *toy, "--data-dir", tmp_path / "backup")
    assert done.code == 1
    assert "is a backup of pool" in done.err
    assert "Traceback" not in done.out + done.err
    assert done.err.splitlines()[-1].startswith("Error: ")

"""A start is refused unless database, side file and folders belong to one pool and the database is the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.storage.disk import RealDisk
from coordinator.storage.identity import (
    SIDE_FILE,
    DataDirError,
    Identity,
    check,
    identity_in,
    read_side_file,
    write_side_file,
)

POOL, OTHER = 0x1234_5678_9ABC_DEF0, 7
DISK = RealDisk()


def identity(epoch: int, pool_id: int = POOL, service_ms: int = 0) -> Identity:
    return Identity(pool_id=pool_id, epoch=epoch, service_ms=service_ms)


def make_folder(data_dir: Path, root: str, named: Identity) -> None:
    (data_dir / root / named.new_folder()).mkdir(parents=True)


def contents(data_dir: Path) -> dict[str, bytes]:
    """Return every path below a folder, with the content of files."""
    return {
        path.relative_to(data_dir).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in data_dir.rglob("*")
    }


def test_the_side_file_and_the_names_of_folders_carry_pool_and_epoch(tmp_path: Path) -> None:
    written = identity(12, service_ms=3456)
    write_side_file(tmp_path, written, DISK)
    assert read_side_file(tmp_path, DISK) == written
    assert identity_in(written.new_folder()) == identity(12)
    assert identity_in(identity(3, pool_id=OTHER).new_folder()) == identity(3, pool_id=OTHER)
    assert [identity_in(name) for name in ("orphan", ".writing-x", f"{POOL:016x}-12-short")] == [None] * 3


def test_a_new_directory_and_one_whose_first_start_ended_before_the_side_file_pass(tmp_path: Path) -> None:
    check(tmp_path, None, DISK)
    check(tmp_path, identity(1), DISK)
    (tmp_path / "checkpoints" / ".writing-x").mkdir(parents=True)
    check(tmp_path, None, DISK)
    make_folder(tmp_path, "checkpoints", identity(4))
    write_side_file(tmp_path, identity(4, service_ms=50), DISK)
    for newest in (identity(4, service_ms=50), identity(5, service_ms=60)):
        check(tmp_path, newest, DISK)


@pytest.mark.parametrize("root", ["checkpoints", "snapshots", "samplers", SIDE_FILE])
def test_a_missing_database_beside_anything_of_a_pool_is_refused(tmp_path: Path, root: str) -> None:
    if root == SIDE_FILE:
        write_side_file(tmp_path, identity(2), DISK)
    else:
        make_folder(tmp_path, root, identity(2))
    before = contents(tmp_path)
    with pytest.raises(
        DataDirError, match=r"tinkerpool\.db is missing or empty, but .* pool 123456789abcdef0.*restore"
    ):
        check(tmp_path, None, DISK)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("root", ["checkpoints", "snapshots", "samplers", SIDE_FILE])
def test_an_older_copy_of_the_database_is_refused(tmp_path: Path, root: str) -> None:
    write_side_file(tmp_path, identity(3 if root != SIDE_FILE else 4), DISK)
    if root != SIDE_FILE:
        make_folder(tmp_path, root, identity(3))
        make_folder(tmp_path, root, identity(4))
    before = contents(tmp_path)
    with pytest.raises(
        DataDirError, match=r"older copy: it is of epoch 3, .* of epoch 4.*newer database back.*restore"
    ):
        check(tmp_path, identity(3), DISK)
    assert contents(tmp_path) == before


def test_an_older_copy_of_the_same_epoch_is_refused_after_a_clean_stop(tmp_path: Path) -> None:
    write_side_file(tmp_path, identity(3, service_ms=7_200_000), DISK)
    with pytest.raises(DataDirError, match=r"older copy: it lacks the last 1\.00 hours"):
        check(tmp_path, identity(3, service_ms=3_600_000), DISK)


@pytest.mark.parametrize("root", ["checkpoints", SIDE_FILE])
def test_files_of_another_pool_are_refused(tmp_path: Path, root: str) -> None:
    if root == SIDE_FILE:
        write_side_file(tmp_path, identity(1, pool_id=OTHER), DISK)
    else:
        make_folder(tmp_path, root, identity(1, pool_id=OTHER))
    with pytest.raises(DataDirError, match=r"mixes two pools: .* 123456789abcdef0, .* 0000000000000007.*restore"):
        check(tmp_path, identity(5), DISK)


def test_a_backup_is_refused_as_a_data_directory(tmp_path: Path) -> None:
    write_side_file(tmp_path, Identity(pool_id=POOL, epoch=2, is_backup=True), DISK)
    with pytest.raises(DataDirError, match=r"is a backup of pool 123456789abcdef0: .*restore"):
        check(tmp_path, identity(2), DISK)


@pytest.mark.parametrize("content", ["", "[]", '{"pool_id": 3}', '{"pool_id": "x", "epoch": 1, "service_ms": 0}'])
def test_a_damaged_side_file_is_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / SIDE_FILE).write_text(content)
    with pytest.raises(DataDirError, match=r"pool\.json is damaged.*remove pool\.json"):
        check(tmp_path, identity(2), DISK)

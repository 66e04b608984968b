"""The data directory: a refused one is left as it was; an epoch is noted before anything is named after it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Failure
from coordinator.runtime.data_dir import NOTE_S, DataDir, DataDirError, DataDirInUse, Seams
from coordinator.storage.disk import RealDisk
from coordinator.storage.identity import DATABASE, SIDE_FILE, Identity, read_side_file
from tests.support.faults import failing
from tests.support.toy_engine import toy_model_info
from tests.support.toy_pool import FakeTime
from tinkerpool.serving import LOCK_FILE
from workers.contract.messages import AdapterSpec, AdapterState

SPEC = AdapterSpec(
    adapter_id="s:train:0", rank=8, alpha=16.0, seed=3, train_attn=True, train_mlp=True, train_unembed=False
)
STATE = AdapterState(weights=b"w" * 3000, optimizer=b"m" * 50, num_steps=4, applied_seq=9, fingerprint="toy")


def opened(path: Path, *, now: float = 1.0) -> DataDir:
    return DataDir(CoordinatorConfig(data_dir=path), FakeTime(now=now), Failure(), Seams())


async def epoch(path: Path, *, service_s: float = 0.0) -> Identity:
    """Run an epoch of so many seconds, with a folder; return the identity at its end."""
    time = FakeTime(now=1.0)
    data_dir = DataDir(CoordinatorConfig(data_dir=path), time, Failure(), Seams())
    await data_dir.begin_epoch()
    identity = data_dir.store.identity()
    (path / "checkpoints" / identity.new_folder()).mkdir(mode=0o700)
    time.now += service_s
    await data_dir.store.sessions.end("nobody", 0.0)
    identity = data_dir.store.identity()
    await data_dir.close()
    return identity


def listing(path: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything in a folder: the mode of each file and folder, and a file's content.

    Of the lock and of the index of SQLite's log only the mode: both are rewritten when they are used.
    """
    return {
        each.relative_to(path).as_posix(): (
            each.stat().st_mode,
            each.read_bytes() if each.is_file() and each.name not in {"lock", f"{DATABASE}-shm"} else b"",
        )
        for each in [path, *path.rglob("*")]
    }


def copy_of_killed(path: Path, to: Path) -> Path:
    """Return a copy of a data directory, as a kill would leave it."""
    return Path(shutil.copytree(path, to, copy_function=shutil.copy2))


async def test_the_side_file_has_pool_and_epoch_before_a_folder_is_named_after_them(tmp_path: Path) -> None:
    data_dir = opened(tmp_path / "pool")
    with pytest.raises(AssertionError, match="the epoch has not begun"):
        data_dir.folders.checkpoints.write(None, None, None)  # type: ignore[arg-type]
    assert await data_dir.begin_epoch() == 1
    side = read_side_file(tmp_path / "pool", RealDisk())
    assert side == data_dir.store.identity()
    assert side is not None
    assert side.pool_id > 0
    await data_dir.close()


async def test_two_pools_have_different_ids_and_epochs_only_grow(tmp_path: Path) -> None:
    one, again, other = await epoch(tmp_path / "a"), await epoch(tmp_path / "a"), await epoch(tmp_path / "b")
    assert (one.pool_id, one.epoch + 1) == (again.pool_id, again.epoch)
    assert other.pool_id != one.pool_id


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_start_on_an_older_copy_of_the_database_is_refused_and_changes_nothing(
    tmp_path: Path, is_killed: bool
) -> None:
    pool = tmp_path / "pool"
    await epoch(pool)
    running = opened(pool)
    await running.begin_epoch()
    older = copy_of_killed(pool, tmp_path / "older") if is_killed else None
    await running.close()
    older = older or copy_of_killed(pool, tmp_path / "older")
    await epoch(pool)
    for file in older.glob(f"{DATABASE}*"):
        shutil.copy2(file, pool / file.name)
    before = listing(pool)
    with pytest.raises(DataDirError, match=r"older copy: it is of epoch 2, and .* of epoch 3"):
        opened(pool)
    assert listing(pool) == before


async def test_a_copy_from_within_the_last_epoch_is_refused_after_a_clean_stop(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    await epoch(pool)
    older = (pool / DATABASE).read_bytes()
    now = await epoch(pool, service_s=7200.0)
    (pool / DATABASE).write_bytes(older)
    with sqlite3.connect(pool / DATABASE) as db:  # as a copy that was made during that epoch
        db.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (now.epoch,))
    db.close()
    with pytest.raises(DataDirError, match=r"lacks the last 2\.00 hours"):
        opened(pool)


async def test_a_copy_from_within_the_epoch_of_a_killed_pool_is_refused(tmp_path: Path) -> None:
    time = FakeTime(now=1.0)
    data_dir = DataDir(CoordinatorConfig(data_dir=tmp_path / "pool"), time, Failure(), Seams())
    await data_dir.begin_epoch()
    noting = asyncio.create_task(data_dir.keep_noting(time))
    await asyncio.sleep(0)
    killed = copy_of_killed(tmp_path / "pool", tmp_path / "killed")
    time.now += NOTE_S
    await data_dir.store.sessions.end("nobody", 0.0)  # the commit stores the service time
    await time.advance(1.0)
    while (side := read_side_file(tmp_path / "pool", RealDisk())) is None or not side.service_ms:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    shutil.copy2(tmp_path / "pool" / SIDE_FILE, killed / SIDE_FILE)
    with pytest.raises(DataDirError, match=r"older copy: it lacks the last 0\.17 hours"):
        opened(killed)
    noting.cancel()
    await data_dir.close()


@pytest.mark.parametrize("with_lock", [False, True])
async def test_a_start_without_the_database_is_refused_and_changes_nothing(tmp_path: Path, with_lock: bool) -> None:
    pool = tmp_path / "pool"
    await epoch(pool)
    (pool / DATABASE).unlink()
    if not with_lock:
        (pool / "lock").unlink()
    before = listing(pool)
    with pytest.raises(DataDirError, match=r"tinkerpool\.db is missing"):
        opened(pool)
    assert listing(pool) == before


async def test_a_start_after_the_epoch_was_raised_and_before_the_side_file_passes(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    await epoch(pool)
    side = (pool / SIDE_FILE).read_bytes()
    assert (await epoch(pool)).epoch == 2
    (pool / SIDE_FILE).write_bytes(side)
    assert (await epoch(pool)).epoch == 3
    (pool / SIDE_FILE).unlink()
    assert (await epoch(pool)).epoch == 4


async def test_an_epoch_begins_on_a_full_disk_and_not_on_a_failing_one(tmp_path: Path) -> None:
    data_dir = opened(tmp_path)
    with failing(RealDisk, "write", OSError(errno.EIO, "Input/output error")), pytest.raises(OSError, match="Input"):
        await data_dir.begin_epoch()
    with failing(RealDisk, "write", OSError(errno.ENOSPC, "No space left on device")):
        assert await data_dir.begin_epoch() == 2
    await data_dir.close()
    side = read_side_file(tmp_path, RealDisk())
    assert side is not None
    assert side.epoch == 2


def test_a_file_that_is_no_database_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_bytes(b"no database" * 100)
    with pytest.raises(DataDirError, match=r"tinkerpool\.db cannot be read: file is not a database"):
        opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [DATABASE]


def modes(path: Path) -> dict[str, int]:
    return {each.relative_to(path).as_posix(): stat.S_IMODE(each.stat().st_mode) for each in [path, *path.rglob("*")]}


async def test_everything_that_a_start_makes_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o022)  # of a process that does not care
    try:
        data_dir = opened(tmp_path / "pool")
        await data_dir.begin_epoch()
        data_dir.folders.checkpoints.write(SPEC, toy_model_info(), STATE)
        found = modes(tmp_path / "pool")
        await data_dir.close()
    finally:
        os.umask(before)
    assert len(found) > 12
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}


async def test_a_start_closes_to_other_users_what_exists_and_leaves_files_of_others_alone(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    identity = await epoch(pool)
    folder = pool / "snapshots" / identity.new_folder()
    for path in (folder / "state.json", pool / "serve.log", pool / "tokenizers" / "m" / "vocab", pool / "notes"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for path in [pool, *pool.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o664)
    await epoch(pool)
    found = modes(pool)
    assert found.pop("notes") == 0o664
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}
    assert {found["."], found["snapshots"]} == {0o700}
    assert {found["serve.log"], found[DATABASE], found[f"snapshots/{folder.name}/state.json"]} == {0o600}


async def test_a_directory_that_all_users_share_stays_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    await epoch(shared)
    found = modes(shared)
    assert found.pop(".") == 0o1777
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}


def test_a_data_directory_on_a_network_file_system_is_refused_before_it_is_made(tmp_path: Path) -> None:
    table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:50 / {tmp_path} rw - nfs4 server:/export rw\n"
    with pytest.raises(DataDirError, match=r"network file system \(nfs4, mounted at .*disk of this machine"):
        DataDir(CoordinatorConfig(data_dir=tmp_path / "pool"), FakeTime(), Failure(), Seams(mounts=lambda: table))
    assert not (tmp_path / "pool").exists()


async def test_a_start_succeeds_while_another_process_asks_whether_a_pool_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = opened(tmp_path)
    await data_dir.close()
    with (tmp_path / LOCK_FILE).open() as asking:  # as `running_pid` does
        fcntl.flock(asking, fcntl.LOCK_SH)
        monkeypatch.setattr("coordinator.runtime.data_dir.sleep", lambda _: fcntl.flock(asking, fcntl.LOCK_UN))
        await opened(tmp_path).close()


async def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    data_dir = opened(tmp_path)
    with pytest.raises(DataDirInUse, match=rf"in use by another tinkerpool \(process {os.getpid()}\)"):
        opened(tmp_path)
    await data_dir.close()

"""Backups of a running pool: consistent whatever it writes and deletes meanwhile, complete or not there at all."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.runtime import backup as backups
from coordinator.runtime.backup import Backup, Progress, back_up, remove_leftovers
from coordinator.storage import copies
from coordinator.storage.copies import NamedState, named_states, read_database
from coordinator.storage.disk import RealDisk
from coordinator.storage.identity import DATABASE, SIDE_FILE, DataDirError, identity_of, read_side_file
from coordinator.storage.sqlite import Connection, open_read_only, open_target, problems_of
from tests.support.disk.backups import flip_a_byte, folder_of, lost, quiet, trained, unreadable
from tests.support.toy_pool import running_pool


async def test_a_backup_of_a_running_pool_has_every_state_that_its_database_names(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool", replay_s_max=1e-6) as pool:
        await trained(pool)
        identity = pool.store.identity()
        made = await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
    assert (made.identity.pool_id, made.identity.epoch, made.damaged) == (identity.pool_id, identity.epoch, [])
    assert made.num_states == 3
    assert lost(tmp_path / "backup") == []
    side = read_side_file(tmp_path / "backup", RealDisk())
    assert side is not None
    assert (side.pool_id, side.is_backup) == (identity.pool_id, True)
    assert not (tmp_path / "pool" / ".backup").exists()
    with pytest.raises(DataDirError, match="is a backup"):
        async with running_pool(tmp_path / "backup"):
            pass


async def test_a_backup_while_states_are_written_and_deleted_at_each_of_its_steps_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each report of progress the pool commits, writes a checkpoint, and deletes the one before it."""
    monkeypatch.setattr(copies, "PAGES_AT_ONCE", 8)
    seqs = iter(range(10, 10_000))
    async with running_pool(tmp_path / "pool", replay_s_max=1e-6) as pool:
        adapter = await trained(pool)
        loop = asyncio.get_running_loop()
        saved: list[str] = []
        for seq in range(7, 10):
            await pool.wait(await pool.submit(adapter, seq))

        async def change() -> None:
            operation = await pool.save(adapter, next(seqs), f"at-{len(saved)}")
            saved.append(operation.save_state.path)
            if len(saved) > 1:
                await pool.delete_checkpoint(saved[-2])

        def on_progress(_step: str, _done: int, _all: int) -> None:
            asyncio.run_coroutine_threadsafe(change(), loop).result(60)

        made = await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", on_progress)
    assert len(saved) > 10
    assert made.damaged == []
    assert lost(tmp_path / "backup") == []


async def test_a_backup_of_a_stopped_pool_that_starts_while_its_database_is_copied_has_one_moment_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PAGES_AT_ONCE", 8)
    async with running_pool(tmp_path / "pool") as pool:
        await trained(pool)
        for _ in range(10):
            await pool.adapter(user_metadata={"k": "x" * 16_000})
    loop = asyncio.get_running_loop()
    has_started = False

    async def start_and_work() -> None:
        async with running_pool(tmp_path / "pool") as pool:
            await pool.take_over()
            for name in ("a", "b"):
                await pool.save(await pool.adapter(user_metadata={"k": "y" * 16_000}), 1, name)

    def on_progress(step: str, done: int, _all: int) -> None:
        nonlocal has_started
        if step == "Copying the database" and done and not has_started:
            has_started = True
            asyncio.run_coroutine_threadsafe(start_and_work(), loop).result(60)

    made = await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", on_progress)
    assert has_started
    assert read_database(tmp_path / "backup", problems_of) == []
    assert (lost(tmp_path / "backup"), made.damaged) == ([], [])
    assert made.identity == read_database(tmp_path / "pool", identity_of)


async def test_a_state_that_is_deleted_before_it_is_linked_makes_a_later_moment_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path / "pool") as pool:
        adapter = await trained(pool)
        loop = asyncio.get_running_loop()
        rows_read = 0

        async def change() -> None:
            """Save a state that is not linked yet; its row is read, and it is deleted before it can be linked."""
            await pool.save(adapter, 7 + rows_read, f"short-lived-{rows_read}")

        async def delete(path: str) -> None:
            await pool.delete_checkpoint(path)

        def read_then_delete(db: Connection) -> list[NamedState]:
            nonlocal rows_read
            rows_read += 1
            found = named_states(db)
            for state in found:
                if "short-lived" in state.owner:
                    asyncio.run_coroutine_threadsafe(delete(state.owner), loop).result(60)
            if rows_read < 4:
                asyncio.run_coroutine_threadsafe(change(), loop).result(60)
            return found

        monkeypatch.setattr(backups, "named_states", read_then_delete)  # the moment is between two steps of a backup
        made = await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", after(change, loop))
    assert rows_read == 5
    assert made.damaged == []
    assert lost(tmp_path / "backup") == []


def after(change: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop) -> Progress:
    """Return a receiver of progress that makes a change when the states are linked."""

    def on_progress(step: str, done: int, _all: int) -> None:
        if step == "Copying the database" and not done:
            asyncio.run_coroutine_threadsafe(change(), loop).result(60)

    return on_progress


async def damaged_pool(path: Path, damage: Callable[[Path], object]) -> Backup:
    """Back up a stopped pool after one of its checkpoints was damaged."""
    async with running_pool(path) as pool:
        await trained(pool)
    damage(folder_of(path, "/kept"))
    return back_up(path, path.with_name("backup"), quiet)


async def test_states_that_the_pool_has_lost_are_reported_and_the_rest_is_backed_up(tmp_path: Path) -> None:
    made = await damaged_pool(tmp_path / "a" / "pool", flip_a_byte)
    assert [text.rpartition(" (")[2] for text in made.damaged] == ["it does not match its checksum)"]
    made = await damaged_pool(tmp_path / "b" / "pool", shutil.rmtree)
    assert [text.rpartition(" (")[2] for text in made.damaged] == ["its folder is missing)"]
    assert "/weights/kept" in made.damaged[0]
    assert made.num_states == 2


async def test_a_state_that_the_disk_cannot_read_is_reported_and_the_rest_is_backed_up(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool") as pool:
        adapter = await trained(pool)
    bad = folder_of(tmp_path / "pool", "/kept")
    with unreadable(bad):
        made = back_up(tmp_path / "pool", tmp_path / "backup", quiet)
    assert made.damaged == [f"checkpoint tinker://{adapter}/weights/kept (it cannot be read)"]
    assert made.num_states == 2
    assert lost(tmp_path / "backup") == [f"checkpoint tinker://{adapter}/weights/kept"]
    assert not (tmp_path / "backup" / "checkpoints" / bad.name).exists()


async def test_a_backup_goes_only_into_an_empty_folder_outside_of_the_pool(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool"):
        pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    for target, sentence in (
        (tmp_path / "full", "is not empty: choose a new folder$"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "pool" / "backup", "is inside of"),
    ):
        with pytest.raises(DataDirError, match=sentence):
            back_up(tmp_path / "pool", target, quiet)
    with pytest.raises(DataDirError, match="there is no pool in"):
        back_up(tmp_path / "full", tmp_path / "backup", quiet)
    assert not (tmp_path / "backup").exists()
    (tmp_path / "empty").mkdir()
    back_up(tmp_path / "pool", tmp_path / "empty", quiet)


async def test_a_killed_backup_is_not_complete_and_its_leftovers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, target = tmp_path / "pool", tmp_path / "backup"
    async with running_pool(pool) as toys:
        await trained(toys)
    before = sorted(pool.rglob("*"))

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(backups, "copy_file", kill)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process removes nothing
        with pytest.raises(Killed):
            back_up(pool, target, quiet)
    assert (pool / ".backup").exists()
    assert not {DATABASE, SIDE_FILE} & {path.name for path in target.iterdir()}
    with pytest.raises(DataDirError, match="interrupted copy"):
        back_up(pool, target, quiet)
    back_up(pool, tmp_path / "next", quiet)
    assert sorted(pool.rglob("*")) == before

    (pool / ".backup" / "checkpoints").mkdir(parents=True)
    remove_leftovers(pool)
    assert sorted(pool.rglob("*")) == before
    remove_leftovers(pool)


async def test_a_running_backup_keeps_its_links_when_a_pool_starts_and_excludes_another_backup(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    async with running_pool(pool) as toys:
        await trained(toys)
    seen: list[str] = []

    def on_progress(_step: str, _done: int, _all: int) -> None:
        if not seen:
            remove_leftovers(pool)
            seen.extend(path.name for path in (pool / ".backup").iterdir())
            with pytest.raises(DataDirError, match="another `tinkerpool backup`"):
                back_up(pool, tmp_path / "other", quiet)

    def after_the_links(step: str, done: int, num_bytes: int) -> None:
        if step == "Copying the database":
            on_progress(step, done, num_bytes)

    back_up(pool, tmp_path / "backup", after_the_links)
    assert "checkpoints" in seen
    assert lost(tmp_path / "backup") == []


async def test_everything_in_a_backup_is_for_its_owner_only(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool") as pool:
        await trained(pool)
        before = os.umask(0o022)
        try:
            await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
        finally:
            os.umask(before)
    assert [path for path in (tmp_path / "backup").rglob("*") if path.stat().st_mode & 0o077] == []


async def test_a_copy_of_the_database_has_one_moment_of_it_although_others_write_between_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PAGES_AT_ONCE", 1)
    async with running_pool(tmp_path) as pool:
        await pool.store.database.execute("INSERT INTO cycles VALUES (1, ?)", (b"x" * 100_000,))
        loop = asyncio.get_running_loop()
        num_steps = 0

        def on_bytes(_: int) -> None:
            nonlocal num_steps
            num_steps += 1
            sql = "INSERT INTO cycles VALUES (?, ?)"
            write = pool.store.database.execute
            asyncio.run_coroutine_threadsafe(_awaited(lambda: write(sql, (1 + num_steps, b"y"))), loop).result(60)

        def copy() -> list[int]:
            with closing(open_target(tmp_path / "copy.db")) as target:
                with closing(open_read_only(tmp_path / DATABASE)) as source, copies.one_moment(source):
                    copies.copy_database(source, target, on_bytes)
                assert problems_of(target) == []
                return [row[0] for row in target.execute("SELECT cycle_id FROM cycles")]

        assert await asyncio.to_thread(copy) == [1]
    assert num_steps > 20


async def _awaited(write: Callable[[], asyncio.Future[int]]) -> int:
    return await write()

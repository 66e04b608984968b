"""A restored pool has the states of its source under an identity of its own, and refuses the clients of before."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

import tinkerpool
from coordinator.base.errors import Code, ServiceError
from coordinator.runtime import restore as restores
from coordinator.runtime.backup import back_up
from coordinator.runtime.doctor import examine
from coordinator.runtime.restore import restore
from coordinator.storage.copies import named_states, read_database
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import StateFiles
from coordinator.storage.identity import DATABASE, SIDE_FILE, DataDirError, identity_in, identity_of, read_side_file
from tests.support.database import query
from tests.support.disk.backups import flip_a_byte, folder_of, quiet, trained, unreadable
from tests.support.faults import failing
from tests.support.served_pool import restartable_pool
from tests.support.toy_pool import LENGTHS, expected_chain, pass_request, refusal, running_pool
from tinkerpool.v1 import checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1.adapters_pb2 import ListAdaptersRequest

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


async def backed_up(tmp_path: Path) -> tuple[Path, str]:
    """Return a backup of a pool that goes on training after it, and its adapter."""
    async with running_pool(tmp_path / "pool", replay_s_max=1e-6) as pool:
        adapter = await trained(pool)
        await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
        await pool.wait(*[await pool.submit(adapter, seq) for seq in range(7, 10)])
        await pool.save(adapter, 10, "later")
    return tmp_path / "backup", adapter


def problems(data_dir: Path) -> list[str]:
    return examine(data_dir, None, is_verified=True, on_progress=quiet).problems


async def test_a_restored_pool_has_every_state_bit_for_bit_and_an_identity_of_its_own(tmp_path: Path) -> None:
    backup, adapter = await backed_up(tmp_path)
    before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    made = restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    assert {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()} == before
    assert made.lost == problems(tmp_path / "new") == problems(backup) == []
    assert (made.identity.pool_id != made.source.pool_id, made.identity.epoch) == (True, made.source.epoch + 1)
    assert read_side_file(tmp_path / "new", RealDisk()) == made.identity
    states = read_database(tmp_path / "new", named_states) or []
    assert len(states) == 3
    assert {identity_in(state.folder) for state in states} == {made.identity}
    async with running_pool(tmp_path / "pool") as pool:
        await pool.take_over()
        expected = {name: await pool.export(f"tinker://{adapter}/{name}") for name in PATHS}
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        assert pool.core.epoch == made.identity.epoch + 1
        assert {name: await pool.export(f"tinker://{adapter}/{name}") for name in PATHS} == expected
        named = ListAdaptersRequest(name_prefix="trained", labels={"team": "nlp"})
        listed = await pool.service.list_adapters(await pool.principal(), named)
        assert [each.adapter_id for each in listed.adapters] == [adapter]
        again = await pool.adapter()
        [loaded] = await pool.wait(await pool.load_state(again, 1, f"tinker://{adapter}/weights/kept"))
        assert loaded.state == SUCCEEDED
        spec = pool.spec_of(adapter)
        assert pool.chain(again) == expected_chain(spec, [((1, 2), 3)])


PATHS = ("weights/kept", "sampler_weights/named")


async def test_an_adapter_of_before_accepts_no_number_of_its_client_and_keeps_its_state(tmp_path: Path) -> None:
    """Its client has seen operations 7 to 10 succeed, which the backup does not have."""
    backup, adapter = await backed_up(tmp_path)
    restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        for seq in (7, 11):
            refused = await refusal(pool.submit(adapter, seq))
            assert (refused.code, refused.reason) == (Code.FAILED_PRECONDITION, "POOL_RESTORED")
            assert refused.retry_delay_s is None
        assert (await refusal(pool.wait(f"{adapter}:10"))).code is Code.NOT_FOUND
        assert (await pool.wait(f"{adapter}:3"))[0].state == SUCCEEDED
        principal = await pool.principal()
        repeated = await pool.service.forward_backward(principal, pass_request(adapter, 1, LENGTHS))
        assert repeated.operation.state == SUCCEEDED
        request = checkpoints_pb2.SaveStateRequest(adapter_id=adapter, name="as-it-is", request_id="r")
        saving = await pool.service.save_state(principal, request)
        [saved] = await pool.wait(saving.operation.name)
        assert saved.state == SUCCEEDED
        fresh = await pool.adapter()
        await pool.wait(await pool.load_state(fresh, 1, saved.save_state.path))
        assert pool.chain(fresh) == expected_chain(pool.spec_of(adapter), [((1, 2), 3)])
        assert (await refusal(pool.sampler(adapter.partition(":")[0]))).reason == "SESSION_ENDED"


def test_a_running_client_of_before_is_refused_at_once_and_continues_with_a_new_one(tmp_path: Path) -> None:
    datum = tinkerpool.Datum(tinkerpool.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    pool_dir = tmp_path / "pool"
    with restartable_pool(pool_dir) as pool:
        with tinkerpool.ServiceClient(base_url=pool.url, api_key=pool.key()) as service:
            client = service.create_lora_training_client(rank=8)
            client.train_step([datum], "cross_entropy").result(60)
            path = client.save_state("kept").result(60).path
            back_up(pool_dir, tmp_path / "backup", quiet)
            client.train_step([datum], "cross_entropy").result(60)
            pool.run(_held(pool.pool))
            acknowledged = client.train_step([datum], "cross_entropy")
            while pool.pool.log_of(client.model_id).next_seq < 8:
                time.sleep(0.01)
            pool.stop()  # the doors close, then the step runs
            restore(tmp_path / "backup", tmp_path / "new", skip_damaged=False, on_progress=quiet)
            pool_dir.rename(tmp_path / "old")
            (tmp_path / "new").rename(pool_dir)
            pool.start()
            with pytest.raises(tinkerpool.errors.ApiError) as next_step:
                client.train_step([datum], "cross_entropy").result(60)
            assert next_step.value.reason == "POOL_RESTORED"
            assert "create a training client from that" in str(next_step.value)
            # Not found, or refused as above if the pool was stopped before its reply arrived.
            with pytest.raises((tinkerpool.errors.NotFound, tinkerpool.errors.FailedPrecondition)):
                acknowledged.result(60)
        with tinkerpool.ServiceClient(base_url=pool.url, api_key=pool.key()) as service:
            client = service.create_training_client_from_state_with_optimizer(path)
            assert client.train_step([datum], "cross_entropy").result(60).forward_backward.metrics


async def _held(pool: object) -> None:
    pool.hold()  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", [flip_a_byte, shutil.rmtree])
async def test_damaged_states_are_refused_with_a_list_and_left_out_only_if_asked(
    tmp_path: Path, damage: object
) -> None:
    backup, adapter = await backed_up(tmp_path)
    damage(folder_of(backup, "/kept"))  # type: ignore[operator]
    with pytest.raises(DataDirError, match=r"1 of 3 states .* damaged: checkpoint .*/weights/kept\. .*--skip"):
        restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    assert not (tmp_path / "new").exists()
    made = restore(backup, tmp_path / "new", skip_damaged=True, on_progress=quiet)
    assert made.lost == [f"checkpoint tinker://{adapter}/weights/kept"]
    assert problems(tmp_path / "new") == []
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        listed = await pool.service.list_checkpoints(await pool.principal(), checkpoints_pb2.ListCheckpointsRequest())
        assert [each.path.rpartition("/")[2] for each in listed.checkpoints] == ["named"]


async def test_a_restored_tenant_stores_what_it_stores_in_the_source_after_its_sessions_ended(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool") as pool:
        adapter = await trained(pool)
        before = pool.store.tenants.row_bytes(pool.tenant_id())
        await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
        await pool.finish_session(adapter)
        after = pool.store.tenants.row_bytes(pool.tenant_id())
    assert after < before
    restore(tmp_path / "backup", tmp_path / "new", skip_damaged=False, on_progress=quiet)
    async with running_pool(tmp_path / "new") as pool:
        assert pool.store.tenants.row_bytes(pool.tenant_id()) == after


async def test_a_state_that_the_disk_cannot_read_is_damaged(tmp_path: Path) -> None:
    backup, adapter = await backed_up(tmp_path)
    with unreadable(folder_of(backup, "/kept")):
        with pytest.raises(DataDirError, match=r"1 of 3 states .* damaged: checkpoint .*/weights/kept\. .*--skip"):
            restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
        made = restore(backup, tmp_path / "new", skip_damaged=True, on_progress=quiet)
    assert made.lost == [f"checkpoint tinker://{adapter}/weights/kept"]
    assert problems(tmp_path / "new") == []


async def test_a_state_that_may_not_be_read_is_not_counted_as_damaged(tmp_path: Path) -> None:
    """Left out with `skip_damaged` it would be lost, although another user could read it."""
    backup, _ = await backed_up(tmp_path)
    with unreadable(folder_of(backup, "/kept"), errno.EACCES), pytest.raises(PermissionError):
        restore(backup, tmp_path / "new", skip_damaged=True, on_progress=quiet)
    assert not (tmp_path / "new").exists()


async def test_an_adapter_whose_snapshot_is_lost_is_deleted_with_what_it_had_not_run(tmp_path: Path) -> None:
    """Without the snapshot its log would be replayed from the seed: other weights under the same name."""
    async with running_pool(tmp_path / "pool", replay_s_max=1e-6) as pool:
        adapter = await trained(pool)
        other = await pool.adapter()
        pool.hold()
        unfinished = await pool.submit(adapter, 7)
        await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
        await pool.release()
    flip_a_byte(folder_of(tmp_path / "backup", adapter))
    made = restore(tmp_path / "backup", tmp_path / "new", skip_damaged=True, on_progress=quiet)
    assert made.lost == [f"adapter {adapter}"]
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        assert (await refusal(pool.submit(adapter, 8))).code is Code.NOT_FOUND
        assert (await refusal(pool.wait(unfinished))).code is Code.NOT_FOUND
        assert (await pool.wait(f"{adapter}:3"))[0].state == SUCCEEDED
        assert pool.spec_of(other).adapter_id == other
        assert (await pool.export(f"tinker://{adapter}/weights/kept"))["adapter_config.json"]


async def test_a_stopped_data_directory_with_an_older_copy_of_its_database_is_restored_as_of_that_copy(
    tmp_path: Path,
) -> None:
    pool_dir = tmp_path / "pool"
    async with running_pool(pool_dir) as pool:
        adapter = await trained(pool)
    older = (pool_dir / DATABASE).read_bytes()
    async with running_pool(pool_dir) as pool:
        await pool.take_over()
        other = await pool.adapter()
        await pool.save(other, 1, "later")
        newest = pool.core.epoch
    (pool_dir / DATABASE).write_bytes(older)
    with pytest.raises(DataDirError, match=r"older copy.*tinkerpool restore .*pool NEW_DATA_DIR"):
        async with running_pool(pool_dir):
            pass
    names = sorted(path.name for path in pool_dir.rglob("*"))
    made = restore(pool_dir, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    assert sorted(path.name for path in pool_dir.rglob("*")) == names
    assert (made.source.epoch, made.identity.epoch) == (newest - 1, newest + 1)
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        assert set(await pool.export(f"tinker://{adapter}/weights/kept"))
        assert not list((tmp_path / "new" / "quarantine").iterdir())
        with pytest.raises(ServiceError):
            await pool.export(f"tinker://{other}/weights/later")


async def test_weights_without_a_file_are_rematerialized_in_the_restored_pool(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool") as pool:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in range(1, 4)])
        with failing(StateFiles, "write", OSError(28, "No space left on device")):
            await pool.publish(adapter, 4, "unwritten")
            await asyncio.to_thread(back_up, tmp_path / "pool", tmp_path / "backup", quiet)
        expected = await pool.export(f"tinker://{adapter}/sampler_weights/unwritten")
    restore(tmp_path / "backup", tmp_path / "new", skip_damaged=False, on_progress=quiet)
    async with running_pool(tmp_path / "new") as pool:
        await pool.take_over()
        while pool.store.checkpoints.unwritten():  # noqa: ASYNC110 (no event for it)
            await asyncio.sleep(0.01)
        assert await pool.export(f"tinker://{adapter}/sampler_weights/unwritten") == expected


async def test_a_source_that_a_pool_runs_on_and_a_target_that_is_not_new_are_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path / "pool"):
        with pytest.raises(DataDirError, match=r"a pool is running on .*tinkerpool backup"):
            restore(tmp_path / "pool", tmp_path / "new", skip_damaged=False, on_progress=quiet)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(DataDirError, match="is not empty"):
        restore(tmp_path / "pool", tmp_path / "full", skip_damaged=False, on_progress=quiet)
    with pytest.raises(DataDirError, match=r"has no tinkerpool\.db: give a complete backup"):
        restore(tmp_path / "full", tmp_path / "new", skip_damaged=False, on_progress=quiet)
    with pytest.raises(DataDirError, match="is inside of"):
        restore(tmp_path / "pool", tmp_path / "pool" / "new", skip_damaged=False, on_progress=quiet)
    assert not (tmp_path / "new").exists()


async def test_an_interrupted_restore_leaves_nothing_that_a_pool_starts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, _ = await backed_up(tmp_path)

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    for step in ("take_over", "write_side_file", "sync_path"):
        with monkeypatch.context() as patched:
            patched.setattr(restores, step, kill)
            patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process removes nothing
            patched.setattr(Path, "unlink", lambda *_, **__: None)
            patched.setattr(Path, "rmdir", lambda *_: None)
            with pytest.raises(Killed):
                restore(backup, tmp_path / step, skip_damaged=False, on_progress=quiet)
        assert not (tmp_path / step / DATABASE).exists()
        with pytest.raises(DataDirError, match="remove the directory and restore again"):
            async with running_pool(tmp_path / step):
                pass


async def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    backup, _ = await backed_up(tmp_path)
    with sqlite3.connect(backup / DATABASE) as db:
        [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'checkpoints_by_tenant'").fetchone()
        [page_bytes] = db.execute("PRAGMA page_size").fetchone()
    db.close()
    with (backup / DATABASE).open("r+b") as file:
        file.seek((root - 1) * page_bytes + 8)
        file.write(b"\xff" * 64)
    with pytest.raises(DataDirError, match=r"tinkerpool\.db (is damaged|cannot be read)"):
        restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    assert not (tmp_path / "new").exists()


async def test_a_restored_pools_rows_are_of_the_new_pool_only(tmp_path: Path) -> None:
    backup, _ = await backed_up(tmp_path)
    made = restore(backup, tmp_path / "new", skip_damaged=False, on_progress=quiet)
    new = tmp_path / "new"
    assert read_database(new, identity_of) == made.identity
    assert [row[0] for row in query(new, "SELECT COUNT(*) FROM sessions WHERE ended_at IS NULL")] == [0]
    for table in ("checkpoints", "snapshots", "samplers"):
        folders = [row[0] for row in query(new, f"SELECT folder FROM {table} WHERE folder != ''")]
        assert {identity_in(folder) for folder in folders} <= {made.identity}
    assert (new / SIDE_FILE).exists()

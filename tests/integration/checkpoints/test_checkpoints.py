"""Checkpoints over the service: contents, loads, names, expiry, and containment of damage, full disks and crashes."""

import asyncio
import errno
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.limits.turns import Turn
from coordinator.service.checkpoints import OPEN_BYTES
from coordinator.storage.disk import RealDisk
from coordinator.storage.folders import QUARANTINE_S
from coordinator.storage.sqlite import StoreBrokenError
from tests.support.faults import DISK_FULL, failing, held
from tests.support.toy_engine import ToyAdapter
from tests.support.toy_pool import FakeTime, ToyPool, refusal, running_pool
from tests.support.waiting import WAIT_S, until
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


def copy_of(pool: ToyPool, adapter_id: str) -> ToyAdapter:
    engines = [incarnations[-1] for incarnations in pool.engines.values()]
    [copy] = [engine.adapters[adapter_id] for engine in engines if adapter_id in engine.adapters]
    return copy


async def train(pool: ToyPool, adapter: str, first: int) -> int:
    """Run one step; return the next seq."""
    await pool.wait(await pool.forward_backward(adapter, first, 5), await pool.optim_step(adapter, first + 1))
    return first + 2


async def checkpoints(pool: ToyPool, **values: Any) -> list[checkpoints_pb2.Checkpoint]:
    request = checkpoints_pb2.ListCheckpointsRequest(**values)
    return list((await pool.service.list_checkpoints(await pool.principal(), request)).checkpoints)


async def test_cycles_go_on_while_folders_that_were_replaced_or_deleted_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove, removed, remove = threading.Event(), list[Path](), RealDisk.remove

    def slow_remove(disk: RealDisk, path: Path) -> None:
        may_remove.wait(WAIT_S)
        time.sleep(0.1)
        remove(disk, path)
        removed.append(path)

    async with running_pool(tmp_path, replay_s_max=1e-6) as pool:  # a snapshot after each step
        adapter, other = await pool.adapter(), await pool.adapter()
        seq = await train(pool, adapter, 1)
        path = (await pool.save(adapter, seq, "latest")).save_state.path
        await pool.wait(await pool.load_state(other, 1, path))
        monkeypatch.setattr(RealDisk, "remove", slow_remove)
        await pool.save(adapter, seq + 1, "latest", overwrite=True)
        await pool.wait(await pool.load_state(other, 2, path))
        await pool.delete_adapter(other)
        await train(pool, adapter, seq + 2)
        assert removed == []
        may_remove.set()
    assert {folder.parent.name for folder in removed} == {"checkpoints", "snapshots"}
    assert len(removed) >= 3, "a stop waits for them"


async def copied(pool: ToyPool, path: str) -> checkpoints_pb2.Checkpoint:
    request = checkpoints_pb2.CopyCheckpointRequest(path=path, request_id="copy")
    response: checkpoints_pb2.CopyCheckpointResponse = await pool.service.copy_checkpoint(
        await pool.principal(), request
    )
    return response.checkpoint


async def test_a_copy_that_a_full_disk_refused_succeeds_when_it_is_repeated_with_room(pool: ToyPool) -> None:
    path = (await pool.save(await pool.adapter(), 1, "source")).save_state.path
    with failing(pool.folders.checkpoints, "write", DISK_FULL):
        assert (await refusal(copied(pool, path))).reason == "DISK", "its adapter was made"
    first, *others = await asyncio.gather(*(copied(pool, path) for _ in range(3)))
    assert others == [first] * 2
    assert (first.seq, len(pool.core.registry.logs), len(await checkpoints(pool))) == (2, 2, 2)


async def test_a_copy_is_returned_to_a_repeat_after_its_source_and_its_session_are_gone(pool: ToyPool) -> None:
    path = (await pool.save(await pool.adapter(), 1, "source", user_metadata={"note": "x"})).save_state.path
    copy = await copied(pool, path)
    await pool.delete_checkpoint(path)
    await pool.finish_session(copy.adapter_id)
    assert await copied(pool, path) == copy
    assert (await refusal(copied(pool, path.replace("source", "other")))).reason == "ADAPTER_EXISTS"
    await pool.delete_checkpoint(copy.path)
    assert (await refusal(copied(pool, path))).reason == "NOT_FOUND"


async def test_a_listed_checkpoint_has_its_settings_seq_and_metadata(pool: ToyPool) -> None:
    adapter, other = await pool.adapter(), await pool.adapter()
    await train(pool, adapter, 1)
    await pool.save(adapter, 3, "a", user_metadata={"note": "x"})
    await pool.publish(adapter, 4, "b")
    await pool.save(other, 1, "c")
    names = [each.path.rpartition("/")[2] for each in await checkpoints(pool)]
    of_one = await checkpoints(pool, adapter_id=adapter, kind=checkpoints_pb2.CHECKPOINT_KIND_TRAINING)
    pages, token = [], ""
    for _ in range(3):
        page = await pool.service.list_checkpoints(
            await pool.principal(), checkpoints_pb2.ListCheckpointsRequest(page_size=1, page_token=token)
        )
        pages += [each.path.rpartition("/")[2] for each in page.checkpoints]
        token = page.next_page_token
    [checkpoint] = of_one
    assert names == pages == ["c", "b", "a"]
    assert token == ""
    assert (checkpoint.seq, checkpoint.rank, checkpoint.base_model) == (3, 8, "toy")
    assert (checkpoint.adapter_id, checkpoint.fingerprint) == (adapter, "toy")
    assert dict(checkpoint.user_metadata) == {"note": "x"}
    assert checkpoint.size_bytes > 0


async def test_an_adapters_newest_checkpoint_is_that_of_its_last_save_after_a_step_of_the_wall_clock(
    tmp_path: Path,
) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, linger_s=0.0) as pool:
        adapter = await pool.adapter()
        await pool.save(adapter, 1, "old")
        time.wall_offset -= 600
        await pool.save(adapter, 2, "new")
        [newest] = (await pool.service.newest_checkpoints(await pool.principal(), [adapter])).values()
    assert newest.path.endswith("/new")


async def test_a_checkpoint_whose_owner_extends_it_while_others_expire_is_kept(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    saves = [await pool.save(adapter, seq, f"{seq}", ttl_seconds=3600) for seq in (1, 2)]
    paths = [each.save_state.path for each in saves]
    for path in paths:
        row = pool.store.checkpoints.by_path(path)
        assert row is not None
        await pool.store.checkpoints.set_expiry(path, row.expires_at, pool.store.service_time())
    with held(pool.folders.checkpoints, "remove") as removing:
        sweep = asyncio.create_task(pool.core.states.remove_expired())
        await removing.until_begun()
        [left] = await checkpoints(pool)
        request = checkpoints_pb2.SetCheckpointTtlRequest(path=left.path, ttl_seconds=0)
        await pool.service.set_checkpoint_ttl(await pool.principal(), request)
    await sweep
    assert [each.path for each in await checkpoints(pool)] == [left.path]
    assert pool.core.holdings.num_checkpoints(pool.tenant_id()) == 1
    await pool.export(left.path)


async def test_a_save_under_a_used_name_fails_and_keeps_the_first_checkpoint(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    first = await pool.save(adapter, 1, "same")
    seq = await train(pool, adapter, 2)
    again = await pool.save(adapter, seq, "same")
    pool.hold()
    names = [await pool.submit_save(adapter, each, "twice") for each in (seq + 1, seq + 2)]  # in one cycle
    await pool.release()
    one, two = await pool.wait(*names)
    published = await pool.publish(adapter, seq + 3, "same")
    [checkpoint] = [each for each in await checkpoints(pool) if each.path == first.save_state.path]
    assert (again.state, again.error.code, again.error.reason) == (FAILED, 6, "CHECKPOINT_EXISTS")
    assert first.save_state.path in again.error.message
    assert (one.state, two.state, published.state) == (SUCCEEDED, FAILED, SUCCEEDED)
    assert checkpoint.seq == 1


async def test_overwriting_replaces_a_checkpoint_and_its_sampler_does_not_sample_the_new_one(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "same", overwrite=True)).save_state.path
        sampler = await pool.sampler(await pool.session(), model_path=path)
        seq = await train(pool, adapter, 2)
        assert (await pool.save(adapter, seq, "same", overwrite=True)).state == SUCCEEDED
        [checkpoint] = await checkpoints(pool)
        sampled, loaded = await pool.wait(await pool.sample(sampler, 1), await pool.load_state(adapter, seq + 1, path))
    assert (checkpoint.path, checkpoint.seq) == (path, seq)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
    assert (sampled.state, sampled.error.reason) == (FAILED, "NOT_FOUND")
    assert loaded.state == SUCCEEDED


async def test_a_checkpoint_is_deleted_when_its_time_to_live_is_over(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, linger_s=0.0) as pool:
        adapter = await pool.adapter()
        await pool.save(adapter, 1, "going", ttl_seconds=3600)
        await pool.save(adapter, 2, "kept", ttl_seconds=0)
        going, kept = await checkpoints(pool)
        await time.advance(10)
        assert len(await checkpoints(pool)) == 2
        time.wall_offset += 100 * 86400
        await time.advance(10)
        assert len(await checkpoints(pool)) == 2, "a jump of the wall clock expires nothing"
        time.now += 3600
        store = pool.store
        await time.until(lambda: len(store.checkpoints.folders()) == 1, 100)
        [left] = await checkpoints(pool)
        with pytest.raises(ServiceError, match="it may have expired, or was deleted"):
            await pool.adapter(base_model="", rank=0, from_path=going.path)
        with pytest.raises(ServiceError, match="with a name"):
            await pool.submit_publish(adapter, 3, ttl_seconds=5)
        with pytest.raises(ServiceError, match="or more"):
            await pool.save(adapter, 4, "negative", ttl_seconds=-1)
        for seq, ttl_seconds in ((5, 100 * 365 * 86_400 + 1), (6, 2**63 - 1)):
            with pytest.raises(ServiceError, match="100 years"):
                await pool.save(adapter, seq, "endless", ttl_seconds=ttl_seconds)
        await pool.save(adapter, 7, "longest", ttl_seconds=100 * 365 * 86_400)
        assert len(await checkpoints(pool)) == 2
    assert going.HasField("expire_time")
    assert not kept.HasField("expire_time")
    assert left.path == kept.path


async def test_a_deleted_checkpoint_is_gone_and_its_name_is_free(tmp_path: Path, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    path = (await pool.save(adapter, 1, "first")).save_state.path
    await pool.delete_checkpoint(path)
    assert await checkpoints(pool) == []
    assert list((tmp_path / "checkpoints").iterdir()) == []
    for call in (pool.delete_checkpoint(path), pool.load_state(adapter, 2, path), pool.export(path)):
        assert (await refusal(call)).code is Code.NOT_FOUND
    assert (await pool.save(adapter, 3, "first")).state == SUCCEEDED


async def test_checkpoints_outlive_their_adapter(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    await train(pool, adapter, 1)
    chain = copy_of(pool, adapter).chain
    path = (await pool.save(adapter, 3, "kept")).save_state.path
    await pool.delete_adapter(adapter)
    child = await pool.adapter(from_path=path, base_model="", rank=0)
    await pool.wait(await pool.forward_backward(child, 1, 4))
    assert copy_of(pool, child).chain == chain


async def test_an_adapter_from_a_checkpoint_has_its_state_and_outlives_it(tmp_path: Path, pool: ToyPool) -> None:
    adapter = await pool.adapter(alpha=16.0)
    await train(pool, adapter, 1)
    before = copy_of(pool, adapter)
    path = (await pool.save(adapter, 3, "start")).save_state.path
    with_it = await pool.adapter(from_path=path, with_optimizer=True)
    without = await pool.adapter(from_path=path)
    await pool.delete_checkpoint(path)
    for child, moments, num_steps in ((with_it, before.moments, 1), (without, b"", 0)):
        await pool.wait(await pool.forward_backward(child, 1, 4))
        copy = copy_of(pool, child)
        assert (copy.chain, copy.moments, copy.progress.num_steps) == (before.chain, moments, num_steps)
        assert copy.spec.alpha == 16.0
    chains = []
    for child in (with_it, without):
        await pool.wait(await pool.optim_step(child, 2))
        chains.append(copy_of(pool, child).chain)
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    await pool.kill_worker()
    for child, chain in zip((with_it, without), chains, strict=True):
        await pool.wait(await pool.forward_backward(child, 3, 4))
        assert copy_of(pool, child).chain == chain
    path = (await pool.save(adapter, 4, "next")).save_state.path
    with pytest.raises(ServiceError, match="rank"):
        await pool.adapter(from_path=path, rank=16)


async def test_an_adapter_whose_commit_is_unknown_keeps_the_state_that_it_starts_from(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        await train(pool, adapter, 1)
        path = (await pool.save(adapter, 3, "kept")).save_state.path
        insert = pool.store.adapters.insert

        async def insert_and_fail(*args: Any) -> None:
            await insert(*args)
            raise StoreBrokenError("the sync of the commit failed")

        with mock.patch.object(pool.store.adapters, "insert", insert_and_fail):
            refused = await refusal(pool.adapter(base_model="", rank=0, from_path=path, with_optimizer=True))
        assert refused.reason == "STORAGE_BROKEN"
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        [copy] = [row.adapter_id for row in pool.store.adapters.not_deleted() if row.adapter_id != adapter]
        assert (await pool.wait(await pool.forward_backward(copy, 1, 5)))[0].state == SUCCEEDED


async def test_concurrent_creations_of_one_index_from_different_states_make_one_adapter(
    tmp_path: Path, pool: ToyPool
) -> None:
    adapter, principal = await pool.adapter(), await pool.principal()
    path = (await pool.save(adapter, await train(pool, adapter, 1), "start")).save_state.path
    session = await pool.session()
    requests = [
        adapters_pb2.CreateAdapterRequest(session_id=session, index=0, base_model="toy", rank=8, from_path=source)
        for source in (path, "")
    ]
    results = await asyncio.gather(
        *(pool.service.create_adapter(principal, request) for request in requests), return_exceptions=True
    )
    [refused] = [result for result in results if isinstance(result, ServiceError)]
    assert refused.code is Code.ALREADY_EXISTS
    snapshots = list((tmp_path / "snapshots").iterdir())
    started_from_path = not isinstance(results[0], ServiceError)
    assert len(snapshots) == int(started_from_path)


async def test_a_damaged_checkpoint_is_never_loaded_and_affects_no_other_adapter(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, neighbour = await pool.adapter(), await pool.adapter("bob")
        path = (await pool.save(adapter, 1, "first")).save_state.path
        [weights] = (tmp_path / "checkpoints").glob("*/adapter_model.safetensors")
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
        session = adapter.partition(":")[0]
        sampler = await pool.sampler(session, model_path=path)
        loaded, step, fine, sample = await pool.wait(
            await pool.load_state(adapter, 2, path),
            await pool.optim_step(adapter, 3),
            await pool.forward_backward(adapter, 4, 5),
            await pool.sample(sampler, 1),
        )
        exported = await refusal(pool.export(path))
        created = await refusal(pool.adapter(from_path=path))
        other = await pool.forward_backward(neighbour, 1, 5, tenant="bob")
        assert (await pool.wait(other, tenant="bob"))[0].state == SUCCEEDED
    assert (loaded.error.code, sample.error.code) == (15, 15)
    assert exported.code is created.code is Code.DATA_LOSS
    assert step.error.reason == "GRADIENT_WINDOW_CLOSED", "a step after a failed load would change other weights"
    assert fine.state == SUCCEEDED
    assert str(tmp_path) not in loaded.error.message


async def test_a_checkpoint_that_goes_before_its_files_are_read_is_gone_and_not_damaged(
    tmp_path: Path, pool: ToyPool
) -> None:
    """It is overwritten, or deleted, after its row was read."""
    adapter, other, principal = await pool.adapter(), await pool.adapter(), await pool.principal()
    path = (await pool.save(adapter, 1, "latest")).save_state.path
    creation = adapters_pb2.CreateAdapterRequest(
        session_id=await pool.session(), index=0, from_path=path, with_optimizer=True
    )
    files = pool.folders.checkpoints

    async def overwrite(seq: int) -> None:
        [folder] = (tmp_path / "checkpoints").iterdir()
        await pool.save(adapter, seq, "latest", overwrite=True)
        await until(lambda: not folder.exists())

    with held(files, "read") as reading:
        creating = asyncio.create_task(refusal(pool.service.create_adapter(principal, creation)))
        await reading.until_begun()
        await overwrite(2)
    assert (await creating).reason == "NOT_FOUND"

    async with pool.core.file_turns.turn("other"), pool.core.file_turns.turn("another"):  # all of them
        exporting = asyncio.create_task(refusal(pool.export(path)))
        await asyncio.sleep(0.05)
        await overwrite(3)
    assert (await exporting).reason == "CHECKPOINT_GONE"

    with held(files, "read") as reading:
        load = await pool.load_state(other, 1, path)
        await reading.until_begun()
        await pool.delete_checkpoint(path)
    assert (await pool.wait(load))[0].error.reason == "NOT_FOUND"


async def test_opens_and_short_ranges_are_charged_in_turns_by_the_time_that_they_take(
    pool: ToyPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a tenant with many of them would always be next."""
    adapter, principal = await pool.adapter(), await pool.principal()
    path = (await pool.save(adapter, 1, "latest")).save_state.path
    charged = list[int]()
    monkeypatch.setattr(Turn, "use", lambda _, amount: charged.append(amount))
    file = await pool.service.file_for_tinker(principal, path, 1, "adapter_config.json")
    assert charged == [OPEN_BYTES]
    assert [len(piece) async for piece in file.read(5, 6)] == [1]
    assert charged == [OPEN_BYTES, file.num_bytes, 0], "the open, the whole block, the end"


async def test_an_adapter_whose_snapshot_is_damaged_fails_with_data_loss_and_others_continue(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, neighbour = await pool.adapter(), await pool.adapter("bob")
        await train(pool, adapter, 1)
        path = (await pool.save(adapter, 3, "kept")).save_state.path
    [snapshot] = (tmp_path / "snapshots").iterdir()
    sound = (snapshot / "state.json").read_bytes()
    (snapshot / "state.json").write_bytes(sound.replace(b"1", b"2"))
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice", "bob")
        names = [await pool.forward_backward(adapter, 4, 5), await pool.optim_step(adapter, 5)]
        other = await pool.forward_backward(neighbour, 1, 5, tenant="bob")
        failed = await asyncio.wait_for(pool.wait(*names), 60)
        assert (await pool.wait(other, tenant="bob"))[0].state == SUCCEEDED
        [later] = await asyncio.wait_for(pool.wait(await pool.forward_backward(adapter, 6, 5)), 60)
        assert pool.coordinator.health()
        child = await pool.adapter(from_path=path)
        assert (await pool.wait(await pool.forward_backward(child, 1, 5)))[0].state == SUCCEEDED
    assert [each.error.code for each in (*failed, later)] == [15, 15, 15]
    (snapshot / "state.json").write_bytes(sound)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        [mended] = await pool.wait(await pool.forward_backward(adapter, 7, 5))
    assert mended.error.reason in ("", "GRADIENT_WINDOW_CLOSED")


async def test_a_load_is_durable_with_its_state_or_fails_and_changes_nothing(tmp_path: Path) -> None:
    """The checkpoint may be deleted as soon as the load has succeeded."""
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "first")).save_state.path
        await train(pool, adapter, 2)
        chain = pool.chain(adapter)
        with failing(pool.folders.snapshots, "write", DISK_FULL):
            [failed] = await pool.wait(await pool.load_state(adapter, 4, path))
        assert failed.error.reason == "DISK"
        [closed] = await pool.wait(await pool.optim_step(adapter, 5))
        assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"
        assert pool.chain(adapter) == chain
        [loaded] = await pool.wait(await pool.load_state(adapter, 6, path))
        await pool.delete_checkpoint(path)
        chain = pool.chain(adapter)
    assert loaded.state == SUCCEEDED
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.forward_backward(adapter, 7, 3))
        assert pool.chain(adapter) == chain


async def test_a_full_disk_fails_only_the_save(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        with failing(RealDisk, "write", OSError(errno.ENOSPC, "No space left on device", str(tmp_path))):
            failed = await pool.save(adapter, 1, "first")
        assert (await pool.save(adapter, 2, "first")).state == SUCCEEDED
    assert (failed.error.code, failed.error.reason) == (8, "DISK")
    assert str(tmp_path) not in failed.error.message


async def test_folders_that_a_crash_left_without_a_row_are_quarantined_for_a_week_of_service(tmp_path: Path) -> None:
    roots = ("checkpoints", "snapshots", "samplers")
    async with running_pool(tmp_path) as pool:
        await pool.save(await pool.adapter(), 1, "kept")
        orphan = pool.store.identity().new_folder()
    for root in roots:
        (tmp_path / root / ".writing-x").mkdir()
        (tmp_path / root / orphan).mkdir()
    time = FakeTime()
    async with running_pool(tmp_path, time=time) as pool:
        await pool.take_over()
        assert len(await checkpoints(pool)) == 1
        left = {path.name for root in roots for path in (tmp_path / root).iterdir()}
        assert not left & {orphan, ".writing-x"}
        aside = sorted(path.name.partition("-")[2] for path in (tmp_path / "quarantine").iterdir())
        assert aside == sorted(f"{root}-{orphan}" for root in roots)
        time.now += QUARANTINE_S + 1
        await pool.core.states.remove_expired()
        assert list((tmp_path / "quarantine").iterdir()) == []
        assert len(await checkpoints(pool)) == 1


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 129, "a b", "é"])
async def test_a_name_that_could_be_a_path_is_refused(name: str, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    assert (await refusal(pool.save(adapter, 1, name))).code is Code.INVALID_ARGUMENT
    assert (await pool.save(adapter, 2, "fine")).state == SUCCEEDED


async def test_weights_for_sampling_cannot_be_loaded_to_train(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    path = (await pool.publish(adapter, 1, "only")).save_weights_for_sampler.path
    with pytest.raises(ServiceError, match="for sampling only"):
        await pool.load_state(adapter, 2, path)

"""A sampler checkpoint exists before its file: it is read, deleted, kept and replaced as any other checkpoint."""

import asyncio
from pathlib import Path

import pytest

from coordinator.base.errors import Code
from tests.support.publishing import (
    ROUND,
    begin_to_publish,
    chain_after,
    expected,
    folder_of,
    held_batches,
    held_files,
    publish,
    publishing_of,
    refuse_files,
    sampled,
    sampler_of,
    snapshot_seq,
    train,
)
from tests.support.toy_engine import read_chain
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb


def path_of(adapter: str, seq: int = ROUND) -> str:
    return f"tinker://{adapter}/sampler_weights/w{seq}"


async def checkpoint(pool: ToyPool, path: str) -> checkpoints_pb2.Checkpoint:
    request = checkpoints_pb2.GetCheckpointRequest(path=path)
    response: checkpoints_pb2.GetCheckpointResponse = await pool.service.get_checkpoint(await pool.principal(), request)
    return response.checkpoint


async def adapter_from(pool: ToyPool, path: str) -> str:
    request = adapters_pb2.CreateAdapterRequest(session_id=await pool.session(), from_path=path, request_id=path)
    return str((await pool.service.create_adapter(await pool.principal(), request)).adapter.adapter_id)


async def test_a_checkpoint_is_listed_before_its_file_is_written_and_exported_after(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    spec = pool.spec_of(adapter)
    with held_files(pool) as may_write:
        await train(pool, adapter, 0, is_named=True)
        before = await checkpoint(pool, path_of(adapter))
        exporting = asyncio.create_task(pool.export(path_of(adapter)))
        await asyncio.sleep(0.05)
        assert not exporting.done()
        may_write.set()
        archive = await asyncio.wait_for(exporting, 60)
    after = await checkpoint(pool, path_of(adapter))
    assert (before.sha256, before.size_bytes > 0) == ("", True)
    assert len(after.sha256) == 64
    assert after.size_bytes > before.size_bytes
    assert read_chain(archive["adapter_model.safetensors"]) == chain_after(spec, 1)


async def test_an_adapter_is_created_from_a_checkpoint_before_its_file_is_written(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    spec = pool.spec_of(adapter)
    with held_files(pool):
        await train(pool, adapter, 0, is_named=True)
        copy = await adapter_from(pool, path_of(adapter))
        sampler = await publish(pool, copy, 1)
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)
        assert (await checkpoint(pool, path_of(adapter))).sha256 == ""


async def test_a_checkpoint_without_a_file_outlives_its_session_and_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        refuse_files(pool)
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        await train(pool, adapter, 0, is_named=True)
        await pool.finish_session(adapter)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        sampler = await pool.sampler(await pool.session(), model_path=path_of(adapter))
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)
        archive = await asyncio.wait_for(pool.export(path_of(adapter)), 60)
    assert read_chain(archive["adapter_model.safetensors"]) == chain_after(spec, 1)


async def test_reads_of_a_checkpoint_are_retryable_until_it_is_rematerialized_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        refuse_files(pool)
        adapter = await pool.adapter()
        await train(pool, adapter, 0, is_named=True)
    with held_batches() as may_run:
        async with running_pool(tmp_path) as pool:
            await pool.take_over()
            refusals = []
            for reader in (pool.export(path_of(adapter)), adapter_from(pool, path_of(adapter))):
                refused = await refusal(asyncio.wait_for(reader, 60))
                refusals.append((refused.code, refused.retry_delay_s is not None))
            listed = await checkpoint(pool, path_of(adapter))
            may_run.set()
            await until(lambda: not publishing_of(pool)._versions)
            await adapter_from(pool, path_of(adapter))
    assert refusals == [(Code.UNAVAILABLE, True)] * 2
    assert listed.sha256 == ""


async def test_a_full_disk_refuses_an_export_and_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.checkpoints.published_weights.RETRY_S", 0.01)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        make_room = refuse_files(pool)
        sampler = await train(pool, adapter, 0, is_named=True)
        refused = await refusal(asyncio.wait_for(pool.export(path_of(adapter)), 60))
        assert await sampled(pool, sampler, 1)
        make_room()
        await pool.written()
        assert await pool.export(path_of(adapter))
    assert refused.retry_delay_s is not None


async def test_a_checkpoint_deleted_before_its_file_is_written_leaves_none_and_frees_the_log(tmp_path: Path) -> None:
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter = await pool.adapter()
        with held_files(pool) as may_write:
            sampler = await train(pool, adapter, 0, is_named=True)
            await pool.delete_checkpoint(path_of(adapter))
            [gone] = await asyncio.wait_for(pool.wait(await pool.sample(sampler, 1)), 60)
            for seq in range(ROUND + 1, 1000):  # a snapshot may begin after each cycle, unless one is being written
                await pool.wait(await pool.forward_backward(adapter, seq, 3))
                if snapshot_seq(pool, adapter) >= ROUND:
                    break
            assert snapshot_seq(pool, adapter) >= ROUND
            may_write.set()
        await pool.written()
        assert list((tmp_path / "checkpoints").iterdir()) == []
    assert gone.error.reason == "NOT_FOUND"


async def test_a_file_whose_row_was_deleted_meanwhile_is_removed(tmp_path: Path, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    with held_files(pool):
        await train(pool, adapter, 0, is_named=True)
        await pool.store.checkpoints.delete(path_of(adapter), ROUND)
    await pool.written()
    assert list((tmp_path / "checkpoints").iterdir()) == []


async def test_the_path_of_a_deleted_checkpoint_can_be_used_again_before_its_file_is_written(
    tmp_path: Path, pool: ToyPool
) -> None:
    adapter = await pool.adapter()
    spec, path = pool.spec_of(adapter), path_of(adapter)
    with held_files(pool):
        old = await train(pool, adapter, 0, is_named=True)
        await pool.delete_checkpoint(path)
        await pool.forward_backward(adapter, 5, 3)
        await pool.optim_step(adapter, 6)
        saved = await asyncio.wait_for(pool.publish(adapter, 7, f"w{ROUND}"), 60)
        new = await sampler_of(pool, saved)
        newest = await sampled(pool, new, 1)
    await pool.written()
    [folder] = [each.name for each in (tmp_path / "checkpoints").iterdir()]
    assert folder == folder_of(pool, new)
    archive = await pool.export(path)
    [gone] = await asyncio.wait_for(pool.wait(await pool.sample(old, 1)), 60)
    chain = read_chain(archive["adapter_model.safetensors"])
    assert chain != chain_after(spec, 1)
    assert newest == expected(chain, new)
    assert gone.error.reason == "NOT_FOUND"


async def test_a_checkpoint_that_expires_before_its_file_is_written_leaves_none(tmp_path: Path) -> None:
    async with running_pool(tmp_path, sweep_interval_s=0.01) as pool:
        adapter = await pool.adapter()
        with held_files(pool):
            saving = await begin_to_publish(pool, adapter, 1, is_named=True, ttl_seconds=1)
            [saved] = await asyncio.wait_for(pool.wait(saving), 60)
            await until(lambda: not publishing_of(pool)._versions)
        await pool.written()
        assert list((tmp_path / "checkpoints").iterdir()) == []
    assert saved.state == ops_pb.OPERATION_STATE_SUCCEEDED


async def test_a_save_for_export_completes_after_its_file_is_written(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    with held_files(pool):
        saving = await begin_to_publish(pool, adapter, 1, is_named=True, for_export=True)
        await asyncio.sleep(0.05)
        assert not publishing_of(pool)._versions
    [saved] = await asyncio.wait_for(pool.wait(saving), 60)
    assert (await checkpoint(pool, saved.save_weights_for_sampler.path)).sha256


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_save_that_overwrites_replaces_the_checkpoint_and_ends_its_samplers(
    tmp_path: Path, is_written: bool
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec, path = pool.spec_of(adapter), path_of(adapter)
        with held_files(pool) as may_write:
            old = await train(pool, adapter, 0, is_named=True)
            if is_written:
                may_write.set()
                await pool.written()
            [taken] = await pool.wait(await pool.submit_publish(adapter, 5, f"w{ROUND}"))
            await pool.forward_backward(adapter, 6, 3)
            await pool.optim_step(adapter, 7)
            names = [await pool.submit_publish(adapter, seq, f"w{ROUND}", overwrite=True) for seq in (8, 9)]
            replaced, saved = await asyncio.wait_for(pool.wait(*names), 60)
            new = await sampler_of(pool, saved)
            [gone] = await asyncio.wait_for(pool.wait(await pool.sample(old, 1)), 60)
            newest = await sampled(pool, new, 1)
            may_write.set()
            await pool.written()
        [folder] = [each.name for each in (tmp_path / "checkpoints").iterdir()]
        assert folder == folder_of(pool, new)
        row = pool.store.checkpoints.by_path(path)
        assert row is not None
        holdings = pool.core.states.holdings
        assert (holdings.num_checkpoints(row.tenant_id), pool.checkpoint_bytes(row.tenant_id)) == (1, row.size_bytes)
        chain = read_chain((await pool.export(path))["adapter_model.safetensors"])
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert read_chain((await pool.export(path))["adapter_model.safetensors"]) == chain
    assert (taken.error.reason, replaced.state) == ("CHECKPOINT_EXISTS", ops_pb.OPERATION_STATE_SUCCEEDED)
    assert gone.error.reason == "NOT_FOUND"
    assert newest == expected(chain, new)
    assert chain != chain_after(spec, 1)

"""Published weights can be sampled before their file is written, and survive crashes, deletions and full disks.

`is_named`: the weights are a sampler checkpoint and not those of an unnamed sampler.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.fleet.fleet import VERSIONS_MAX
from coordinator.storage.sqlite import StorageError
from tests.support.faults import held, held_task
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
from tests.support.toy_pool import LENGTHS, ToyPool, expected_chain, fail_appends, refusal, running_pool, tokens_of
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import Batch, BatchResult, ErrorCode, ItemError, SaveItem

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED
named_or_not = pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])


@named_or_not
async def test_weights_are_sampled_and_trained_on_before_their_file_is_written(is_named: bool, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    spec = pool.spec_of(adapter)
    with held_files(pool):
        samplers = [await train(pool, adapter, index, is_named=is_named) for index in range(3)]
        found = [await sampled(pool, sampler, 1) for sampler in samplers]
        assert [folder_of(pool, sampler) for sampler in samplers] == [""] * 3
    await pool.written()
    assert all(folder_of(pool, sampler) for sampler in samplers)
    assert not publishing_of(pool).is_unwritten(adapter), "weights in a file are not held in memory"
    assert found == [expected(chain_after(spec, n), s) for n, s in enumerate(samplers, 1)]


@named_or_not
async def test_weights_without_a_file_are_rematerialized_after_a_crash_with_the_same_bits(
    tmp_path: Path, is_named: bool
) -> None:
    """Also if their adapter was trained further, and for samples without an outcome."""
    async with running_pool(tmp_path, num_workers=2, is_crash=True) as pool:
        refuse_files(pool)
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        samplers = [await train(pool, adapter, index, is_named=is_named) for index in range(3)]
        before = [await sampled(pool, sampler, 1) for sampler in samplers]
        await pool.forward_backward(adapter, 13, *LENGTHS)
        pool.hold()
        unfinished = [await pool.sample(sampler, 2, seed=7) for sampler in samplers]
    async with running_pool(tmp_path, num_workers=2) as pool:
        await pool.take_over()
        finished = [tokens_of(each) for each in await asyncio.wait_for(pool.wait(*unfinished), 60)]
        after = [await sampled(pool, sampler, 3) for sampler in samplers]
        await pool.written()
        assert all(folder_of(pool, sampler) for sampler in samplers)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert pool.engines["w0"][-1].batches == [], "nothing is left to replay after a clean stop"
        from_files = [await sampled(pool, sampler, 4) for sampler in samplers]
    assert before == [expected(chain_after(spec, n), s) for n, s in enumerate(samplers, 1)]
    assert before == finished == after == from_files


@named_or_not
async def test_no_snapshot_cuts_the_log_before_the_file_is_written_and_one_does_after(
    tmp_path: Path, is_named: bool
) -> None:
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter = await pool.adapter()
        with held_files(pool) as may_write:
            await train(pool, adapter, 0, is_named=is_named)
            for seq in range(5, 15):  # each ends a cycle, after which a snapshot may begin
                await pool.wait(await pool.submit(adapter, seq))
            [loop] = pool.core.loops.values()
            assert loop._snapshots._writing, "a snapshot waits for the file"
            assert snapshot_seq(pool, adapter) < ROUND
            assert pool.store.operations.payload(adapter, ROUND)
            may_write.set()
            await pool.wait(await pool.submit(adapter, 15))
            await pool.written()
        assert not loop._snapshots._num_failures, "the snapshot was not refused"
        assert snapshot_seq(pool, adapter) >= ROUND


@named_or_not
async def test_a_load_waits_for_the_file_of_earlier_published_weights_and_other_adapters_do_not(
    is_named: bool, pool: ToyPool
) -> None:
    adapter, other = await pool.adapter(), await pool.adapter()
    spec = pool.spec_of(adapter)
    saved = await pool.save(other, 1, "start")
    with held_files(pool) as may_write:
        pool.hold()  # so that all operations are ready in one step phase
        names = [await pool.forward_backward(adapter, 1, *LENGTHS), await pool.optim_step(adapter, 2)]
        names.append(await begin_to_publish(pool, adapter, 3, is_named=is_named))
        loading = await pool.load_state(adapter, 4, saved.save_state.path)
        await pool.release()
        *_, published = await asyncio.wait_for(pool.wait(*names), 60)
        await asyncio.wait_for(pool.wait(*[await pool.submit(other, seq) for seq in (2, 3)]), 60)
        assert snapshot_seq(pool, adapter) == 0
        assert pool.core.in_flight.get(loading) is not None
        may_write.set()
        [loaded] = await asyncio.wait_for(pool.wait(loading), 60)
    assert loaded.state == SUCCEEDED
    assert snapshot_seq(pool, adapter) == 4
    sampler = await sampler_of(pool, published)
    assert await sampled(pool, sampler, 1) == expected(expected_chain(spec, [((1,), 2)]), sampler)


@named_or_not
async def test_a_write_to_a_full_disk_is_retried_while_cycles_continue(
    tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.checkpoints.published_weights.RETRY_S", 0.001)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        make_room = refuse_files(pool)
        sampler = await train(pool, adapter, 0, is_named=is_named)
        first = await sampled(pool, sampler, 1)
        await asyncio.sleep(0.02)
        assert folder_of(pool, sampler) == ""
        make_room()
        await pool.written()
        assert folder_of(pool, sampler)
        pool.engines["w0"][-1].versions.clear()
        assert await sampled(pool, sampler, 2) == first


@named_or_not
async def test_a_failed_commit_of_a_file_is_retried_and_leaves_no_folder(
    tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.checkpoints.published_weights.RETRY_S", 0.001)
    async with running_pool(tmp_path) as pool:
        adapter, store = await pool.adapter(), pool.store
        table: Any = store.checkpoints if is_named else store.samplers
        commit_file: Callable[..., asyncio.Future[int]] = table.commit_file
        refused = []

        def refuse(*arguments: Any) -> asyncio.Future[int]:
            refused.append(arguments)
            if len(refused) > 3:
                return commit_file(*arguments)
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            future.set_exception(StorageError("database or disk is full"))
            return future

        monkeypatch.setattr(table, "commit_file", refuse)
        sampler = await train(pool, adapter, 0, is_named=is_named)
        await pool.written()
        root = tmp_path / ("checkpoints" if is_named else "samplers")
        assert [path.name for path in root.iterdir()] == [folder_of(pool, sampler)]
        assert len(refused) == 4


@named_or_not
async def test_published_weights_survive_the_loss_of_their_worker(is_named: bool, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    spec = pool.spec_of(adapter)
    with held_files(pool):
        sampler = await train(pool, adapter, 0, is_named=is_named)
        await pool.kill_worker()
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)
    assert len(pool.engines["w0"]) == 2


@named_or_not
async def test_a_stop_writes_the_missing_files_and_leaves_nothing_to_replay(tmp_path: Path, is_named: bool) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        with held_files(pool) as may_write:
            sampler = await train(pool, adapter, 0, is_named=is_named)
            threading.Timer(0.1, may_write.set).start()
            await pool.coordinator.stop()
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert folder_of(pool, sampler)
        assert pool.engines["w0"][-1].batches == []
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)


async def test_a_stop_waits_for_the_file_of_an_ended_session_and_removes_it(tmp_path: Path, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    with held_files(pool) as may_write:
        await train(pool, adapter, 0)
        await pool.finish_session(adapter)
        stopping = asyncio.create_task(pool.coordinator.stop())
        await asyncio.sleep(0.5)
        assert not stopping.done()
        may_write.set()
        await stopping
    assert list((tmp_path / "samplers").iterdir()) == []


@named_or_not
async def test_weights_of_a_stop_on_a_full_disk_are_rematerialized_from_the_log(tmp_path: Path, is_named: bool) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        refuse_files(pool)
        sampler = await train(pool, adapter, 0, is_named=is_named)
        await asyncio.wait_for(pool.coordinator.stop(), 60)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)


@named_or_not
async def test_samplers_of_an_adapter_that_is_deleted_before_their_file_is_written_can_still_be_sampled(
    tmp_path: Path, is_named: bool
) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        with held_files(pool) as may_write:
            sampler = await train(pool, adapter, 0, is_named=is_named)
            deletion = asyncio.create_task(pool.delete_adapter(adapter))
            await until(lambda: adapter not in pool.core.registry.logs)
            await asyncio.sleep(0.02)
            assert not deletion.done()
            may_write.set()
            await asyncio.wait_for(deletion, 60)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)


@named_or_not
async def test_an_adapter_is_not_deleted_while_its_weights_cannot_be_written(is_named: bool, pool: ToyPool) -> None:
    adapter = await pool.adapter()
    refuse_files(pool)
    await train(pool, adapter, 0, is_named=is_named)
    refused = await refusal(asyncio.wait_for(pool.delete_adapter(adapter), 60))
    [after] = await asyncio.wait_for(pool.wait(await pool.forward_backward(adapter, 5, 3)), 60)
    assert refused.retry_delay_s is not None
    assert after.state == SUCCEEDED


@named_or_not
async def test_an_adapter_is_not_deleted_before_its_weights_are_rematerialized(tmp_path: Path, is_named: bool) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        refuse_files(pool)
        sampler = await train(pool, adapter, 0, is_named=is_named)
    with held_batches() as may_run:
        async with running_pool(tmp_path) as pool:
            await pool.take_over()
            refused = await refusal(pool.delete_adapter(adapter))
            may_run.set()
            assert await sampled(pool, sampler, 1) == expected(chain_after(spec, 1), sampler)
            await asyncio.wait_for(pool.delete_adapter(adapter), 60)
            assert folder_of(pool, sampler)
    assert refused.retry_delay_s is not None


async def test_a_sample_that_waits_for_weights_can_be_cancelled_and_ends_with_its_session(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        refuse_files(pool)
        sampler = await train(pool, adapter, 0)
    with held_batches() as may_run:
        async with running_pool(tmp_path) as pool:
            await pool.take_over()
            names = [await pool.sample(sampler, seq, seed=7) for seq in (1, 2)]
            await pool.cancel(names[0])
            [first] = await asyncio.wait_for(pool.wait(names[0]), 60)
            await pool.finish_session(adapter)
            [second] = await asyncio.wait_for(pool.wait(names[1]), 60)
            may_run.set()
            [after] = await asyncio.wait_for(pool.wait(await pool.forward_backward(adapter, 5, 3)), 60)
            assert list((tmp_path / "samplers").iterdir()) == []
    assert [first.error.code, second.error.code] == [1, 1]
    assert after.state == SUCCEEDED


async def test_a_session_that_ends_before_the_file_is_written_leaves_none_and_frees_the_log(tmp_path: Path) -> None:
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter = await pool.adapter()
        with held_files(pool) as may_write:
            await train(pool, adapter, 0)
            await pool.finish_session(adapter)
            for seq in itertools.count(5):  # a snapshot may begin after each cycle, unless one is being written
                await pool.wait(await pool.forward_backward(adapter, seq, 3))
                if snapshot_seq(pool, adapter) >= ROUND:
                    break
                assert seq < 1000
            may_write.set()
        await pool.written()
        assert list((tmp_path / "samplers").iterdir()) == []


async def test_a_save_whose_file_is_written_while_its_session_ends_leaves_no_bytes_with_its_tenant(
    pool: ToyPool,
) -> None:
    models = pool.core.fleet.models
    models["toy"] = replace(models["toy"], is_exact=False)  # files are written before their saves are committed
    adapter = await pool.adapter()
    with held(pool.folders.samplers, "write") as writing:
        operation = await pool.submit_publish(adapter, 1)
        await writing.until_begun()
        await pool.finish_session(adapter)
    assert (await pool.wait(operation))[0].state == SUCCEEDED
    assert [row["file_bytes"] for row in pool.store.database.read("SELECT file_bytes FROM samplers")] == [0]


async def test_an_inflight_sampler_has_the_newest_weights_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        refuse_files(pool)
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        first = await train(pool, adapter, 0, is_inflight=True)
        await train(pool, adapter, 1, is_inflight=True)
        before = await sampled(pool, first, 1)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        after = await sampled(pool, first, 2)
        await train(pool, adapter, 2, is_inflight=True)
        newest = await sampled(pool, first, 3)
    assert before == after == expected(chain_after(spec, 2), first)
    assert newest == expected(chain_after(spec, 3), first)


@named_or_not
async def test_samples_of_weights_that_cannot_be_rematerialized_fail_with_state_lost(
    tmp_path: Path, is_named: bool
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        refuse_files(pool)
        adapter = await pool.adapter()
        sampler = await train(pool, adapter, 0, is_named=is_named)
    with held_batches() as may_run:
        async with running_pool(tmp_path) as pool:
            await pool.take_over()
            waiting = await pool.sample(sampler, 1, seed=7)
            engine = pool.engines["w0"][-1]
            run = engine.run

            def failing(batch: Batch) -> BatchResult:
                ran = run(batch)
                error = ItemError(code=ErrorCode.OUT_OF_ORDER, message="not the expected seq")
                results = tuple(
                    replace(result, state=None, error=error) if isinstance(item, SaveItem) else result
                    for item, result in zip(batch.items, ran.results, strict=True)
                )
                return replace(ran, results=results)

            engine.run = failing  # type: ignore[method-assign]
            may_run.set()
            [lost] = await asyncio.wait_for(pool.wait(waiting), 60)
            [again] = await asyncio.wait_for(pool.wait(await pool.sample(sampler, 2, seed=7)), 60)
            del engine.run
    assert [each.error.reason for each in (lost, again)] == ["STATE_LOST", "STATE_LOST"]


@named_or_not
async def test_weights_above_the_memory_limit_are_written_before_their_save_is_committed(
    is_named: bool, monkeypatch: pytest.MonkeyPatch, pool: ToyPool
) -> None:
    adapter, other = await pool.adapter(), await pool.adapter()
    with held_files(pool):
        held = await train(pool, adapter, 0, is_named=is_named)
        [version] = publishing_of(pool)._versions.values()
        monkeypatch.setattr("coordinator.checkpoints.published_weights.HELD_BYTES_MAX", version.num_bytes + 1)
        saving = asyncio.create_task(publish(pool, other, 1, is_named=is_named))
        await asyncio.sleep(0.05)
        assert not saving.done()
    second = await saving
    assert folder_of(pool, second)
    await pool.written()
    assert folder_of(pool, held)


@named_or_not
async def test_weights_of_a_model_without_bit_exact_replay_are_written_before_their_save_is_committed(
    is_named: bool, pool: ToyPool
) -> None:
    models = pool.core.fleet.models
    models["toy"] = replace(models["toy"], is_exact=False)
    sampler = await train(pool, await pool.adapter(), 0, is_named=is_named)
    assert folder_of(pool, sampler)
    assert not publishing_of(pool)._versions


async def save_behind_a_failed_append(
    pool: ToyPool, adapter: str, monkeypatch: pytest.MonkeyPatch, *, is_named: bool = False
) -> str:
    """Run a save at seq 4 behind a step at seq 3 whose append fails meanwhile; return the name of the save."""
    store = pool.store
    await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2)])
    may_commit = threading.Event()
    with monkeypatch.context() as patch:
        fail_appends(patch, store, 3)
        is_busy = store.database.write(lambda db: may_commit.wait(60))
        step = asyncio.create_task(pool.optim_step(adapter, 3, learning_rate=0.5))
        save = asyncio.create_task(begin_to_publish(pool, adapter, 4, is_named=is_named))
        await until(lambda: bool(publishing_of(pool)._versions))
        may_commit.set()
        await is_busy
        with suppress(ServiceError):
            await step
        return await save


@named_or_not
async def test_a_save_behind_an_append_that_failed_publishes_nothing(
    is_named: bool, monkeypatch: pytest.MonkeyPatch, pool: ToyPool
) -> None:
    """The save ran on weights that include the refused step. Those weights must never be sampled."""
    adapter = await pool.adapter()
    spec = pool.spec_of(adapter)
    name = await save_behind_a_failed_append(pool, adapter, monkeypatch, is_named=is_named)
    await pool.optim_step(adapter, 3)
    [saved] = await asyncio.wait_for(pool.wait(name), 60)
    sampler = await sampler_of(pool, saved)
    await pool.written()
    assert await sampled(pool, sampler, 1) == expected(expected_chain(spec, [((1, 2), 3)]), sampler)
    pool.engines["w0"][-1].versions.clear()
    assert await sampled(pool, sampler, 2) == expected(expected_chain(spec, [((1, 2), 3)]), sampler)


@pytest.mark.slow
@pytest.mark.parametrize("is_named", [False, pytest.param(True, marks=pytest.mark.long)], ids=["unnamed", "named"])
async def test_a_worker_with_hundreds_of_samplers_holds_a_bounded_number_of_versions_also_after_a_restart(
    tmp_path: Path, is_named: bool
) -> None:
    num_samplers = 3 * VERSIONS_MAX
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        samplers = [await train(pool, adapter, index, is_named=is_named) for index in range(num_samplers)]
        await pool.written()
        assert not publishing_of(pool)._versions
        right = [expected(chain_after(spec, n), s) for n, s in enumerate(samplers[:70], 1)]
        assert [await sampled(pool, sampler, 1) for sampler in samplers[:70]] == right
        await pool.wait(await pool.forward_backward(adapter, ROUND * num_samplers + 1, 3))
        assert len(pool.engines["w0"][-1].versions) <= VERSIONS_MAX
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert pool.engines["w0"][-1].versions == {}, "weights are read only when they are sampled"
        assert [await sampled(pool, sampler, 2) for sampler in samplers[:70]] == right
        await pool.wait(await pool.forward_backward(adapter, ROUND * num_samplers + 2, 3))
        assert len(pool.engines["w0"][-1].versions) <= VERSIONS_MAX


@named_or_not
@pytest.mark.parametrize("whose_copy", ["its own", "another's"])
async def test_a_load_submitted_while_a_state_is_read_waits_for_the_file_too(
    is_named: bool, whose_copy: str, pool: ToyPool
) -> None:
    core = pool.core
    adapter, other, third = [await pool.adapter() for _ in range(3)]
    start = (await pool.save(other, 1, "start")).save_state.path
    await pool.wait(await pool.forward_backward(third, 1, 3))
    with held_files(pool) as may_write:
        sampler = await publish(pool, adapter, 1, is_named=is_named)
        with held_task(core.loops["toy"]._phases._items, "read_copy") as installs:  # the read of a state
            core.registry.logs[adapter if whose_copy == "its own" else other].lose_copy()
            pool.hold()
            await pool.forward_backward(third, 2, 3)
            await asyncio.sleep(0.05)  # its pass has begun, so new operations join the step phase of the same cycle
            names = [await pool.optim_step(other, 2), await pool.optim_step(adapter, 2)]
            await pool.release()
            await installs.until_begun()
            names.append(await pool.load_state(adapter, 3, start))
        await asyncio.wait_for(pool.wait(await pool.forward_backward(third, 3, 3)), 60)  # in the next cycle
        assert not folder_of(pool, sampler)
        assert not core.failure.is_reported
        may_write.set()
        [*_, loaded] = await asyncio.wait_for(pool.wait(*names), 60)
    assert loaded.state == SUCCEEDED


async def test_an_unexpected_error_of_the_writer_ends_a_deletion_and_the_stop(tmp_path: Path) -> None:
    async def delete_while_it_fails() -> None:
        async with running_pool(tmp_path) as pool:
            core, adapter = pool.core, await pool.adapter()
            may_fail = threading.Event()

            def fail(*_: Any) -> Any:
                may_fail.wait(60)
                raise MemoryError

            core.states.folders.samplers.write = fail  # type: ignore[method-assign,assignment]
            await train(pool, adapter, 0)
            deletion = asyncio.create_task(pool.delete_adapter(adapter))
            await until(lambda: any(version.waiters for version in publishing_of(pool)._versions.values()))
            may_fail.set()
            with pytest.raises((StorageError, ServiceError)):
                await asyncio.wait_for(deletion, 60)
            await asyncio.wait_for(core.failure.wait(), 60)

    with pytest.raises(MemoryError):
        await asyncio.wait_for(delete_while_it_fails(), 60)


async def test_an_undone_save_of_an_adapter_that_cannot_run_fails_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, pool: ToyPool
) -> None:
    adapter, core = await pool.adapter(), pool.core
    name = await save_behind_a_failed_append(pool, adapter, monkeypatch)
    await until(lambda: not publishing_of(pool)._versions)
    [loop] = core.loops.values()
    log = core.registry.logs[adapter]
    loop._phases._results.refuse_copy(log, ServiceError(Code.DATA_LOSS, "CHECKSUM_MISMATCH", "damaged"))
    core.registry.group("toy").mark_dirty(log)
    [saved] = await asyncio.wait_for(pool.wait(name), 60)
    assert (saved.state, saved.error.reason) == (FAILED, "CHECKSUM_MISMATCH")

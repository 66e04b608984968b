"""Recovery: failed gradient windows, cancelled calls, lost workers, dropped results, and bounds on memory."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.base.errors import Code
from tests.support.database import query
from tests.support.faults import held
from tests.support.toy_engine import POISON_TOKEN, ToyEngine
from tests.support.toy_pool import (
    LENGTHS,
    FakeTime,
    ToyPool,
    datum,
    expected_chain,
    pass_request,
    refusal,
    running_pool,
    sample_request,
)
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.messages import Batch, BatchResult, PassItem
from workers.contract.protocols import TakenOver

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


async def test_failed_windows_and_cancelled_operations_are_skipped_by_a_replay(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        names = [await pool.submit(adapter, seq) for seq in (1, 2, 3, 4)]
        names.append(await pool.forward_backward(adapter, 5, *LENGTHS, token=POISON_TOKEN))
        names += [await pool.submit(adapter, seq) for seq in (6, 7, 8, 9)]
        before = await pool.wait(*names)
        chain = pool.chain(adapter)
        assert pool.log_of(adapter).copy.window.closed_by is None
        assert len(pool.engines["w0"][-1].batches) < 12, "a failed chunk does not evict the adapter"
    assert {each.seq: each.error.reason for each in before if each.state == FAILED} == {
        5: "NON_FINITE",
        6: "GRADIENT_WINDOW_CLOSED",
    }
    assert chain == expected_chain(spec, [((1, 2), 3), ((7, 8), 9)])
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.forward_backward(adapter, 10, 3))
        assert pool.chain(adapter) == chain


async def replace_worker_by_one_that_runs_twice(pool: ToyPool) -> None:
    """Start a worker's next incarnation. It receives each batch twice and returns the second result."""
    engines = pool.engines["w0"]
    await pool.kill_worker()
    await until(lambda: len(engines) == 2)
    run = engines[-1].run

    def again(batch: Batch) -> BatchResult:
        run(batch)
        return run(Batch(epoch=batch.epoch, cycle_id=batch.cycle_id, items=batch.items))

    engines[-1].run = again  # type: ignore[method-assign]


async def test_an_adapter_that_cannot_be_rebuilt_fails_and_other_adapters_continue(pool: ToyPool) -> None:
    adapter, other = await pool.adapter(), await pool.adapter()
    await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
    await replace_worker_by_one_that_runs_twice(pool)
    [lost] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 4)), 60)
    assert (lost.state, lost.error.reason) == (FAILED, "STATE_LOST")
    del pool.engines["w0"][-1].run  # restores the method
    [fine] = await asyncio.wait_for(pool.wait(await pool.submit(other, 1)), 60)
    assert fine.state == SUCCEEDED


async def test_a_replay_goes_on_although_replies_are_lost_at_one_chunk_of_an_operation_after_another(
    tmp_path: Path,
) -> None:
    run, seen = ToyEngine.run, Counter[int]()

    def again(engine: ToyEngine, batch: Batch) -> BatchResult:
        """Receive each chunk twice, the first three times, and return the second result."""
        chunks = [item.chunk_index for item in batch.items if isinstance(item, PassItem)]
        seen.update(chunks)
        first = run(engine, batch)
        if all(seen[chunk] > 3 for chunk in chunks):
            return first
        return run(engine, Batch(epoch=batch.epoch, cycle_id=batch.cycle_id, items=batch.items))

    async with running_pool(tmp_path, cycle_tokens_max=16) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
        with mock.patch.object(ToyEngine, "run", again):
            await pool.kill_worker()
            [stepped] = await asyncio.wait_for(pool.wait(await pool.optim_step(adapter, 2)), 60)
        assert stepped.state == SUCCEEDED
        assert [seen[chunk] for chunk in (0, 1)] == [7, 4], "each was received three times before it was once"
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1,), 2)])


async def test_calls_cancelled_while_their_operations_are_logged_can_be_repeated(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    calls = [asyncio.create_task(pool.submit(adapter, seq)) for seq in (1, 2, 3)]
    for _ in range(3):
        await asyncio.sleep(0)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert all(call.cancelled() for call in calls)
    names = [await pool.submit(adapter, seq) for seq in (1, 2, 3)]
    operations = await pool.wait(*names)
    assert [each.state for each in operations] == [SUCCEEDED] * 3


async def test_no_snapshot_is_taken_in_the_middle_of_an_operation(tmp_path: Path) -> None:
    """The worker would refuse the snapshot, and the coordinator would evict and rebuild the adapter forever."""
    async with running_pool(tmp_path, replay_s_max=0.0, cycle_tokens_max=16) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        await pool.save(adapter, 1, "a")
        data = [datum(16)] * 4
        request = training_pb2.ForwardRequest(
            adapter_id=adapter, seq=2, data=data, loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
        )
        [forward] = await pool.wait((await pool.service.forward(principal, request)).operation.name)
        installs = [install for batch in pool.engines["w0"][-1].batches for install in batch.installs]
    assert forward.state == SUCCEEDED
    assert len(installs) == 1


async def test_a_replay_leaves_no_payloads_in_memory(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3, 4)])
    await pool.kill_worker()
    await pool.wait(await pool.submit(adapter, 5))
    operations = pool.log_of(adapter).operations.values()
    assert len(operations) == 5
    assert all(each.payload == b"" and each.decoded is None for each in operations)


async def test_an_adapter_that_only_runs_forwards_has_bounded_memory_and_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.checkpoints.snapshots.LOGGED_OPERATIONS_MAX", 20)
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        for seq in range(1, 101):
            request = training_pb2.ForwardRequest(
                adapter_id=adapter, seq=seq, data=[datum(3)], loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
            )
            await pool.wait((await pool.service.forward(principal, request)).operation.name)
            await pool.written()
        log = pool.log_of(adapter)
        payloads = query(tmp_path, "SELECT 1 FROM payloads")
        assert len(log.operations) <= 22
        assert len(payloads) <= 22
        assert len(pool.core.in_flight) == 0
        assert all(each.payload == b"" and each.decoded is None for each in log.operations.values())
        assert not log.copy.progress


async def test_results_are_dropped_from_memory_and_log_after_their_retention(tmp_path: Path) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, replay_s_max=0.0, result_retention_s=100.0) as pool:
        adapter = await pool.adapter()
        names = []
        for seq in (1, 2, 3):
            names.append(await pool.submit(adapter, seq))
            await pool.wait(names[-1])
            await pool.written()
        store = pool.store
        await time.until(lambda: not store.operations.last_seq(adapter), 300)
        gone = await refusal(pool.wait(names[0]))
        repeated = await refusal(pool.submit(adapter, 3))
        assert (gone.code, repeated.reason) == (Code.NOT_FOUND, "RESULT_DROPPED")
        [later] = await pool.wait(await pool.submit(adapter, 4))
    assert later.state == SUCCEEDED
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await pool.wait(await pool.submit(adapter, 5)))[0].state == SUCCEEDED


async def test_a_coordinator_stops_when_its_workers_have_a_later_epoch(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    await pool.wait(await pool.submit(adapter, 1))
    pool.engines["w0"][-1]._epoch += 1
    await pool.submit(adapter, 2)
    with pytest.raises(TakenOver):
        await asyncio.wait_for(pool.coordinator.failed(), 60)
    assert not pool.coordinator.health()


async def test_a_repeated_request_whose_result_was_dropped_does_not_run_again(tmp_path: Path) -> None:
    """Also after a restart. It is recognized by its request id, or by its sequence number at a sampler."""
    config: dict[str, Any] = {"replay_s_max": 0.0, "fetched_retention_s": 0.0, "sweep_interval_s": 0.01}
    async with running_pool(tmp_path, **config) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        sampler = await pool.sampler(await pool.session())
        request = pass_request(adapter, 0, [5])
        request.request_id = "once"
        sample = sample_request(sampler, 0)
        sample.request_id = "once"
        names = [(await pool.service.forward_backward(principal, request)).operation.name]
        names.append((await pool.service.sample(principal, sample)).operation.name)
        names.append(await pool.sample(sampler, 7))
        await pool.wait(*names)
        await pool.written()
        await until(lambda: len(query(tmp_path, "SELECT 1 FROM operations WHERE outcome_bytes = 0")) == 3)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        for repeat in (
            pool.service.forward_backward(principal, request),
            pool.service.sample(principal, sample),
            pool.sample(sampler, 7),
        ):
            assert (await refusal(repeat)).reason == "RESULT_DROPPED"
        assert (await refusal(pool.wait(names[0]))).code is Code.NOT_FOUND
        assert pool.log_of(adapter).next_seq == 2


async def test_a_save_that_is_cancelled_and_loses_its_worker_while_it_is_written_gets_one_outcome(
    pool: ToyPool,
) -> None:
    adapter = await pool.adapter()
    await pool.wait(await pool.submit(adapter, 1))
    with held(pool.folders.checkpoints, "write") as writes:
        name = await pool.submit_save(adapter, 2, "a")
        await writes.until_begun()
        pool.lose_worker()
        await pool.cancel(name)
    [saved] = await asyncio.wait_for(pool.wait(name), 60)
    assert saved.state == SUCCEEDED
    [after] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 3)), 60)
    assert after.state == SUCCEEDED

"""What a review feared: crashes, lost workers and failing appends at the worst moments. The final hash tells."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.cycle.dispatch import TakenOver
from tests.support.database import query
from tests.support.faults import held
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import (
    LENGTHS,
    FakeTime,
    ToyPool,
    datum,
    expected_chain,
    fail_appends,
    pass_request,
    running_pool,
    sample_request,
)
from tests.support.waiting import until
from tinkerpool.v1 import checkpoints_pb2, training_pb2, types_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import (
    AdapterState,
    Batch,
    BatchResult,
    OptimStepItem,
    PassItem,
    SaveItem,
)

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


def lose_worker_in(pool: ToyPool, when: Callable[[Batch], bool]) -> None:
    """Let the engine die instead of answering the first batch for which this holds."""
    engine = pool.engines["w0"][-1]
    run = engine.run

    def run_or_die(batch: Batch) -> BatchResult:
        result = run(batch)
        if when(batch):
            raise RuntimeError("the engine dies after it has applied the batch")
        return result

    engine.run = run_or_die  # type: ignore[method-assign]


@pytest.mark.parametrize("phase", [PassItem, OptimStepItem, SaveItem])
async def test_a_worker_that_dies_after_applying_and_before_answering_changes_nothing(
    tmp_path: Path, phase: type
) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=16) as pool:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3, 4)])
        lose_worker_in(pool, lambda batch: any(isinstance(item, phase) for item in batch.items))
        names = [await pool.submit(adapter, 5), await pool.submit(adapter, 6)]
        operations = await asyncio.wait_for(pool.wait(*names), 10)
        saved = await pool.save(adapter, 7, "after")
        assert len(pool.engines["w0"]) == 2
        assert [each.state for each in (*operations, saved)] == [SUCCEEDED] * 3
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_failed_windows_and_cancelled_operations_are_skipped_by_a_replay(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        spec = pool.spec_of(adapter)
        names = [await pool.submit(adapter, seq) for seq in (1, 2, 3, 4)]
        names.append(await pool.forward_backward(adapter, 5, *LENGTHS, token=POISON_TOKEN))
        names += [await pool.submit(adapter, seq) for seq in (6, 7, 8, 9)]
        before = await pool.wait(*names)
        chain = pool.chain(adapter)
        assert pool.log_of(adapter).copy.window_error is None
        assert len(pool.engines["w0"][-1].batches) < 12, "a failed chunk is no reason to build the copy anew"
    assert [each.error.reason for each in before] == [
        "",
        "",
        "",
        "",
        "NON_FINITE",
        "GRADIENT_WINDOW_CLOSED",
        "",
        "",
        "",
    ]
    assert chain == expected_chain(spec, [((1, 2), 3), ((7, 8), 9)])
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.forward_backward(adapter, 10, 3))
        assert pool.chain(adapter) == chain


async def test_a_step_behind_a_save_in_a_closed_window_is_not_taken(tmp_path: Path) -> None:
    """The worker would have stepped on a zero gradient, and moments move weights."""
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
        chain = pool.chain(adapter)
        pool.hold()
        names = [await pool.forward_backward(adapter, 4, 3, token=POISON_TOKEN)]
        save = checkpoints_pb2.SaveStateRequest(adapter_id=adapter, seq=5, name="a")
        names.append((await pool.service.save_state(principal, save)).operation.name)
        names.append(await pool.optim_step(adapter, 6))
        await pool.release()
        failed, saved, step = await pool.wait(*names)
        assert pool.chain(adapter) == chain
    assert (failed.state, saved.state, step.error.reason) == (FAILED, SUCCEEDED, "GRADIENT_WINDOW_CLOSED")


async def test_a_step_behind_a_load_that_fails_is_not_taken_and_a_clean_stop_keeps_it_so(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "a")).save_state.path
        [weights] = (tmp_path / "checkpoints").glob("*/adapter_model.safetensors")
        weights.write_bytes(b"damaged")
        await pool.wait(await pool.forward_backward(adapter, 2, 5))
        chain = pool.chain(adapter)
        pool.hold()
        names = [await pool.load_state(adapter, 3, path), await pool.optim_step(adapter, 4)]
        await pool.release()
        loaded, step = await pool.wait(*names)
        await pool.wait(await pool.load_state(adapter, 5, path))
        assert pool.chain(adapter) == chain
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        closed, fine = await pool.wait(await pool.optim_step(adapter, 6), await pool.optim_step(adapter, 7))
    assert (loaded.error.code, step.error.reason) == (15, "GRADIENT_WINDOW_CLOSED")
    assert closed.error.reason == "GRADIENT_WINDOW_CLOSED"
    assert fine.state == SUCCEEDED


async def test_a_step_behind_a_load_that_the_worker_refuses_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "a")).save_state.path
        junk = AdapterState(weights=b"junk", optimizer=None, num_steps=0, applied_seq=1, fingerprint="toy")
        monkeypatch.setattr(pool.folders.checkpoints, "read", lambda *_: junk)
        chain = pool.chain(adapter)
        pool.hold()
        await pool.forward_backward(adapter, 2, 5)
        names = [await pool.load_state(adapter, 3, path), await pool.optim_step(adapter, 4)]
        await pool.release()
        loaded, step = await pool.wait(*names)
        assert pool.chain(adapter) == chain
    assert (loaded.error.code, step.error.reason) == (15, "GRADIENT_WINDOW_CLOSED")


async def test_an_append_that_fails_while_its_operation_runs_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also no snapshot: it would hold what the client was told that nobody accepted."""
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter = await pool.adapter()
        spec, store = pool.spec_of(adapter), pool.store
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (4, 5)])
        with monkeypatch.context() as patch:
            fail_appends(patch, store, 6)
            has_snapshot = snapshot_event(pool)
            is_busy = store.database.write(lambda db: has_snapshot.wait(10))
            with pytest.raises(ServiceError, match="nothing was accepted"):
                await pool.optim_step(adapter, 6, learning_rate=0.5)
            await is_busy
        operations = await pool.wait(*[await pool.submit(adapter, seq) for seq in (6, 7, 8, 9)])
        assert [each.state for each in operations] == [SUCCEEDED] * 4
        assert pool.chain(adapter) == expected_chain(spec, [((1, 2), 3), ((4, 5), 6), ((7, 8), 9)])


def snapshot_event(pool: ToyPool) -> threading.Event:
    """Set when the cycle that takes a snapshot has had time to hand in its commit."""
    has_snapshot, engine = threading.Event(), pool.engines["w0"][-1]
    run = engine.run

    def noting(batch: Batch) -> BatchResult:
        result = run(batch)
        if any(isinstance(item, SaveItem) for item in batch.items):
            threading.Timer(0.05, has_snapshot.set).start()
        return result

    engine.run = noting  # type: ignore[method-assign]
    return has_snapshot


async def test_a_worker_lost_while_its_snapshot_is_written_does_not_stop_its_adapter(tmp_path: Path) -> None:
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter = await pool.adapter()
        states, loop = pool.core.states, asyncio.get_running_loop()
        write = states.folders.snapshots.write

        def lose_then_write(*args: Any) -> Any:
            loop.call_soon_threadsafe(pool.lose_worker)
            return write(*args)

        states.folders.snapshots.write = lose_then_write  # type: ignore[method-assign,assignment]
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
        states.folders.snapshots.write = write  # type: ignore[method-assign]
        operations = await asyncio.wait_for(pool.wait(*[await pool.submit(adapter, seq) for seq in (4, 5, 6)]), 10)
        assert [each.state for each in operations] == [SUCCEEDED] * 3
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])
        assert len(pool.engines["w0"]) == 2


async def begin_life_that_runs_twice(pool: ToyPool, often: float) -> Counter[str]:
    """Begin a worker's next life. Each operation's batch reaches it twice the first `often` times; what it says to the
    second is what comes back. Returns how often each operation has come."""
    lives = pool.engines["w0"]
    await pool.kill_worker()
    await until(lambda: len(lives) == 2)
    seen: Counter[str] = Counter()
    engine, run = lives[-1], lives[-1].run

    def again(batch: Batch) -> BatchResult:
        first = run(batch)
        names = {item.op_id for item in batch.items}
        seen.update(names)
        repeated = Batch(epoch=batch.epoch, cycle_id=batch.cycle_id, items=batch.items)
        return run(repeated) if any(seen[name] <= often for name in names) else first

    engine.run = again  # type: ignore[method-assign]
    return seen


async def test_a_replay_goes_on_although_answers_go_astray_at_one_operation_after_another(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=1) as pool:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in range(1, 9)])
        seen = await begin_life_that_runs_twice(pool, 1)
        [after] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 9)), 10)
        assert after.state == SUCCEEDED
        assert len(seen) == 9
        assert min(seen.values()) > 1
        windows = [((1, 2), 3), ((4, 5), 6), ((7, 8), 9)]
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), windows)


async def test_an_adapter_that_cannot_be_rebuilt_fails_and_hurts_nobody(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, other = await pool.adapter(), await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
        await begin_life_that_runs_twice(pool, math.inf)
        [lost] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 4)), 10)
        assert (lost.state, lost.error.reason) == (FAILED, "STATE_LOST")
        del pool.engines["w0"][-1].run  # as it was
        [fine] = await asyncio.wait_for(pool.wait(await pool.submit(other, 1)), 10)
        assert fine.state == SUCCEEDED


async def test_a_late_report_about_an_old_life_does_not_end_the_new_one(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, core = await pool.adapter(), pool.core
        await pool.wait(await pool.submit(adapter, 1))
        old = core.fleet.worker("w0").name
        await pool.kill_worker()
        await pool.wait(await pool.submit(adapter, 2))
        pool.lose_worker("w0", old)
        await pool.wait(await pool.submit(adapter, 3))
    assert len(pool.engines["w0"]) == 2


async def test_a_client_that_goes_away_while_its_operation_is_logged_changes_nothing(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
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
        creation = asyncio.create_task(pool.adapter())
        for _ in range(30):
            await asyncio.sleep(0)
        creation.cancel()
        await asyncio.gather(creation, return_exceptions=True)


async def test_no_snapshot_is_taken_in_the_middle_of_an_operation(tmp_path: Path) -> None:
    """The worker would refuse it, and the copy would be given up and built anew for ever."""
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


async def test_a_replay_leaves_no_requests_in_memory(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3, 4)])
        await pool.kill_worker()
        await pool.wait(await pool.submit(adapter, 5))
        operations = pool.log_of(adapter).operations.values()
        assert len(operations) == 5
        assert all(each.payload == b"" and each.decoded is None for each in operations)


async def test_forwards_alone_do_not_grow_memory_and_log_for_ever(
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
        queue = pool.log_of(adapter)
        payloads = query(tmp_path, "SELECT 1 FROM operations WHERE payload IS NOT NULL")
        assert len(queue.operations) <= 22
        assert len(payloads) <= 22
        assert len(pool.core.in_flight) == 0
        assert all(each.payload == b"" and each.decoded is None for each in queue.operations.values())
        assert not queue.copy.progress


async def test_results_leave_memory_and_are_dropped_from_the_log_after_their_time(tmp_path: Path) -> None:
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
        with pytest.raises(ServiceError) as gone:
            await pool.wait(names[0])
        with pytest.raises(ServiceError) as repeated:
            await pool.submit(adapter, 3)
        assert (gone.value.code, repeated.value.reason) == (Code.NOT_FOUND, "RESULT_DROPPED")
        [later] = await pool.wait(await pool.submit(adapter, 4))
    assert later.state == SUCCEEDED
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await pool.wait(await pool.submit(adapter, 5)))[0].state == SUCCEEDED


async def test_workers_that_a_later_coordinator_has_taken_end_this_one(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
        pool.engines["w0"][-1]._epoch += 1
        await pool.submit(adapter, 2)
        with pytest.raises(TakenOver):
            await asyncio.wait_for(pool.coordinator.failed(), 5)
        assert not pool.coordinator.health()


async def test_a_commit_that_fails_ends_the_coordinator_and_stopping_it_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        store = pool.store

        def broken(_commit: object) -> Any:
            return store.database.write(lambda db: db.execute("SELECT * FROM nothing"))

        monkeypatch.setattr(store.cycles, "commit", broken)
        name = await pool.submit(adapter, 1)
        with pytest.raises(Exception, match="nothing"):
            await asyncio.wait_for(pool.coordinator.failed(), 5)
        await asyncio.wait_for(pool.coordinator.stop(), 5)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert (await pool.wait(name))[0].state == SUCCEEDED


async def test_stopping_ends_every_wait_with_where_to_go_on(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        name = await pool.optim_step(adapter, 2)
        waiting = asyncio.create_task(pool.wait(name))
        await asyncio.sleep(0)
        await pool.coordinator.stop()
        with pytest.raises(ServiceError) as raised:
            await asyncio.wait_for(waiting, 5)
    assert (raised.value.code, bool(raised.value.retry_delay_s)) == (Code.UNAVAILABLE, True)


async def test_a_request_whose_result_was_dropped_is_known_and_not_run_again(tmp_path: Path) -> None:
    """By its request id, or its place at a sampler; also after a restart."""
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
        await until(lambda: len(query(tmp_path, "SELECT 1 FROM operations WHERE outcome = x''")) == 3)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        for repeat in (
            pool.service.forward_backward(principal, request),
            pool.service.sample(principal, sample),
            pool.sample(sampler, 7),
        ):
            with pytest.raises(ServiceError) as dropped:
                await repeat
            assert dropped.value.reason == "RESULT_DROPPED"
        with pytest.raises(ServiceError) as gone:
            await pool.wait(names[0])
        assert gone.value.code is Code.NOT_FOUND
        assert pool.log_of(adapter).next_seq == 2


async def test_a_save_whose_worker_dies_and_whose_owner_cancels_while_it_is_written_is_decided_once(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, principal = await pool.adapter(), await pool.principal()
        await pool.wait(await pool.submit(adapter, 1))
        request = checkpoints_pb2.SaveStateRequest(adapter_id=adapter, seq=2, name="a")
        with held(pool.folders.checkpoints, "write") as writes:
            name = (await pool.service.save_state(principal, request)).operation.name
            await writes.until_begun()
            pool.lose_worker()
            await pool.cancel(name)
        [saved] = await asyncio.wait_for(pool.wait(name), 10)
        assert saved.state == SUCCEEDED
        [after] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 3)), 10)
        assert after.state == SUCCEEDED

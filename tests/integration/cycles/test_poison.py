"""Requests that crash or hang their worker: only the poison fails, and co-batched operations succeed."""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import ServiceError
from coordinator.runtime import supervision
from coordinator.scheduling import cost_model, probation
from coordinator.storage.rows import NewOperation
from coordinator.storage.sqlite import LockedError
from tests.support.toy_engine import KILL_TOKEN
from tests.support.toy_pool import running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import Batch, BatchResult, PassItem, SaveItem
from workers.contract.protocols import WorkerLost

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


NUM_ROUNDS = 10


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
async def test_only_the_poison_fails_and_co_batched_operations_succeed(tmp_path: Path, num_workers: int) -> None:
    """Ten times each: the poison is found by bisection and failed after two solo losses."""
    async with running_pool(tmp_path, num_workers=num_workers, probation_s=0.0) as pool:
        tenants = [f"tenant{i}" for i in range(6)]
        adapters = [await pool.adapter(tenant) for tenant in tenants]
        seqs = [1] * len(adapters)
        for round_index in range(NUM_ROUNDS):
            poison = round_index % len(adapters)
            pool.hold()
            names: list[str] = []
            for i, (adapter, tenant) in enumerate(zip(adapters, tenants, strict=True)):
                if i == poison:
                    names.append(await pool.forward_backward(adapter, seqs[i], 5, tenant=tenant, token=KILL_TOKEN))
                else:
                    names.append(await pool.forward_backward(adapter, seqs[i], 5, tenant=tenant))
                await pool.optim_step(adapter, seqs[i] + 1, tenant=tenant)
                seqs[i] += 2
            await pool.release()
            for i, (name, tenant) in enumerate(zip(names, tenants, strict=True)):
                target, _, seq = name.rpartition(":")
                done = await asyncio.wait_for(pool.wait(name, f"{target}:{int(seq) + 1}", tenant=tenant), 60)
                if i == poison:
                    assert [each.error.reason for each in done] == ["WORKER_DIED", "GRADIENT_WINDOW_CLOSED"]
                else:
                    assert [each.state for each in done] == [SUCCEEDED] * 2
        num_incarnations = sum(len(engines) for engines in pool.engines.values())
    assert num_incarnations <= num_workers + NUM_ROUNDS * 7, (
        "losses per poison: the co-batched pass, three halves, two solo, and one late half"
    )


@pytest.mark.slow
async def test_only_the_sample_that_crashes_its_worker_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probation, "BACKOFF_S", 0.02)  # the other operations are of the same tenant
    async with running_pool(tmp_path) as pool:
        adapter, base = await pool.adapter(), await pool.sampler(await pool.session())
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        _crash_on_samples_with(monkeypatch, seed=13)
        names = [await pool.sample(base, seq, seed=seed) for seq, seed in ((1, 1), (2, 13), (3, 3))]
        step = await pool.optim_step(adapter, 2)
        done = await asyncio.wait_for(pool.wait(*names, step), 60)
    assert [each.state for each in done] == [SUCCEEDED, FAILED, SUCCEEDED, SUCCEEDED]
    assert done[1].error.reason == "WORKER_DIED"


def _crash_on_samples_with(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    from tests.support.toy_engine import ToyEngine

    decode_step = ToyEngine.decode_step

    def decode_or_crash(self: ToyEngine) -> Any:
        if any(sequence.request.params.seed == seed for sequence in self._running):
            raise RuntimeError("a poison sample")
        return decode_step(self)

    monkeypatch.setattr(ToyEngine, "decode_step", decode_or_crash)


async def test_no_snapshot_is_taken_while_operations_are_quarantined(tmp_path: Path) -> None:
    """A worker lost by the snapshot would count as a loss of the quarantined operation."""
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter, quarantined = await pool.adapter(), "a:sample:0:1"
        core = pool.core
        [quarantine] = core.scheduling.quarantines.values()
        pool.hold()
        name = await pool.forward_backward(adapter, 1, 5)
        await until(lambda: core.fleet.worker("w0").training)
        quarantine.record_loss([quarantined], [quarantined])
        await pool.release()
        await asyncio.wait_for(pool.wait(name), 60)
        await pool.written()
        saves = [item for batch in pool.engines["w0"][-1].batches for item in batch.items if isinstance(item, SaveItem)]
        assert saves == []
        quarantine.release(quarantined)
        await asyncio.wait_for(pool.wait(await pool.forward_backward(adapter, 2, 5)), 60)
        await pool.written()
        assert any(isinstance(item, SaveItem) for batch in pool.engines["w0"][-1].batches for item in batch.items)


@pytest.mark.slow
async def test_random_worker_losses_never_fail_an_operation_that_is_not_the_poison(tmp_path: Path) -> None:
    """Some workers are lost while an operation runs solo.

    A second solo loss of the same operation identifies it as the poison. Therefore no worker is killed while an
    operation has one solo loss.
    """
    chance = random.Random(7)
    async with running_pool(tmp_path, num_workers=2, replay_s_max=0.0) as pool:
        quarantine = pool.core.scheduling.quarantines["toy"]
        tenants = [f"tenant{i}" for i in range(3)]
        adapters = [await pool.adapter(tenant) for tenant in tenants]
        names: dict[str, list[str]] = {tenant: [] for tenant in tenants}
        for seq in range(1, 61):
            for adapter, tenant in zip(adapters, tenants, strict=True):
                if seq % 2:
                    names[tenant].append(await pool.forward_backward(adapter, seq, 5, tenant=tenant))
                else:
                    names[tenant].append(await pool.optim_step(adapter, seq, tenant=tenant))
            if seq % 3 == 0 and not any(quarantine.num_solo_losses(name) for own in names.values() for name in own):
                await pool.kill_worker(chance.choice(["w0", "w1"]))
        for tenant in tenants:
            done = await asyncio.wait_for(pool.wait(*names[tenant], tenant=tenant), 60)
            assert {each.state for each in done} == {SUCCEEDED}
        assert sum(len(engines) for engines in pool.engines.values()) > 10


async def test_a_worker_that_hangs_in_a_batch_is_replaced_at_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replies to pings all the while."""
    monkeypatch.setattr(cost_model, "DEADLINE_FLOOR_S", 0.3)
    monkeypatch.setattr(cost_model, "STEP_TOKENS", 5)
    monkeypatch.setattr("workers.pool.local.STOP_TIMEOUT_S", 0.1)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        engine, is_over = pool.engines["w0"][-1], threading.Event()
        run = engine.run

        def hang(batch: Batch) -> BatchResult:
            if any(isinstance(item, PassItem) for item in batch.items):
                is_over.wait(60)
            return run(batch)

        engine.run = hang  # type: ignore[method-assign]
        done = await asyncio.wait_for(
            pool.wait(await pool.forward_backward(adapter, 2, 5), await pool.optim_step(adapter, 3)), 20
        )
        is_over.set()
        assert [each.state for each in done] == [SUCCEEDED] * 2
        assert len(pool.engines["w0"]) == 2


async def test_a_worker_that_replies_to_no_ping_is_replaced_after_the_configured_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, ping_interval_s=0.05, ping_timeout_s=0.1) as pool:
        engines, ping = pool.engines["w0"], pool.core.pool.ping

        async def silent_at_first(worker_id: str) -> None:
            if len(engines) == 1:
                await asyncio.sleep(60)
            await ping(worker_id)

        monkeypatch.setattr(pool.core.pool, "ping", silent_at_first)
        await until(lambda: len(engines) == 2, timeout_s=4)  # the defaults take 7 s


@pytest.mark.parametrize("is_failing", [True, False])
async def test_operations_of_a_lost_worker_go_on_at_once_on_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_failing: bool
) -> None:
    """Whether its replacement fails, or takes long to start."""
    async with running_pool(tmp_path, num_workers=2) as pool:
        adapters = [await pool.adapter() for _ in range(2)]
        for adapter in adapters:
            await pool.wait(await pool.forward_backward(adapter, 1, 5))
        victim = next(a for a in adapters if pool.log_of(a).home == "w0")

        async def never(worker_id: str) -> Any:
            if not is_failing:
                await asyncio.Event().wait()
            raise WorkerLost(f"{worker_id} has no node any more")

        monkeypatch.setattr(pool.core.pool, "replace", never)
        pool.hold()
        name = await pool.forward_backward(victim, 2, 5)
        await asyncio.sleep(0.02)
        killing = asyncio.create_task(pool.kill_worker("w0"))
        await asyncio.sleep(0.02)
        await pool.release()
        await killing
        [done] = await asyncio.wait_for(pool.wait(name), 60)
        assert done.state == SUCCEEDED


async def test_operations_of_one_of_two_workers_that_are_lost_at_once_do_not_run_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count as what has lost both, and wait until one is replaced."""
    monkeypatch.setattr(supervision, "LATE_S", 0.05)
    monkeypatch.setattr(cost_model, "DEADLINE_FLOOR_S", 2.0)
    async with running_pool(tmp_path, num_workers=3, ping_interval_s=60.0, ping_timeout_s=0.1) as pool:
        adapters = [await pool.adapter() for _ in range(3)]
        for adapter in adapters:
            await pool.wait(await pool.forward_backward(adapter, 1, 5))
        homes = {pool.log_of(adapter).home: adapter for adapter in adapters}
        for seq in range(2, 5):
            await pool.wait(await pool.forward_backward(homes["w2"], seq, 50))
        ping = pool.core.pool.ping

        async def pinged(worker_id: str) -> None:
            if worker_id == "w1":
                await asyncio.Event().wait()
            await ping(worker_id)

        async def never(_: str) -> Any:
            await asyncio.Event().wait()

        monkeypatch.setattr(pool.core.pool, "ping", pinged)
        monkeypatch.setattr(pool.core.pool, "replace", never)
        pool.hold()
        name = await pool.forward_backward(homes["w0"], 2, 5)
        await until(lambda: bool(pool.core.fleet.worker("w0").training))
        pool.lose_worker("w0")
        pool.engines["w2"][-1].may_run.set()
        [done] = await asyncio.wait_for(pool.wait(name), 60)
        assert done.state == SUCCEEDED
        assert pool.log_of(homes["w0"]).home == "w2"


async def test_a_poison_takes_each_of_two_workers_at_most_once_before_they_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        poisoned, neighbour = await pool.adapter(), await pool.adapter("bob")
        replace, may_replace, num_left = pool.core.pool.replace, asyncio.Event(), []

        async def replaced(worker_id: str) -> Any:
            if worker_id == "w1":
                await may_replace.wait()
            return await replace(worker_id)

        monkeypatch.setattr(pool.core.pool, "replace", replaced)
        poison = await pool.forward_backward(poisoned, 1, 5, token=KILL_TOKEN)
        await until(lambda: len(pool.engines["w0"]) == 2)
        for seq in range(1, 20):
            [done] = await pool.wait(await pool.forward_backward(neighbour, seq, 5, tenant="bob"), tenant="bob")
            assert done.state == SUCCEEDED
            num_left.append(sum(len(engines) for engines in pool.engines.values()))
        assert num_left == [3] * len(num_left), "the last worker was not taken"
        may_replace.set()
        [done] = await asyncio.wait_for(pool.wait(poison), 60)
        assert done.error.reason == "WORKER_DIED"


async def test_a_poison_takes_no_last_worker_while_another_one_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, num_workers=3) as pool:
        poisoned, neighbour = await pool.adapter(), await pool.adapter("bob")
        replace, may_replace = pool.core.pool.replace, dict[str, asyncio.Event]()

        async def replaced(worker_id: str) -> Any:
            await may_replace.setdefault(worker_id, asyncio.Event()).wait()
            return await replace(worker_id)

        monkeypatch.setattr(pool.core.pool, "replace", replaced)
        poison = await pool.forward_backward(poisoned, 1, 5, token=KILL_TOKEN)
        await until(lambda: len(may_replace) == 2)
        first, second = may_replace
        [left] = {"w0", "w1", "w2"} - {first, second}
        pool.hold()
        held = await pool.forward_backward(neighbour, 1, 5, tenant="bob")
        await until(lambda: bool(pool.core.fleet.worker(left).training))
        may_replace[second].set()
        await until(lambda: pool.core.fleet.is_live(second))
        pool.core.supervisor.drain(left)
        await pool.release()
        await pool.wait(held, tenant="bob")
        for seq in range(2, 10):
            [done] = await pool.wait(await pool.forward_backward(neighbour, seq, 5, tenant="bob"), tenant="bob")
            assert done.state == SUCCEEDED
            assert len(pool.engines[second]) == 2, "the last worker was not taken"
        may_replace[first].set()
        [done] = await asyncio.wait_for(pool.wait(poison), 60)
        assert done.error.reason == "WORKER_DIED"


async def test_a_poison_whose_append_fails_ends_no_worker_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation begins while it is appended; if that fails it is forgotten, and so are the workers that it ended."""
    async with running_pool(tmp_path) as pool:
        poisoned, neighbour = await pool.adapter(), await pool.adapter("bob")
        append, appends = pool.core.store.operations.append, deque[asyncio.Future[None]]()

        def hold_back(rows: Sequence[NewOperation]) -> asyncio.Future[None]:
            if rows[0].target_id != poisoned:
                return append(rows)
            appends.append(asyncio.get_running_loop().create_future())
            return appends[-1]

        num_engines = []
        with monkeypatch.context() as patch:
            patch.setattr(pool.core.store.operations, "append", hold_back)
            for attempt in range(3):
                sent = asyncio.ensure_future(pool.forward_backward(poisoned, 1, 5, token=KILL_TOKEN))
                await until(lambda: bool(appends))
                if not attempt:
                    await until(lambda: not pool.core.fleet.is_live("w0"))
                else:
                    await pool.wait(await pool.forward_backward(neighbour, attempt, 5, tenant="bob"), tenant="bob")
                appends.popleft().set_exception(LockedError("database is locked"))
                with pytest.raises(ServiceError, match="locked"):
                    await sent
                await until(lambda: pool.core.fleet.is_live("w0"))
                num_engines.append(len(pool.engines["w0"]))
        assert num_engines[0] > 1
        assert set(num_engines) == {num_engines[0]}, "no attempt but the first began"
        [done] = await asyncio.wait_for(pool.wait(await pool.forward_backward(poisoned, 1, 5)), 60)
        assert done.state == SUCCEEDED, "it began when it was durable"

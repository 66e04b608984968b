"""A worker that is late: nobody waits for it but its own adapters, and its part of a cycle is a cycle of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.fleet import Incarnation
from coordinator.operations.operation import CYCLE_METRIC
from coordinator.runtime import supervision
from tests.support.faults import held
from tests.support.toy_pool import ToyPool, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


@asynccontextmanager
async def two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> AsyncIterator[tuple[ToyPool, str, str, asyncio.Event]]:
    """Run a pool; yield it with an adapter on each worker, and an event: without it the first gets no pings through."""
    monkeypatch.setattr(supervision, "LATE_S", 0.02)
    config |= {"ping_interval_s": 0.02, "ping_timeout_s": 60.0}
    async with running_pool(tmp_path, num_workers=2, **config) as pool:
        adapters = {"alice": await pool.adapter(), "bob": await pool.adapter("bob")}
        names = [await pool.forward_backward(adapters[tenant], 1, 5, tenant=tenant) for tenant in adapters]
        for name, tenant in zip(names, adapters, strict=True):
            await pool.wait(name, tenant=tenant)
        assert {pool.log_of(each).home for each in adapters.values()} == {"w0", "w1"}
        ping, replies, first = pool.core.pool.ping, asyncio.Event(), pool.log_of(adapters["alice"]).home
        replies.set()

        async def pinged(worker_id: str) -> None:
            if worker_id == first:
                await replies.wait()
            await ping(worker_id)

        monkeypatch.setattr(pool.core.pool, "ping", pinged)
        try:
            yield pool, adapters["alice"], adapters["bob"], replies
        finally:  # a pool that stops waits for its workers
            replies.set()
            await pool.release()


def silence(pool: ToyPool, adapter_id: str, replies: asyncio.Event) -> None:
    """Let the adapter's worker run nothing and reply to no ping."""
    pool.engines[pool.log_of(adapter_id).home][-1].may_run.clear()
    replies.clear()


def cycles(*operations: ops_pb.Operation) -> set[float]:
    """Return the cycles that decided these operations, by their ids and their metrics."""
    ids = {float(each.cycle_id) for each in operations}
    metrics = [dict(each.forward_backward.metrics) | dict(each.optim_step.metrics) for each in operations]
    return ids | {metric[CYCLE_METRIC] for metric in metrics}


async def test_others_go_on_while_a_worker_is_late_and_its_pair_is_one_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        silence(pool, late, replies)
        pair = [await pool.forward_backward(late, 2, 5), await pool.optim_step(late, 3)]
        steps = [await pool.optim_step(other, seq, tenant="bob") for seq in range(2, 12)]
        done = await pool.wait(*steps, tenant="bob")
        assert {each.state for each in done} == {SUCCEEDED}
        committed = done[-1].cycle_id
        assert not pool.log_of(late).operations[2].is_final
        assert set(pool.store.cycles.plans()) != set(), "the plan of what is in flight stays"
        replies.set()
        await pool.release()
        done_pair = await asyncio.wait_for(pool.wait(*pair), 60)
        assert {each.state for each in done_pair} == {SUCCEEDED}
        [cycle_id] = cycles(*done_pair)
        shown = {each.cycle_id: each for each in pool.core.journal.recent}
        assert {entry.adapter_id for entry in shown[int(cycle_id)].entries} == {late}
        assert committed > cycle_id, "it had its id before the cycles of others"
        assert sum(len(engines) for engines in pool.engines.values()) == 2


async def test_a_step_that_is_late_takes_its_pass_along_to_its_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        worker = pool.engines[pool.log_of(late).home][-1]
        run = worker.run

        def run_once(batch: Any) -> Any:
            result = run(batch)
            if any(item.adapter_id == late for item in batch.items):
                silence(pool, late, replies)
            return result

        monkeypatch.setattr(worker, "run", run_once)
        pool.hold()
        pair = [await pool.forward_backward(late, 2, 5), await pool.optim_step(late, 3)]
        monkeypatch.setattr(worker, "may_run", worker.may_run)
        await pool.release()
        [done] = await pool.wait(await pool.optim_step(other, 2, tenant="bob"), tenant="bob")
        await until(lambda: bool(pool.core.fleet.away))
        assert not pool.log_of(late).operations[2].is_committed
        monkeypatch.setattr(worker, "run", run)
        replies.set()
        await pool.release()
        done_pair = await asyncio.wait_for(pool.wait(*pair), 60)
        assert len(cycles(*done_pair)) == 1
        assert cycles(*done_pair) != {float(done.cycle_id)}


@pytest.mark.parametrize("reply_s", [0.0, 0.1], ids=["after a reply in time", "after a late reply"])
async def test_a_snapshot_that_is_late_holds_up_nobody_and_is_written_in_the_end(
    reply_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch, replay_s_max=0.0) as (pool, late, other, replies):
        home = pool.log_of(late).home
        worker = pool.engines[home][-1]
        run = worker.run

        def run_once(batch: Any) -> Any:
            result = run(batch)
            if any(item.adapter_id == late and item.op_id.endswith(":2") for item in batch.items):
                silence(pool, late, replies)
                time.sleep(reply_s)
            return result

        monkeypatch.setattr(worker, "run", run_once)
        await pool.wait(await pool.optim_step(late, 2))
        for seq in range(2, 6):
            await pool.wait(await pool.optim_step(other, seq, tenant="bob"), tenant="bob")
        assert pool.log_of(late).snapshot_seq < 2
        replies.set()
        await pool.release()
        while pool.log_of(late).snapshot_seq < 2:  # taken behind a cycle, perhaps not before the worker has replied
            seq += 1
            await pool.wait(await pool.optim_step(other, seq, tenant="bob"), tenant="bob")
        assert len(pool.engines[home]) == 1, "nobody waited until the worker counted as lost"


async def test_a_late_worker_gets_nothing_new_and_its_tenants_pay_for_no_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        silence(pool, late, replies)
        name = await pool.forward_backward(late, 2, 5)
        await until(lambda: bool(pool.core.fleet.away))
        fresh = [await pool.adapter("bob") for _ in range(3)]
        for adapter in fresh:
            name_of_other = await pool.forward_backward(adapter, 1, 5, tenant="bob")
            await asyncio.wait_for(pool.wait(name_of_other, tenant="bob"), 20)
        assert {pool.log_of(each).home for each in fresh} == {pool.log_of(other).home}
        await asyncio.sleep(0.3)
        replies.set()
        await pool.release()
        await pool.wait(name)
        [cycle] = [each for each in pool.core.journal.recent if _has(each, late) and each.cycle_id > 1][-1:]
        assert cycle.pass_seconds >= 0.3
        planning = pool.core.scheduling.schedules["toy"].planning
        counters = planning.counters(frozenset(pool.tenant_id(t) for t in ("alice", "bob")))
        assert max(counters.values()) < 0.3 * planning._tokens_per_s()


async def test_a_late_worker_that_is_lost_gives_its_adapters_to_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        home = pool.log_of(late).home
        silence(pool, late, replies)
        pair = [await pool.forward_backward(late, 2, 5), await pool.optim_step(late, 3)]
        await until(lambda: bool(pool.core.fleet.away))
        monkeypatch.setattr("workers.pool.local.STOP_TIMEOUT_S", 0.1)
        pool.lose_worker(home)
        done = await asyncio.wait_for(pool.wait(*pair), 60)
        assert {each.state for each in done} == {SUCCEEDED}
        assert len(cycles(*done)) == 1
        [last] = await pool.wait(await pool.optim_step(other, 2, tenant="bob"), tenant="bob")
        assert last.state == SUCCEEDED


async def test_what_a_late_worker_did_not_run_is_taken_back_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part was charged by a plan that is not the last one."""
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        engine = pool.engines[pool.log_of(late).home][-1]
        silence(pool, late, replies)
        name = await pool.forward_backward(late, 2, 5)
        await until(lambda: bool(pool.core.fleet.away))
        await pool.wait(await pool.forward_backward(other, 2, 5, tenant="bob"), tenant="bob")
        engine.adapters.pop(late)  # so that it refuses the item
        replies.set()
        await pool.release()
        [done] = await asyncio.wait_for(pool.wait(name), 60)
        assert done.state == SUCCEEDED


async def test_an_adapter_is_deleted_after_its_part_on_a_late_worker_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch) as (pool, late, other, replies):
        silence(pool, late, replies)
        name = await pool.forward_backward(late, 2, 5)
        await until(lambda: bool(pool.core.fleet.away))
        deleting = asyncio.create_task(pool.delete_adapter(late))
        await asyncio.sleep(0.1)
        assert not deleting.done()
        replies.set()
        await pool.release()
        await asyncio.wait_for(deleting, 60)
        [done] = await pool.wait(name)
        assert done.state == ops_pb.OPERATION_STATE_FAILED or done.state == SUCCEEDED
        [last] = await pool.wait(await pool.optim_step(other, 2, tenant="bob"), tenant="bob")
        assert last.state == SUCCEEDED


@asynccontextmanager
async def resumed_save(
    pool: ToyPool, late: str, other: str, replies: asyncio.Event, call: Coroutine[None, None, None]
) -> AsyncIterator[asyncio.Task[None]]:
    """Yield while the late adapter's save is written in a cycle of its own; the call waits since a cycle of others."""
    worker = pool.engines[pool.log_of(other).home][-1]
    silence(pool, late, replies)
    await pool.submit_save(late, 2, "late")
    await until(lambda: bool(pool.core.fleet.away))
    worker.may_run.clear()
    await pool.forward_backward(other, 2, 5, tenant="bob")
    await until(lambda: bool(pool.core.fleet.worker(pool.log_of(other).home).training))
    calling = asyncio.create_task(call)
    replies.set()
    pool.engines[pool.log_of(late).home][-1].may_run.set()
    phases = pool.core.loops["toy"]._phases  # private: nothing outside the loop sees that a late worker has replied
    await until(lambda: phases.has_reports)
    with held(pool.folders.checkpoints, "write") as writes:
        worker.may_run.set()
        await writes.until_begun()
        yield calling


async def test_an_adapter_is_deleted_after_what_its_late_worker_replied_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch, linger_s=0.0) as (pool, late, other, replies):
        save, deletion = pool.log_of(late).operations, pool.delete_adapter(late)
        async with resumed_save(pool, late, other, replies, deletion) as deleting:
            await asyncio.sleep(0.1)
            assert not save[2].is_final
        await asyncio.wait_for(deleting, 60)
        [done] = await pool.wait(f"{late}:2")
        assert done.state == SUCCEEDED
        [last] = await pool.wait(await pool.optim_step(other, 3, tenant="bob"), tenant="bob")
        assert last.state == SUCCEEDED
        assert not pool.core.failure.is_reported


async def test_a_stop_covers_no_log_by_a_snapshot_during_a_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch, linger_s=0.0) as (pool, late, other, replies):
        loop, between_cycles = pool.core.loops["toy"], []
        settle = loop._snapshots.settle  # private, as the flag: the loop's own

        def settled(logs: Any) -> None:
            between_cycles.append(loop._is_idle.is_set())
            settle(logs)

        monkeypatch.setattr(loop._snapshots, "settle", settled)
        async with resumed_save(pool, late, other, replies, loop.stop(60.0)) as stopping:
            await asyncio.sleep(0.1)
            assert not stopping.done()
        await asyncio.wait_for(stopping, 60)
        assert all(between_cycles)


async def reply_before(pool: ToyPool, first: str, second: str) -> str:
    """Return an operation to which the first adapter's worker has replied; its cycle waits for the second one's."""
    workers = [pool.core.fleet.worker(pool.log_of(each).home) for each in (first, second)]
    pool.hold()
    await pool.forward_backward(first, 2, 5)
    await until(lambda: bool(workers[0].training))
    name = await pool.forward_backward(first, 3, 5)
    await pool.forward_backward(second, 2, 5, tenant="bob")
    pool.engines[workers[0].info.worker_id][-1].may_run.set()
    await until(lambda: bool(workers[1].training))
    await until(lambda: not workers[0].training)
    return name


async def test_a_worker_that_is_lost_after_its_reply_had_nothing_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch, linger_s=0.0) as (pool, first, second, _):
        name = await reply_before(pool, first, second)
        assert not pool.log_of(first).operations[3].is_final, "its cycle goes on"
        pool.lose_worker(pool.log_of(first).home)
        assert not pool.core.scheduling.quarantines["toy"].names
        await pool.release()
        [done] = await asyncio.wait_for(pool.wait(name), 60)
        assert done.state == SUCCEEDED


async def test_a_worker_that_falls_silent_after_its_reply_stays_late_when_its_cycle_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_workers(tmp_path, monkeypatch, linger_s=0.0) as (pool, first, second, replies):
        fleet, name = pool.core.fleet, await reply_before(pool, first, second)
        worker, be_late, in_time = fleet.worker(pool.log_of(first).home), fleet.be_late, []
        replies.clear()
        await until(lambda: worker.is_late)

        def noted(each: Incarnation, *, is_late: bool) -> None:
            in_time.extend([each] * (not is_late))
            be_late(each, is_late=is_late)

        monkeypatch.setattr(fleet, "be_late", noted)
        await pool.release()
        await asyncio.wait_for(pool.wait(name), 60)
        assert worker not in in_time


async def test_a_sample_starts_when_the_only_worker_is_late_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LATE_S", 0.02)
    async with running_pool(tmp_path, ping_interval_s=0.02, ping_timeout_s=60.0) as pool:
        ping, replies = pool.core.pool.ping, asyncio.Event()

        async def pinged(worker_id: str) -> None:
            await replies.wait()
            await ping(worker_id)

        monkeypatch.setattr(pool.core.pool, "ping", pinged)
        sampler = await pool.sampler(await pool.session())
        await until(lambda: bool(pool.core.fleet.away))
        name = await pool.sample(sampler, 1)
        await asyncio.sleep(0.1)
        assert not pool.samples_on("w0")
        replies.set()
        [done] = await asyncio.wait_for(pool.wait(name), 60)
        assert done.state == SUCCEEDED


async def test_a_stop_waits_for_a_worker_that_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with two_workers(tmp_path, monkeypatch, stop_s_max=0.1) as (pool, late, _, replies):
        silence(pool, late, replies)
        await pool.forward_backward(late, 2, 5)
        await until(lambda: bool(pool.core.fleet.away))
        operation = pool.log_of(late).operations[2]
        stopping = asyncio.create_task(pool.core.loops["toy"].stop(60.0))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        replies.set()
        await pool.release()
        await stopping
        assert operation.is_committed


def _has(cycle: pool_pb2.Cycle, adapter_id: str) -> bool:
    return any(entry.adapter_id == adapter_id for entry in cycle.entries)

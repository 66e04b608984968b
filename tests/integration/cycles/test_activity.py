"""The pool's status by tenant: the queue with what it waits for, running adapters, tokens a second."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from coordinator.service import activity
from coordinator.tenants.principals import Principal
from tests.support.toy_pool import FakeTime, ToyPool, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import history_pb2, pool_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import WorkerUse

ORDER = history_pb2.WAIT_REASON_ORDER
SEQUENCE, SLOTS = history_pb2.WAIT_REASON_SEQUENCE, history_pb2.WAIT_REASON_SLOTS


async def status_of(pool: ToyPool, principal: Principal) -> pool_pb2.GetPoolStatusResponse:
    response: pool_pb2.GetPoolStatusResponse = await pool.service.get_pool_status(
        principal, pool_pb2.GetPoolStatusRequest()
    )
    return response


def waiting(row: pool_pb2.TenantActivity) -> dict[int, int]:
    return {each.reason: each.num_operations for each in row.waiting}


async def test_an_administrator_sees_each_tenants_queue_what_it_waits_for_and_its_running_adapters(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path) as pool:
        boss, alices, bobs = await pool.administrator(), await pool.adapter(), await pool.adapter("bob")
        pool.hold()
        names = [await pool.forward_backward(alices, 1, 5)]
        await until(lambda: pool.log_of(alices).waits.reason == ORDER)
        names += [await pool.forward_backward(alices, seq, 5) for seq in (2, 3)]
        behind_a_gap = await pool.forward_backward(bobs, 2, 5, tenant="bob")
        await asyncio.sleep(0.05)
        status = await status_of(pool, boss)
        alice, bob = status.tenants
        assert (alice.tenant, alice.num_queued, alice.num_running, alice.num_running_adapters) == ("alice", 2, 1, 1)
        assert (bob.tenant, bob.num_queued, bob.num_running, bob.num_running_adapters) == ("bob", 1, 0, 0)
        assert (waiting(alice), waiting(bob)) == ({ORDER: 2}, {SEQUENCE: 1})
        assert alice.oldest_seconds > bob.oldest_seconds >= 0.05
        assert (status.num_queued, status.num_running) == (3, 1)
        [running] = status.running_adapters
        assert (running.adapter_id, running.tenant, running.worker_id) == (alices, "alice", "w0")
        assert (running.operation, running.kind) == (names[0], ops_pb.OPERATION_KIND_FORWARD_BACKWARD)
        await pool.release()
        await pool.wait(*names)
        await pool.wait(await pool.forward_backward(bobs, 1, 5, tenant="bob"), behind_a_gap, tenant="bob")
        status = await status_of(pool, boss)
        assert not status.running_adapters
        assert [(each.num_queued, each.num_running, each.oldest_seconds) for each in status.tenants] == [(0, 0, 0)] * 2


async def test_samples_wait_for_slots_and_run_on_a_worker(tmp_path: Path) -> None:
    async with running_pool(tmp_path, samples_per_worker_max=1) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        names = [await pool.sample(sampler, seq, max_tokens=3) for seq in (1, 2, 3)]
        await until(lambda: len(pool.samples_on()) == 1)
        status = await status_of(pool, await pool.principal())
        [alice] = status.tenants
        assert (alice.num_queued, alice.num_running, alice.num_running_adapters) == (2, 1, 0)
        assert waiting(alice) == {SLOTS: 2}
        assert status.workers[0].num_samples == 1
        await pool.release()
        await pool.wait(*names)


async def test_tokens_a_second_are_those_of_committed_cycles_and_finished_samples(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2, cycle_tokens_max=8) as pool:
        adapters = {tenant: [await pool.adapter(tenant) for _ in range(2)] for tenant in ("alice", "bob")}
        for tenant, length in (("alice", 2), ("bob", 8)):
            names = [await pool.forward_backward(each, 1, length, length, tenant=tenant) for each in adapters[tenant]]
            await pool.wait(*names, tenant=tenant)
        sampler = await pool.sampler(await pool.session("bob"), "bob")
        await pool.wait(await pool.sample(sampler, 1, "bob", num_samples=2, max_tokens=5), tenant="bob")
        status = await status_of(pool, await pool.administrator())
        alice, bob = status.tenants
        assert alice.trained_tokens_per_second > 0
        assert bob.trained_tokens_per_second == pytest.approx(4 * alice.trained_tokens_per_second, rel=0.01)
        # 10 sampled tokens, without the prompt, against 32 trained ones
        assert bob.sampled_tokens_per_second == pytest.approx(bob.trained_tokens_per_second * 10 / 32, rel=0.01)
        assert alice.sampled_tokens_per_second == 0
        for field in ("trained_tokens_per_second", "sampled_tokens_per_second"):
            by_tenant = sum(getattr(each, field) for each in status.tenants)
            assert sum(getattr(each, field) for each in status.workers) == pytest.approx(by_tenant, rel=0.01)
        assert all(each.trained_tokens_per_second for each in status.workers)


async def test_what_a_worker_takes_of_its_machine_is_shown_to_administrators(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        worker = pool.core.fleet.worker("w0")
        worker.end_phase(0, WorkerUse(resident_bytes=7, device_bytes=5))
        worker.info = replace(worker.info, model=replace(worker.info.model, slow_because="no Triton"))
        [whole] = (await status_of(pool, await pool.administrator())).workers
        [shown] = (await status_of(pool, await pool.principal())).workers
    assert (whole.resident_bytes, whole.device_bytes, whole.slow_because) == (7, 5, "no Triton")
    assert (shown.resident_bytes, shown.device_bytes, shown.slow_because) == (0, 0, "")


async def test_a_member_sees_its_own_activity_and_of_all_others_one_row_that_the_totals_tell_anyway(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path) as pool:
        eves = await pool.adapter("eve")
        names = {"alice": [await pool.adapter() for _ in range(2)], "eve": [eves], "bob": [await pool.adapter("bob")]}
        for tenant in names:
            sampler = await pool.sampler(await pool.session(tenant), tenant)
            await pool.wait(await pool.sample(sampler, 1, tenant, max_tokens=3), tenant=tenant)
        done = await pool.forward_backward(names["bob"][0], 1, 5, tenant="bob")
        await pool.wait(done, tenant="bob")
        pool.hold()
        waits: dict[str, list[str]] = {"eve": [], "alice": [], "bob": []}
        for tenant, adapters in names.items():
            for each in adapters:
                first = 2 if tenant == "bob" else 1
                waits[tenant] += [
                    await pool.forward_backward(each, seq, 5, tenant=tenant) for seq in (first, first + 1)
                ]
        alices = names["alice"][0]
        await until(lambda: pool.log_of(alices).waits.reason == ORDER)  # it runs
        eve = await pool.principal("eve")
        status, whole = await status_of(pool, eve), await status_of(pool, await pool.administrator())
        await pool.release()
        for tenant, waited in waits.items():
            await pool.wait(*waited, tenant=tenant)
    mine, others = status.tenants
    assert (mine.tenant, mine.num_queued + mine.num_running) == ("eve", 2)
    assert mine.sampled_tokens_per_second > 0
    assert others == pool_pb2.TenantActivity(
        num_queued=status.num_queued - mine.num_queued,
        num_running=status.num_running - mine.num_running,
        trained_tokens_per_second=others.trained_tokens_per_second,
    ), "no name, ages, reasons, adapters, or sampled tokens"
    assert others.num_queued + others.num_running == 6
    assert others.trained_tokens_per_second > 0
    assert {each.adapter_id for each in status.running_adapters} <= {eves}
    assert alices in {each.adapter_id for each in whole.running_adapters}
    [worker], [whole_worker] = status.workers, whole.workers
    assert worker.trained_tokens_per_second == 0, "only bob has trained"
    assert 0 < worker.sampled_tokens_per_second < whole_worker.sampled_tokens_per_second
    assert "alice" not in str(status)
    assert "bob" not in str(status)


async def test_many_operations_are_read_in_slices_once_a_second_for_all_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "SLICE_OPERATIONS", 4)
    time = FakeTime()
    async with running_pool(tmp_path, time=time) as pool:
        boss, alice, adapter = await pool.administrator(), await pool.principal(), await pool.adapter()
        for seq in range(2, 22):
            await pool.forward_backward(adapter, seq, 5)
        read = Mock(wraps=pool.core.in_flight.all)
        monkeypatch.setattr(pool.core.in_flight, "all", read)
        reading = asyncio.gather(*(status_of(pool, each) for each in (boss, alice, boss)))
        num_slices = 0
        while not reading.done():
            num_slices += 1
            await asyncio.sleep(0)
        assert [waiting(each.tenants[0]) for each in await reading] == [{SEQUENCE: 1, ORDER: 19}] * 3
        assert read.call_count == 1
        assert num_slices >= 20 / 4
        await pool.forward_backward(adapter, 22, 5)
        assert (await status_of(pool, alice)).num_queued == 20
        time.now += activity.KEPT_S
        assert (await status_of(pool, alice)).num_queued == 21
        assert read.call_count == 2


async def test_an_adapter_that_was_deleted_since_its_queue_was_read_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity, "SLICE_OPERATIONS", 1)
    async with running_pool(tmp_path, time=FakeTime()) as pool:
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.forward_backward(adapter, seq, 5) for seq in (1, 2)]
        await until(lambda: pool.log_of(adapter).waits.reason == ORDER)
        assert (await status_of(pool, await pool.principal())).running_adapters
        monkeypatch.setattr(pool.core.registry, "get", lambda _: None)
        assert not (await status_of(pool, await pool.principal())).running_adapters
        monkeypatch.undo()
        await pool.release()
        await pool.wait(*names)

"""Hosts that leave, and workers that administrators drain: nothing is lost, and nobody waits for long."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.base.errors import Code
from coordinator.runtime import supervision
from tests.support.toy_pool import ToyPool, expected_chain, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import admin_pb2, pool_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.protocols import WorkerLost

SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


@asynccontextmanager
async def noticing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int = 2
) -> AsyncIterator[tuple[ToyPool, Callable[[str, float], None]]]:
    """Run a pool; yield it, and a function that announces in how many seconds the host of a worker leaves."""
    monkeypatch.setattr(supervision, "NOTICE_POLL_S", 0.01)
    notices: dict[str, float] = {}

    async with running_pool(tmp_path, num_workers=num_workers) as pool:

        async def leaving() -> dict[str, float]:
            infos = [info for info in pool.core.pool.workers() if info.incarnation in notices]
            return {info.worker_id: notices[info.incarnation] for info in infos}

        def announce(worker_id: str, seconds: float) -> None:
            notices[pool.core.fleet.worker(worker_id).name] = seconds

        monkeypatch.setattr(pool.core.pool, "leaving", leaving)  # the host of a local pool never leaves
        yield pool, announce


async def adapter_on(pool: ToyPool, worker_id: str) -> str:
    """Return an adapter that was trained for a step on this worker."""
    while True:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
        if pool.log_of(adapter).home == worker_id:
            return adapter


async def replaced(pool: ToyPool, worker_id: str, num_incarnations: int = 2) -> None:
    """Wait until the worker's next incarnation takes work."""
    await until(lambda: len(pool.engines[worker_id]) == num_incarnations)
    last = pool.engines[worker_id][-1]
    await until(
        lambda: pool.core.fleet.is_live(worker_id) and pool.core.fleet.worker(worker_id).name == last.incarnation
    )
    assert not pool.core.fleet.worker(worker_id).is_draining


async def shown(pool: ToyPool, worker_id: str) -> pool_pb2.Worker:
    """Return a worker as an administrator sees it."""
    status = await pool.service.get_pool_status(await pool.administrator(), pool_pb2.GetPoolStatusRequest())
    workers: dict[str, pool_pb2.Worker] = {each.worker_id: each for each in status.workers}
    return workers[worker_id]


async def drain(pool: ToyPool, worker_id: str) -> None:
    """Drain a worker, and wait for its end."""
    await pool.service.drain_worker(await pool.administrator(), pool_pb2.DrainWorkerRequest(worker_id=worker_id))
    await until(lambda: worker_id not in {each.worker_id for each in pool.core.pool.workers()})


async def undrain(pool: ToyPool, worker_id: str) -> None:
    await pool.service.undrain_worker(await pool.administrator(), pool_pb2.UndrainWorkerRequest(worker_id=worker_id))


async def test_a_worker_leaves_its_host_before_that_does_and_its_adapters_go_on_elsewhere_without_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        adapter = await adapter_on(pool, "w0")
        announce("w0", 60.0)
        await replaced(pool, "w0")
        log = pool.log_of(adapter)
        assert log.snapshot_seq == 3, "its copy was snapshotted before it left"
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (4, 5, 6)])
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])
        assert not pool.core.scheduling.quarantines["toy"].group


async def test_samples_run_again_elsewhere_if_they_would_not_end_before_their_host_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        samples = [await pool.sample(sampler, seq) for seq in (1, 2)]
        await until(lambda: (pool.samples_on("w0"), pool.samples_on("w1")) == ([samples[0]], [samples[1]]))
        announce("w0", 3.0)  # a second is kept for the end of the process
        await until(lambda: set(pool.samples_on("w1")) == set(samples))
        await pool.release()
        found = await asyncio.wait_for(pool.wait(*samples), 30)
        assert {each.state for each in found} == {SUCCEEDED}


async def test_a_sample_that_ends_in_time_ends_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        sample = await pool.sample(sampler, 1)
        await until(lambda: pool.samples_on("w0") == [sample])
        announce("w0", 600.0)
        await until(lambda: pool.core.fleet.worker("w0").is_draining)
        await asyncio.sleep(0.2)
        assert (pool.samples_on("w0"), pool.samples_on("w1")) == ([sample], [])
        await pool.release()
        [found] = await asyncio.wait_for(pool.wait(sample), 30)
        assert found.state == SUCCEEDED
        await replaced(pool, "w0")


async def test_the_only_worker_works_on_until_its_next_incarnation_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noticing(tmp_path, monkeypatch, num_workers=1) as (pool, announce):
        adapter = await adapter_on(pool, "w0")
        prepare, may_start = pool.core.pool.prepare, asyncio.Event()

        async def prepared(worker_id: str) -> None:
            await may_start.wait()
            await prepare(worker_id)

        monkeypatch.setattr(pool.core.pool, "prepare", prepared)
        old = pool.core.fleet.worker("w0")
        announce("w0", 600.0)
        await until(lambda: (pool.core.supervisor.host_leaves_in_s(old) or 0.0) > 0.0)
        assert (await pool.wait(await pool.submit(adapter, 4)))[0].state == SUCCEEDED
        assert pool.core.fleet.worker("w0") is old
        may_start.set()
        await replaced(pool, "w0")
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (5, 6)])
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_the_only_worker_works_on_until_its_host_is_about_to_leave_if_no_other_host_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "NEAR_S", 0.5)
    monkeypatch.setattr(supervision, "END_S", 0.1)
    async with noticing(tmp_path, monkeypatch, num_workers=1) as (pool, announce):
        adapter = await adapter_on(pool, "w0")

        async def refused(worker_id: str) -> None:
            raise WorkerLost("no host is free")

        monkeypatch.setattr(pool.core.pool, "prepare", refused)
        old = pool.core.fleet.worker("w0")
        announce("w0", 1.0)
        await until(lambda: pool.core.supervisor.host_leaves_in_s(old) is not None)
        names = [await pool.submit(adapter, 4)]
        await pool.wait(*names)
        assert pool.core.fleet.worker("w0") is old
        await replaced(pool, "w0")
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (5, 6)])
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_a_batch_that_does_not_end_in_time_runs_again_elsewhere_and_is_not_suspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "END_S", 0.1)
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        adapter = await adapter_on(pool, "w0")
        old = pool.engines["w0"][-1]  # it may have a successor when it goes on
        old.may_run.clear()
        names = [await pool.submit(adapter, seq) for seq in (4, 5, 6)]
        await until(lambda: pool.core.fleet.worker("w0").training)
        announce("w0", 0.3)
        await until(lambda: not pool.core.fleet.is_live("w0"))
        assert pool.log_of(adapter).quarantined == (0, -1)
        old.may_run.set()
        assert {each.state for each in await asyncio.wait_for(pool.wait(*names), 30)} == {SUCCEEDED}
        await replaced(pool, "w0")
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_what_silenced_a_worker_is_not_forgotten_because_its_host_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "END_S", 0.1)
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        adapter = await adapter_on(pool, "w0")
        pool.engines["w0"][-1].may_run.clear()
        names = [await pool.submit(adapter, seq) for seq in (4, 5, 6)]
        await until(lambda: pool.core.fleet.worker("w0").training)
        pool.core.fleet.be_late(pool.core.fleet.worker("w0"), is_late=True)
        announce("w0", 0.3)
        await until(lambda: not pool.core.fleet.is_live("w0"))
        await until(lambda: pool.log_of(adapter).quarantined != (0, -1))
        pool.engines["w0"][-1].may_run.set()
        assert {each.state for each in await asyncio.wait_for(pool.wait(*names), 30)} == {SUCCEEDED}


async def test_a_host_that_ends_before_its_time_is_an_ordinary_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noticing(tmp_path, monkeypatch) as (pool, announce):
        adapter = await adapter_on(pool, "w0")
        old = pool.engines["w0"][-1]  # it may have a successor when it goes on
        old.may_run.clear()
        names = [await pool.submit(adapter, seq) for seq in (4, 5, 6)]
        await until(lambda: pool.core.fleet.worker("w0").training)
        announce("w0", 600.0)
        await until(lambda: pool.core.fleet.worker("w0").is_draining)
        pool.lose_worker("w0")
        old.may_run.set()
        assert {each.state for each in await asyncio.wait_for(pool.wait(*names), 30)} == {SUCCEEDED}
        await replaced(pool, "w0")
        assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_a_drained_worker_gives_its_adapters_away_and_ends_and_is_started_again(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        adapter = await adapter_on(pool, "w0")
        assert (await shown(pool, "w0")).state == pool_pb2.WORKER_STATE_READY
        await drain(pool, "w0")
        await drain(pool, "w0")
        drained = await shown(pool, "w0")
        assert (drained.state, drained.base_model, drained.pid) == (pool_pb2.WORKER_STATE_DRAINED, "toy", 0)
        await pool.wait(*[await pool.submit(adapter, seq) for seq in (4, 5)])
        assert pool.log_of(adapter).home == "w1"
        await undrain(pool, "w0")
        await undrain(pool, "w0")
        await replaced(pool, "w0")
        await pool.wait(await pool.submit(adapter, 6))
        chain = pool.engines["w1"][-1].adapters[adapter].chain
        assert chain == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])
        audit = await pool.service.list_audit_entries(await pool.administrator(), admin_pb2.ListAuditEntriesRequest())
        acts = [(entry.act, entry.subject) for entry in audit.entries if entry.act.startswith("worker.")]
        assert acts == [("worker.undrain", "w0"), ("worker.drain", "w0")]


async def test_a_worker_that_is_undrained_before_it_has_ended_goes_on(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        sample = await pool.sample(sampler, 1)
        await until(lambda: pool.samples_on("w0") == [sample])
        admin = await pool.administrator()
        response = await pool.service.drain_worker(admin, pool_pb2.DrainWorkerRequest(worker_id="w0"))
        assert response.worker.state == pool_pb2.WORKER_STATE_DRAINING
        await undrain(pool, "w0")
        await pool.release()
        assert (await pool.wait(sample))[0].state == SUCCEEDED
        assert (await shown(pool, "w0")).state == pool_pb2.WORKER_STATE_READY
        await asyncio.sleep(3 * supervision.DRAIN_POLL_S)
        assert len(pool.engines["w0"]) == 1


async def test_a_drained_worker_that_is_undrained_as_soon_as_it_is_lost_is_replaced_once(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        sample = await pool.sample(sampler, 1)
        await until(lambda: pool.samples_on("w0") == [sample])
        pool.core.supervisor.drain("w0")
        pool.lose_worker("w0")
        pool.core.supervisor.undrain("w0")  # before the supervisor reads the loss
        await pool.release()
        await replaced(pool, "w0")
        assert (await pool.wait(sample))[0].state == SUCCEEDED
        await asyncio.sleep(3 * supervision.DRAIN_POLL_S)  # a second replacement would have started by now
        assert len(pool.engines["w0"]) == 2
        assert (await shown(pool, "w0")).state == pool_pb2.WORKER_STATE_READY


async def test_the_last_worker_of_a_model_is_not_drained_and_the_remedy_is_named(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        admin = await pool.administrator()
        await drain(pool, "w1")
        error = await refusal(pool.service.drain_worker(admin, pool_pb2.DrainWorkerRequest(worker_id="w0")))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LAST_WORKER")
        assert "undrain another one first, or start the pool with more workers (--workers)" in error.message
        error = await refusal(pool.service.drain_worker(admin, pool_pb2.DrainWorkerRequest(worker_id="w7")))
        assert error.code == Code.NOT_FOUND
        adapter = await pool.adapter()
        assert (await pool.wait(await pool.submit(adapter, 1)))[0].state == SUCCEEDED


async def test_a_worker_whose_drain_cannot_be_stored_takes_work_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_db: sqlite3.Connection) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with running_pool(tmp_path, num_workers=2) as pool:
        database = pool.store.database
        # Patched: no disk fails on demand.
        monkeypatch.setattr(pool.store.drained_workers, "add", lambda row, act: database.write(full))
        admin = await pool.administrator()
        error = await refusal(pool.service.drain_worker(admin, pool_pb2.DrainWorkerRequest(worker_id="w0")))
        assert error.retry_delay_s is not None
        await asyncio.sleep(3 * supervision.DRAIN_POLL_S)  # had it gone on, it would have ended by now
        await until(lambda: len(pool.core.fleet.available("toy")) == 2)
        assert (await shown(pool, "w0")).state == pool_pb2.WORKER_STATE_READY


async def test_a_drained_worker_is_not_started_at_the_next_start(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        adapter = await adapter_on(pool, "w0")
        await drain(pool, "w0")
    async with running_pool(tmp_path, num_workers=2) as pool:
        assert pool.engines["w0"] == []
        assert (await shown(pool, "w0")).state == pool_pb2.WORKER_STATE_DRAINED
        assert (await pool.wait(await pool.submit(adapter, 4)))[0].state == SUCCEEDED
        await undrain(pool, "w0")
        await replaced(pool, "w0", num_incarnations=1)
    async with running_pool(tmp_path, num_workers=2) as pool:
        assert len(pool.engines["w0"]) == 1


async def test_a_drained_worker_is_started_if_no_other_one_has_its_model_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        await drain(pool, "w0")
    with caplog.at_level(logging.WARNING):
        async with running_pool(tmp_path, num_workers=1) as pool:
            adapter = await pool.adapter()
            assert (await pool.wait(await pool.submit(adapter, 1)))[0].state == SUCCEEDED
            assert not pool.core.supervisor.is_drained("w0")
    assert "worker w0 is started: it is drained, but no other worker has toy now" in caplog.text
    async with running_pool(tmp_path, num_workers=2) as pool:
        assert len(pool.engines["w0"]) == 1, "the drain was forgotten"

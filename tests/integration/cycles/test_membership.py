"""Workers join and leave a running pool; adapters and samples of one that leaves lose nothing."""

import asyncio
import time
from pathlib import Path

import pytest

from coordinator.runtime import supervision
from coordinator.tenants.principals import Principal
from tests.support.toy_engine import KILL_TOKEN
from tests.support.toy_pool import ToyPool, expected_chain, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import WorkerLost
from workers.pool.local import LocalPool


async def removing(pool: ToyPool, worker_id: str) -> asyncio.Task[None]:
    """Begin to remove a worker; return the task when the worker is drained."""
    task = asyncio.create_task(pool.core.supervisor.remove(worker_id))
    await until(lambda: any(each.info.worker_id == worker_id for each in pool.core.fleet.drained("toy")))
    return task


async def test_adapters_of_a_removed_worker_go_on_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapters = [await pool.adapter() for _ in range(3)]
        await pool.wait(*[await pool.submit(adapter, seq) for adapter in adapters for seq in (1, 2, 3, 4)])
        added = await pool.core.supervisor.add("toy")
        pool.hold()
        names = [await pool.submit(adapters[0], seq) for seq in (5, 6)]
        await until(lambda: pool.core.fleet.worker("w0").training)
        leaving = await removing(pool, "w0")
        await pool.release()
        await asyncio.wait_for(leaving, 30)
        del pool.engines["w0"]
        assert [each.worker_id for each in pool.core.pool.workers()] == [added.worker_id]
        names += [await pool.submit(adapter, seq) for adapter in adapters[1:] for seq in (5, 6)]
        found = await asyncio.wait_for(pool.wait(*names), 30)
        assert {each.state for each in found} == {ops_pb.OPERATION_STATE_SUCCEEDED}
        for adapter in adapters:
            assert pool.log_of(adapter).home == added.worker_id
            assert pool.chain(adapter) == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_a_sample_ends_on_the_worker_that_is_removed_and_the_next_one_runs_elsewhere(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        first, second = await pool.sample(sampler, 1), await pool.sample(sampler, 2)
        await until(lambda: (pool.samples_on("w0"), pool.samples_on("w1")) == ([first], [second]))
        leaving = await removing(pool, "w0")
        third = await pool.sample(sampler, 3)
        await until(lambda: pool.samples_on("w1") == [second, third])
        assert not leaving.done()
        await pool.release()
        await asyncio.wait_for(leaving, 30)
        found = await asyncio.wait_for(pool.wait(first, second, third), 30)
        assert {each.state for each in found} == {ops_pb.OPERATION_STATE_SUCCEEDED}


async def test_a_worker_that_is_lost_while_it_is_drained_is_not_replaced(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        sampler = await pool.sampler(await pool.session())
        pool.hold()
        sample = await pool.sample(sampler, 1)
        await until(lambda: pool.samples_on("w0") == [sample])
        leaving = await removing(pool, "w0")
        pool.lose_worker("w0")
        await pool.release()
        await asyncio.wait_for(leaving, 30)
        [found] = await asyncio.wait_for(pool.wait(sample), 30)
        assert found.state == ops_pb.OPERATION_STATE_SUCCEEDED
        assert len(pool.engines["w0"]) == 1
        assert pool.core.fleet.worker_ids() == ["w1"]


async def test_a_lost_worker_whose_replacement_waits_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S", 0.2)
    async with running_pool(tmp_path, num_workers=2) as pool:
        pool.core.fleet.note_loss("w0")
        pool.lose_worker("w0")
        await asyncio.wait_for(pool.core.supervisor.remove("w0"), 30)
        assert len(pool.engines["w0"]) == 1
        adapter = await pool.adapter()
        assert (await pool.wait(await pool.submit(adapter, 1)))[0].state == ops_pb.OPERATION_STATE_SUCCEEDED


async def test_a_worker_is_replaced_also_after_thousands_of_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "BACKOFF_S_MAX", 0.01)
    async with running_pool(tmp_path) as pool:
        for _ in range(3000):
            pool.core.fleet.note_loss("w0")
        pool.lose_worker("w0")
        await until(lambda: len(pool.engines["w0"]) == 2)


async def test_status_says_why_a_worker_was_lost_and_does_not_start_to_administrators_and_when_to_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = LocalPool.replace

    async def replace(self: LocalPool, worker_id: str) -> WorkerInfo:
        if problems:
            raise WorkerLost(problems[0])
        return await started(self, worker_id)

    problems = ["CUDA error: an illegal memory access was encountered"]
    monkeypatch.setattr(LocalPool, "replace", replace)
    async with running_pool(tmp_path) as pool:

        async def worker_for(principal: Principal) -> pool_pb2.Worker:
            status: pool_pb2.GetPoolStatusResponse
            status = await pool.service.get_pool_status(principal, pool_pb2.GetPoolStatusRequest())
            return status.workers[0]

        boss, member = await pool.administrator(), await pool.principal()
        assert not (await worker_for(boss)).HasField("last_loss_time")
        began = time.time()
        poison = await pool.forward_backward(await pool.adapter(), 1, 5, token=KILL_TOKEN)
        await until(lambda: bool(pool.core.fleet.losses("w0").start_problem))
        shown, for_member = await worker_for(boss), await worker_for(member)
        assert (shown.num_losses, shown.state) == (1, pool_pb2.WORKER_STATE_LOST)
        assert shown.last_loss_reason.startswith("it has died: ")
        assert shown.last_loss_reason.endswith("the engine failed: killed by a toy token")
        assert shown.start_problem == problems[0]
        assert began - 1 <= shown.last_loss_time.ToNanoseconds() / 1e9 <= time.time()
        assert (for_member.num_losses, for_member.last_loss_time) == (1, shown.last_loss_time)
        assert (for_member.last_loss_reason, for_member.start_problem) == ("", "")
        problems.clear()
        await pool.wait(poison)
        await until(lambda: pool.core.fleet.is_live("w0"))
        shown = await worker_for(boss)
        assert shown.num_losses > 1
        assert not shown.start_problem


async def test_a_worker_that_is_missing_at_the_start_joins_when_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_ready, failures = asyncio.Event(), ["its host is full"]

    async def replace(self: LocalPool, worker_id: str) -> WorkerInfo:
        await is_ready.wait()
        if failures:
            raise WorkerLost(failures.pop())
        return await self.add("toy")

    monkeypatch.setattr(LocalPool, "base_models", lambda _: dict.fromkeys(("w0", "w1"), "toy"))
    monkeypatch.setattr(LocalPool, "replace", replace)
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
        assert pool.core.fleet.worker_ids() == ["w0"]
        is_ready.set()
        await until(lambda: pool.core.fleet.worker_ids() == ["w0", "w1"])
        assert not failures, "a start that failed is tried again"
        await asyncio.wait_for(await removing(pool, "w0"), 30)
        del pool.engines["w0"]
        found = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 2)), 30)
        assert found[0].state == ops_pb.OPERATION_STATE_SUCCEEDED
        assert pool.log_of(adapter).home == "w1"


async def test_the_last_worker_of_a_model_is_not_removed(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        with pytest.raises(ValueError, match="w0 is the last worker of toy that takes work: undrain another one first"):
            await pool.core.supervisor.remove("w0")
        adapter = await pool.adapter()
        assert (await pool.wait(await pool.submit(adapter, 1)))[0].state == ops_pb.OPERATION_STATE_SUCCEEDED

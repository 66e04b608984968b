"""Workers whose base model has other weights than those on which a pool's adapters were trained."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.toy_pool import running_pool
from tests.support.waiting import until
from workers.contract.protocols import PoolStartError, WorkerLost

OTHER = "the files of toy have other weights"


async def test_a_pool_does_not_start_on_other_weights_than_its_adapters_were_trained_on(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
    with pytest.raises(PoolStartError, match=rf"{OTHER} \(b\) than toy has had in this pool \(a\)"):
        async with running_pool(tmp_path, engine_values=[{"weights_id": "b"}]):
            pass
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]) as pool:
        await pool.wait(await pool.submit(adapter, 2))


async def test_a_name_may_get_other_weights_once_nothing_was_trained_on_the_former_ones(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]) as pool:
        adapter = await pool.adapter()
        path = (await pool.save(adapter, 1, "kept")).save_state.path
        await pool.delete_adapter(adapter)
    with pytest.raises(PoolStartError, match=OTHER):  # there is a checkpoint
        async with running_pool(tmp_path, engine_values=[{"weights_id": "b"}]):
            pass
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]) as pool:
        await pool.delete_checkpoint(path)
    async with running_pool(tmp_path, engine_values=[{"weights_id": "b"}]) as pool:
        await pool.adapter()
    with pytest.raises(PoolStartError, match=r"\(a\) than toy has had in this pool \(b\)"):
        async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]):
            pass


async def test_weights_of_a_pool_that_did_not_record_them_are_those_of_its_next_start(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}]) as pool:
        await pool.wait(await pool.submit(adapter, 1))
    with pytest.raises(PoolStartError, match=OTHER):
        async with running_pool(tmp_path, engine_values=[{"weights_id": "b"}]):
            pass


async def test_a_worker_with_other_weights_takes_no_work_and_the_pool_says_why(tmp_path: Path) -> None:
    values = {"weights_id": "b"}
    async with running_pool(tmp_path, engine_values=[{"weights_id": "a"}, values]) as pool:
        assert [each.info.worker_id for each in pool.core.fleet.available("toy")] == ["w0"]
        await until(lambda: OTHER in pool.core.fleet.losses("w1").start_problem)
        values["weights_id"] = "a"  # its files were mended
        await until(lambda: len(pool.core.fleet.available("toy")) == 2)
        assert not pool.core.fleet.losses("w1").start_problem


async def test_a_worker_that_joins_and_one_that_replaces_another_must_have_the_weights(tmp_path: Path) -> None:
    values = {"weights_id": "a"}
    async with running_pool(tmp_path, engine_values=[values]) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.submit(adapter, 1))
        values["weights_id"] = "b"
        with pytest.raises(WorkerLost, match=OTHER):
            await pool.core.supervisor.add("toy")
        pool.lose_worker()
        name = await pool.forward_backward(adapter, 2, 3)
        await until(lambda: OTHER in pool.core.fleet.losses("w0").start_problem)
        assert not pool.core.fleet.available("toy")
        values["weights_id"] = "a"
        await asyncio.wait_for(pool.wait(name), 30)

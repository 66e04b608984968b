"""Adapters of a pool whose workers have two kinds of numerics, when workers are lost and when the pool starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_pool import ToyPool, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import WorkerLost
from workers.pool.local import LocalPool

CHANGED = "numerics_changed:max"
TWO_CLASSES = ({"fingerprint": "a"}, {"fingerprint": "b"})


@asynccontextmanager
async def without_replacements(data_dir: Path, patch: pytest.MonkeyPatch, **values: Any) -> AsyncIterator[ToyPool]:
    """Run a pool with workers of two classes, which starts no lost one again."""

    async def refuse(_: LocalPool, worker_id: str) -> WorkerInfo:
        raise WorkerLost(f"{worker_id} has no host")

    patch.setattr(LocalPool, "replace", refuse)
    async with running_pool(data_dir, **{"engine_values": TWO_CLASSES} | values) as pool:
        yield pool


async def trained(pool: ToyPool) -> tuple[str, str]:
    """Return a new adapter that has run, and its worker."""
    adapter = await pool.adapter()
    await pool.wait(await pool.submit(adapter, 1))
    return adapter, pool.log_of(adapter).home


def is_noted(operation: ops_pb.Operation) -> bool:
    return CHANGED in operation.forward_backward.metrics or CHANGED in operation.optim_step.metrics


async def test_an_adapter_changes_its_class_after_the_wait_and_its_next_result_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with without_replacements(tmp_path, monkeypatch, class_wait_s=0.3) as pool:
        adapter, home = await trained(pool)
        pool.lose_worker(home)
        second, third = await pool.submit(adapter, 2), await pool.submit(adapter, 3)
        await until(lambda: "adapters wait for one" in caplog.text)
        assert not pool.log_of(adapter).home
        found = await asyncio.wait_for(pool.wait(second, third), 30)
        assert pool.log_of(adapter).home not in ("", home)
        assert [is_noted(each) for each in found] == [True, False]
        assert f"{adapter} goes on with other numerics" in caplog.text


async def test_an_adapter_goes_on_at_once_on_another_worker_of_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes = [{"fingerprint": each} for each in ("a", "b", "a")]
    async with without_replacements(tmp_path, monkeypatch, engine_values=classes) as pool:
        adapter, home = await trained(pool)
        assert home == "w0"
        pool.lose_worker(home)
        [found] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 2)), 30)
        assert (pool.log_of(adapter).home, is_noted(found)) == ("w2", False)


async def test_a_restart_keeps_classes_and_waits_for_workers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, engine_values=TWO_CLASSES, is_crash=True) as pool:
        adapter, home = await trained(pool)
        [row] = pool.store.adapters.not_deleted()
        assert row.fingerprint == pool.core.fleet.worker(home).info.model.fingerprint
    may_join, start = asyncio.Event(), LocalPool.start

    async def start_others(self: LocalPool, owner: Any, drained: Any = ()) -> None:
        await start(self, owner, [*drained, home])

    async def join(self: LocalPool, worker_id: str) -> WorkerInfo:
        await may_join.wait()
        return await self._begin(worker_id)

    monkeypatch.setattr(LocalPool, "start", start_others)
    monkeypatch.setattr(LocalPool, "replace", join)
    async with running_pool(tmp_path, engine_values=TWO_CLASSES) as pool:
        await pool.take_over()
        name = await pool.submit(adapter, 2)
        await asyncio.sleep(0.2)
        assert not pool.log_of(adapter).home, "the only worker that is there is of another class"
        may_join.set()
        [found] = await asyncio.wait_for(pool.wait(name), 30)
        assert (pool.log_of(adapter).home, is_noted(found)) == (home, False)


async def test_a_pool_whose_workers_all_have_other_numerics_goes_on_at_once_and_says_so(tmp_path: Path) -> None:
    async with running_pool(tmp_path, engine_values=[{"fingerprint": "torch 1"}], is_crash=True) as pool:
        adapter, _ = await trained(pool)
    async with running_pool(tmp_path, engine_values=[{"fingerprint": "torch 2"}]) as pool:
        await pool.take_over()
        [found] = await asyncio.wait_for(pool.wait(await pool.submit(adapter, 2)), 30)
        assert found.state == ops_pb.OPERATION_STATE_SUCCEEDED
        assert is_noted(found)
        [row] = pool.store.adapters.not_deleted()
        assert row.fingerprint == "torch 2"

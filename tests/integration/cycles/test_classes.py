"""Adapters of a pool whose workers have two kinds of numerics, when workers are lost and when the pool starts again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from tests.support.toy_pool import ToyPool, expected_chain, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import adapters_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import SampleRequest, WorkerInfo
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


def await_replacements(patch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return an event before which no missing worker starts."""
    may_join = asyncio.Event()

    async def join(self: LocalPool, worker_id: str) -> WorkerInfo:
        await may_join.wait()
        return await self._begin(worker_id)

    patch.setattr(LocalPool, "replace", join)
    return may_join


def start_without(patch: pytest.MonkeyPatch, worker_id: str) -> None:
    """Let pools start from now on without this worker, which is missing then."""
    start = LocalPool.start

    async def start_others(self: LocalPool, owner: Any, drained: Any = ()) -> None:
        await start(self, owner, [*drained, worker_id])

    patch.setattr(LocalPool, "start", start_others)


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


async def test_nobody_waits_for_a_suspect_that_waits_for_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_replacements(tmp_path, monkeypatch) as pool:
        adapter, home = await trained(pool)
        other, sampler = await pool.adapter("bob"), await pool.sampler(await pool.session("bob"), "bob")
        await pool.wait(await pool.forward_backward(other, 1, 5, tenant="bob"), tenant="bob")
        assert pool.log_of(other).home not in ("", home)
        pool.hold()
        await pool.submit(adapter, 2)
        await until(lambda: pool.core.fleet.worker(home).training)
        pool.lose_worker(home)
        await pool.release()
        names = [await pool.forward_backward(other, 2, 5, tenant="bob"), await pool.sample(sampler, 1, "bob")]
        found = await asyncio.wait_for(pool.wait(*names, tenant="bob"), 60)
        assert {each.state for each in found} == {ops_pb.OPERATION_STATE_SUCCEEDED}
        assert pool.core.scheduling.quarantines["toy"].names == {adapter}


async def test_a_suspect_that_has_waited_for_its_class_runs_before_others_on_the_worker_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it never runs solo there while samples are queued, and a poison is not found."""
    may_join = await_replacements(monkeypatch)
    async with running_pool(tmp_path, engine_values=TWO_CLASSES, samples_per_worker_max=1) as pool:
        adapter, home = await trained(pool)
        sampler, start = await pool.sampler(await pool.session("bob"), "bob"), pool.core.pool.start_sample
        pool.hold()
        suspect = await pool.submit(adapter, 2)
        await until(lambda: pool.core.fleet.worker(home).training)
        pool.lose_worker(home)
        pool.engines[home][-1].may_run.set()
        operation, were_final = pool.log_of(adapter).operations[2], []

        async def started(worker_id: str, request: SampleRequest) -> None:
            if worker_id == home:
                were_final.append(operation.is_final)
            await start(worker_id, request)

        monkeypatch.setattr(pool.core.pool, "start_sample", started)
        await until(lambda: pool.core.scheduling.quarantines["toy"].may_run("a sample"))
        await pool.sample(sampler, 1, "bob")
        queued = await pool.sample(sampler, 2, "bob")
        may_join.set()
        await asyncio.wait_for(pool.wait(suspect), 60)
        await asyncio.wait_for(pool.wait(queued, tenant="bob"), 60)
        await pool.release()
        assert were_final == [True]


async def test_a_restart_keeps_classes_and_waits_for_workers_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_pool(tmp_path, engine_values=TWO_CLASSES, is_crash=True) as pool:
        adapter, home = await trained(pool)
        [row] = pool.store.adapters.not_deleted()
        assert row.fingerprint == pool.core.fleet.worker(home).info.model.fingerprint
    may_join = await_replacements(monkeypatch)
    start_without(monkeypatch, home)
    async with running_pool(tmp_path, engine_values=TWO_CLASSES) as pool:
        await pool.take_over()
        name = await pool.submit(adapter, 2)
        await asyncio.sleep(0.2)
        assert not pool.log_of(adapter).home, "the only worker that is there is of another class"
        may_join.set()
        [found] = await asyncio.wait_for(pool.wait(name), 30)
        assert (pool.log_of(adapter).home, is_noted(found)) == (home, False)


async def test_nobody_waits_for_a_missing_worker_that_is_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_pool(tmp_path, engine_values=TWO_CLASSES, is_crash=True) as pool:
        adapter, home = await trained(pool)
    start_without(monkeypatch, home)
    async with without_replacements(tmp_path, monkeypatch) as pool:
        await pool.take_over()
        name = await pool.submit(adapter, 2)
        await until(lambda: "adapters wait for one" in caplog.text)
        pool.core.supervisor.drain(home)
        [found] = await asyncio.wait_for(pool.wait(name), 60)
        assert is_noted(found)


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


async def move(pool: ToyPool, adapter: str, worker_id: str, tenant: str = "alice") -> bool:
    """Move an adapter; return whether the numerics change."""
    request = adapters_pb2.MoveAdapterRequest(adapter_id=adapter, worker_id=worker_id)
    return bool((await pool.service.move_adapter(await pool.principal(tenant), request)).changes_numerics)


async def test_an_adapter_that_waits_for_its_class_can_be_moved_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_replacements(tmp_path, monkeypatch) as pool:
        adapter, home = await trained(pool)
        pool.lose_worker(home)
        name = await pool.submit(adapter, 2)
        await asyncio.sleep(0.1)
        assert not pool.log_of(adapter).home
        other = "w1" if home == "w0" else "w0"
        assert await move(pool, adapter, other)
        [found] = await asyncio.wait_for(pool.wait(name), 30)
        assert (pool.log_of(adapter).home, is_noted(found)) == (other, True)


async def test_a_moved_adapter_keeps_its_bits_and_stays_where_it_is(tmp_path: Path) -> None:
    async with running_pool(tmp_path, num_workers=2) as pool:
        adapter, home = await trained(pool)
        other = "w1" if home == "w0" else "w0"
        for seq, worker_id in ((2, other), (3, home), (4, home), (5, other)):
            assert not await move(pool, adapter, worker_id)
            await asyncio.wait_for(pool.wait(await pool.submit(adapter, seq)), 30)
            assert pool.log_of(adapter).home == worker_id
        await asyncio.wait_for(pool.wait(await pool.submit(adapter, 6)), 30)
        assert pool.log_of(adapter).home == other, "it was moved once"
        copy = pool.engines[other][-1].adapters[adapter]
        assert copy.chain == expected_chain(pool.spec_of(adapter), [((1, 2), 3), ((4, 5), 6)])


async def test_only_ones_own_adapters_are_moved_and_only_to_workers_that_take_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with without_replacements(tmp_path, monkeypatch) as pool:
        adapter, home = await trained(pool)
        other = "w1" if home == "w0" else "w0"
        for refused in ((adapter, other, "bob"), (adapter, "w7", "alice"), (f"{adapter}9", other, "alice")):
            with pytest.raises(ServiceError) as error:
                await move(pool, *refused)
            assert error.value.code is Code.NOT_FOUND
        pool.lose_worker(other)
        with pytest.raises(ServiceError, match=f"{other} takes no work now") as error:
            await move(pool, adapter, other)
        assert error.value.code is Code.FAILED_PRECONDITION
        request = adapters_pb2.MoveAdapterRequest(adapter_id=adapter, worker_id=home)
        await pool.service.move_adapter(await pool.administrator(), request)

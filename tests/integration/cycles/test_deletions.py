"""Adapters deleted at inconvenient moments: neither their operations nor those of other adapters hang."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from coordinator.base.errors import ServiceError
from coordinator.checkpoints import snapshots
from coordinator.storage.sqlite import DiskFullError
from tests.support.adapter_logs import spec_named
from tests.support.faults import held
from tests.support.toy_engine import toy_bytes
from tests.support.toy_pool import ToyPool, expected_chain, pass_request, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb

SUCCEEDED, FAILED = ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED


async def test_a_refused_operation_whose_adapter_is_deleted_meanwhile_affects_no_other_adapter(pool: ToyPool) -> None:
    adapter, principal = await pool.adapter(), await pool.principal()
    bad = pass_request(adapter, 1, [3])
    bad.ClearField("data")
    waiting = await pool.optim_step(adapter, 2)
    refused = asyncio.create_task(pool.service.forward_backward(principal, bad))
    deletion = pool.delete_adapter(adapter)
    results = await asyncio.gather(refused, deletion, return_exceptions=True)
    [failed] = await asyncio.wait_for(pool.wait(waiting), 60)
    other = await pool.adapter()
    await pool.wait(await pool.submit(other, 1))
    assert pool.coordinator.health()
    assert isinstance(results[0], ServiceError)
    assert not isinstance(results[1], BaseException)
    assert failed.state == FAILED


async def test_an_adapter_deleted_while_another_one_is_read_from_disk_stops_no_other_adapter(tmp_path: Path) -> None:
    """A state is read in a thread, so a deletion may come during the read."""
    async with running_pool(tmp_path) as pool:
        adapters = [await pool.adapter() for _ in range(3)]
        await pool.wait(*[await pool.submit(adapter, 1) for adapter in adapters])
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        adapters.sort()  # the order of plans
        with held(pool.folders.snapshots, "read") as reads:
            names = await asyncio.gather(*(pool.submit(adapter, 2) for adapter in adapters))
            await reads.until_begun()
            deletion = asyncio.create_task(pool.delete_adapter(adapters[2]))
            await asyncio.sleep(0.01)  # the deletion has begun
            reads.may_go.set()
            await asyncio.wait_for(deletion, 60)
        done = await asyncio.wait_for(pool.wait(*names[:2]), 60)
        assert [each.state for each in done] == [SUCCEEDED] * 2
        assert pool.coordinator.health()


async def test_an_adapter_whose_deletion_fails_continues_from_the_snapshot_that_became_durable_meanwhile(
    tmp_path: Path,
) -> None:
    """The log no longer has the payloads to replay from the snapshot before."""
    async with running_pool(tmp_path, replay_s_max=0.0) as pool:
        adapter, core = await pool.adapter(), pool.core
        spec = pool.spec_of(adapter)
        is_deleting, may_fail = asyncio.Event(), asyncio.Event()

        async def full(*_: object) -> str:
            is_deleting.set()
            await may_fail.wait()
            raise DiskFullError("no room")

        with held(pool.folders.snapshots, "write") as writes, mock.patch.object(pool.store.adapters, "delete", full):
            await pool.wait(*[await pool.submit(adapter, seq) for seq in (1, 2, 3)])
            await writes.until_begun()
            deletion = asyncio.create_task(pool.delete_adapter(adapter))
            await asyncio.wait_for(is_deleting.wait(), 60)
            writes.may_go.set()
            await pool.written()
            core.loops["toy"]._snapshots.settle(core.registry.group("toy").logs)
            may_fail.set()
            with pytest.raises(ServiceError, match="nothing was accepted"):
                await deletion
        operations = await asyncio.wait_for(pool.wait(*[await pool.submit(adapter, seq) for seq in (4, 5, 6)]), 60)
        assert [each.state for each in operations] == [SUCCEEDED] * 3
        assert pool.chain(adapter) == expected_chain(spec, [((1, 2), 3), ((4, 5), 6)])
        await pool.delete_adapter(adapter)
        assert pool.coordinator.health()


async def test_an_adapter_that_waits_for_the_room_of_a_deleted_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a snapshot the copy leaves only with its adapter, and nothing else happens in the pool."""
    monkeypatch.setattr(snapshots, "RETRY_S", 600.0)

    async def full(*_: object) -> str:
        raise DiskFullError("no room")

    copy_bytes = toy_bytes(spec_named("a"))
    async with running_pool(tmp_path, engine_values=[{"host_bytes_max": copy_bytes}]) as pool:
        adapter, other = await pool.adapter(), await pool.adapter("bob")
        await pool.wait(await pool.submit(adapter, 1))
        monkeypatch.setattr(pool.core.states, "write_snapshot", full)
        name = await pool.forward_backward(other, 1, 5, tenant="bob")
        await until(lambda: pool.core.scheduling.schedules["toy"].snapshots.has_failed(adapter))
        assert pool.core.fleet.worker("w0").lacks_room
        await pool.delete_adapter(adapter)
        [done] = await asyncio.wait_for(pool.wait(name, tenant="bob"), 60)
        assert done.state == SUCCEEDED

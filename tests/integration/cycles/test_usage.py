"""Metering: tenants are charged exactly once for the cost that their operations report."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from coordinator.tenants.principals import Role
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import ToyPool, running_pool
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

Row = tuple[int, int, float]


def approx(value: float) -> Any:
    return pytest.approx(value)


async def usage(pool: ToyPool, tenant: str) -> dict[str, Row]:
    rows = (await pool.service.get_usage(await pool.principal(tenant), pool_pb2.GetUsageRequest())).rows
    assert {row.tenant for row in rows} <= {tenant}
    return {row.kind: (row.num_operations, row.num_tokens, row.engine_seconds) for row in rows}


def sums(operations: list[ops_pb.Operation]) -> dict[str, Row]:
    kinds: dict[str, list[ops_pb.Operation]] = defaultdict(list)
    for each in operations:
        kinds[ops_pb.OperationKind.Name(each.kind).removeprefix("OPERATION_KIND_").lower()].append(each)
    return {
        kind: (len(all_), sum(o.num_tokens for o in all_), approx(sum(o.engine_seconds for o in all_)))
        for kind, all_ in kinds.items()
    }


async def test_usage_is_the_sum_of_the_operations_by_tenant_and_kind(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=16) as pool:
        for tenant, lengths in (("alice", [8] * 6), ("bob", [3])):
            adapter = await pool.adapter(tenant)
            names = [await pool.forward_backward(adapter, 1, *lengths, tenant=tenant)]
            names.append(await pool.optim_step(adapter, 2, tenant))
            operations = await pool.wait(*names, tenant=tenant)
            operations.append(await pool.save(adapter, 3, "a", tenant))
            sampler = await pool.sampler(adapter.partition(":")[0], tenant)
            operations += await pool.wait(
                await pool.sample(sampler, 1, tenant, num_samples=2, max_tokens=5), tenant=tenant
            )
            assert operations[0].num_tokens == sum(lengths)
            assert operations[-1].num_tokens == 3 + 2 * 5
            assert await usage(pool, tenant) == sums(operations)


async def test_the_use_of_state_files_is_metered_once_and_survives_a_crash(tmp_path: Path) -> None:
    """Bytes of saves, loads, installs and copies are exact; an export is durable with the next write."""
    async with running_pool(tmp_path, is_crash=True, replay_s_max=1e6) as pool:
        adapter = await pool.adapter()
        saved = await pool.save(adapter, 1, "s")
        path = saved.save_state.path
        await pool.wait(await pool.load_state(adapter, 2, path))
        copy = await pool.adapter(base_model="", rank=0, from_path=path, with_optimizer=True)
        await pool.wait(await pool.forward_backward(copy, 1, 5))
        await pool.export(path)
        await pool.session()  # a later write
        before = await file_bytes(pool)
    size = before["save_state"]
    assert size > 0
    assert before == {
        "save_state": size,
        "load_state": 2 * size,  # it is read, and written as the snapshot behind it
        "copy": 2 * size,
        "install": size,
        "export": before["export"],
        "forward_backward": 0,
    }
    assert before["export"] > 0
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        assert await file_bytes(pool) == before
        await pool.wait(await pool.forward_backward(copy, 2, 5))
        after = await file_bytes(pool)
    assert after == before | {"install": 2 * size}, "the copy was installed again; nothing else was done again"


async def file_bytes(pool: ToyPool) -> dict[str, int]:
    rows = (await pool.service.get_usage(await pool.principal(), pool_pb2.GetUsageRequest())).rows
    return {row.kind: row.file_bytes for row in rows}


async def test_failed_operations_are_counted_and_repeated_requests_are_not(pool: ToyPool) -> None:
    adapter = await pool.adapter()
    names = {await pool.forward_backward(adapter, 1, 4, token=POISON_TOKEN) for _ in range(3)}
    names |= {await pool.optim_step(adapter, 2) for _ in range(3)}
    operations = await pool.wait(*names)
    counted = await usage(pool, "alice")
    assert len(operations) == 2
    assert {kind: row[0] for kind, row in counted.items()} == {"forward_backward": 1, "optim_step": 1}


async def test_a_replay_after_a_lost_worker_or_a_restart_is_not_charged_again(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        await pool.wait(*[await pool.forward_backward(adapter, seq, 5) for seq in (1, 2, 3)])
        before = await usage(pool, "alice")
        await pool.kill_worker()
        [step] = await pool.wait(await pool.optim_step(adapter, 4))
        assert (
            (await usage(pool, "alice"))["forward_backward"]
            == before["forward_backward"]
            == (
                3,
                15,
                approx(15e-6),
            )
        )
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.optim_step(adapter, 5))
        assert (await usage(pool, "alice"))["forward_backward"] == before["forward_backward"]
        assert pool.engines["w0"][-1].batches[0].items[0].seq == 1, "it was replayed"
    assert step.state == ops_pb.OPERATION_STATE_SUCCEEDED


async def test_an_administrator_sees_every_tenant(pool: ToyPool) -> None:
    adapters = {tenant: await pool.adapter(tenant) for tenant in ("alice", "bob")}
    for tenant, adapter in adapters.items():
        await pool.wait(await pool.forward_backward(adapter, 1, 4, tenant=tenant), tenant=tenant)
    key, _ = await pool.coordinator.authenticator.create_key("boss", role=Role.ADMIN)
    boss = pool.coordinator.authenticator.authenticate(key)
    rows = (await pool.service.get_usage(boss, pool_pb2.GetUsageRequest())).rows
    assert [(row.tenant, row.kind, row.num_tokens) for row in rows] == [
        ("alice", "forward_backward", 4),
        ("bob", "forward_backward", 4),
    ]

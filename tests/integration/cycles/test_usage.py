"""Metering: tenants are charged exactly once for the cost that their operations report."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, invalid
from coordinator.base.time import SystemTime
from coordinator.runtime import housekeeping
from coordinator.service import pool as pool_use_cases
from coordinator.tenants.principals import Principal, Role
from tests.support.database import query
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2, training_pb2

Row = tuple[int, int, float]
TENANT, MODEL, ADAPTER, KIND, DAY = (
    pool_pb2.USAGE_GROUP_TENANT,
    pool_pb2.USAGE_GROUP_MODEL,
    pool_pb2.USAGE_GROUP_ADAPTER,
    pool_pb2.USAGE_GROUP_KIND,
    pool_pb2.USAGE_GROUP_DAY,
)


class Calendar(SystemTime):
    """The machine's clocks, with a wall clock that a test sets to another day."""

    wall_now = 1_795_694_400.0
    """2026-11-26 12:00:00 UTC."""

    def wall(self) -> float:
        return self.wall_now


def approx(value: float | list[float]) -> Any:
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


async def grouped(
    pool: ToyPool, principal: Principal, *groups: pool_pb2.UsageGroup.ValueType, since: str = ""
) -> pool_pb2.GetUsageResponse:
    request = pool_pb2.GetUsageRequest(since=since, group_by=groups)
    response: pool_pb2.GetUsageResponse = await pool.service.get_usage(principal, request)
    return response


def tokens_by(response: pool_pb2.GetUsageResponse, *fields: str) -> dict[tuple[str, ...], int]:
    return {tuple(getattr(row, field) for field in fields): row.num_tokens for row in response.rows}


def check_days(data_dir: Path) -> None:
    """Check that the sums of all days are the totals, of each tenant and kind.

    One statement reads both, for a pass may be under way.
    """
    columns = "tenant_id, kind, SUM(num_operations), SUM(num_tokens), SUM(file_bytes), SUM(engine_s), SUM(file_s)"
    sums = (f"SELECT '{table}', {columns} FROM {table} GROUP BY 2, 3" for table in ("usage", "usage_days"))
    rows = [tuple(row) for row in query(data_dir, " UNION ALL ".join(sums) + " ORDER BY 1, 2, 3")]
    totals, days = ([row[1:] for row in rows if row[0] == table] for table in ("usage", "usage_days"))
    assert [row[:5] for row in days] == [row[:5] for row in totals] != []
    assert [each for row in days for each in row[5:]] == approx([each for row in totals for each in row[5:]])


async def test_usage_is_summed_by_day_model_and_adapter(tmp_path: Path) -> None:
    time = Calendar()
    async with running_pool(tmp_path, time=time) as pool:
        first, second = [await pool.adapter() for _ in range(2)]
        await pool.wait(await pool.forward_backward(first, 1, 5), await pool.forward_backward(second, 1, 7))
        time.wall_now += 12 * 3600 - 0.001
        await pool.wait(await pool.forward_backward(first, 2, 11))
        time.wall_now += 0.001
        await pool.wait(await pool.forward_backward(first, 3, 13))
        sampler = await pool.sampler(await pool.session())
        await pool.wait(await pool.sample(sampler, 1, max_tokens=4))
        alice = await pool.principal()
        by_day = await grouped(pool, alice, DAY)
        assert tokens_by(by_day, "day") == {("2026-11-26",): 23, ("2026-11-27",): 13 + 7}
        assert not by_day.HasField("start_day"), "since the beginning"
        assert not any(row.tenant or row.kind or row.HasField("adapter_id") for row in by_day.rows)
        assert tokens_by(await grouped(pool, alice, ADAPTER, MODEL), "adapter_id", "base_model") == {
            (first, "toy"): 29,
            (second, "toy"): 7,
            ("", "toy"): 7,
        }
        since = await grouped(pool, alice, since="2026-11-27")
        assert tokens_by(since, "tenant", "kind") == {("alice", "forward_backward"): 13, ("alice", "sample"): 7}
        assert since.start_day == "2026-11-27"
        rows = (await grouped(pool, alice, ADAPTER, DAY)).rows
        order = [(row.adapter_id, row.day) for row in rows]
        assert order == sorted(order)
        assert len(order) == 4
        for bad in ({"since": "yesterday"}, {"since": "2026-13-01"}, {"group_by": [0]}, {"group_by": [99]}):
            error = await refusal(pool.service.get_usage(alice, pool_pb2.GetUsageRequest(**bad)))
            assert error.code is Code.INVALID_ARGUMENT


async def test_the_sums_of_days_are_the_totals_also_after_a_crash(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True, replay_s_max=1e6) as pool:
        adapter = await pool.adapter()
        names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
        names.append(await pool.forward_backward(adapter, 3, 4, token=POISON_TOKEN))
        await pool.wait(*names)
        await refusal(
            pool.service.refuse(
                await pool.principal(), training_pb2.OptimStepRequest(adapter_id=adapter, seq=4), invalid("no")
            )
        )
        path = (await pool.save(adapter, 5, "s")).save_state.path
        copy = await pool.adapter(base_model="", rank=0, from_path=path, with_optimizer=True)
        await pool.wait(await pool.forward_backward(copy, 1, 5))
        published = await pool.publish(copy, 2, "w")
        sampler = await pool.sampler(copy.partition(":")[0], model_path=published.save_weights_for_sampler.path)
        await pool.wait(await pool.sample(sampler, 1, max_tokens=3))
        await pool.export(path)
        await pool.session()  # a later write
        await pool.forward_backward(copy, 3, 9)
        before = await grouped(pool, await pool.principal(), DAY, ADAPTER, KIND)
        assert {row.adapter_id for row in before.rows} == {adapter, copy}
        check_days(tmp_path)
    check_days(tmp_path)
    async with running_pool(tmp_path) as pool:
        await pool.take_over()
        await pool.wait(await pool.optim_step(copy, 4))
        check_days(tmp_path)
        await pool.delete_adapter(copy)
        check_days(tmp_path)


async def test_the_oldest_days_are_merged_by_the_sweep_and_a_start_before_the_others_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "DAYS_KEPT", 2)  # no test has four hundred
    time = Calendar()
    async with running_pool(tmp_path, time=time, sweep_interval_s=0.02) as pool:
        adapter, alice = await pool.adapter(), await pool.principal()
        for seq, length in ((1, 5), (2, 7), (3, 9)):
            await pool.wait(await pool.forward_backward(adapter, seq, length))
            time.wall_now += 86_400
        await until(lambda: not query(tmp_path, "SELECT 1 FROM used_days WHERE day = 20261126"))
        assert tokens_by(await grouped(pool, alice, ADAPTER, DAY), "adapter_id", "day") == {
            ("*", ""): 5,
            (adapter, "2026-11-27"): 7,
            (adapter, "2026-11-28"): 9,
        }
        since = await grouped(pool, alice, DAY, since="2026-11-01")
        assert (since.start_day, since.rows[0].day) == ("2026-11-27", "2026-11-27")
        assert (await grouped(pool, alice, DAY, since="2026-11-28")).start_day == "2026-11-28"
        check_days(tmp_path)


async def test_a_member_sees_its_own_days_and_an_administrator_those_of_all_tenants(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapters = {tenant: await pool.adapter(tenant) for tenant in ("alice", "bob")}
        for tenant, adapter in adapters.items():
            await pool.wait(await pool.forward_backward(adapter, 1, 4, tenant=tenant), tenant=tenant)
        everything = (TENANT, MODEL, ADAPTER, KIND, DAY)
        eve, bob, boss = await pool.principal("eve"), await pool.principal("bob"), await pool.administrator()
        assert not (await grouped(pool, eve, *everything)).rows
        assert {row.tenant for row in (await grouped(pool, bob, *everything)).rows} == {"bob"}
        assert tokens_by(await grouped(pool, bob, MODEL), "base_model") == {("toy",): 4}
        whole = await grouped(pool, boss, *everything)
        assert {(row.tenant, row.adapter_id) for row in whole.rows} == set(adapters.items())
        assert tokens_by(await grouped(pool, boss, MODEL), "base_model") == {("toy",): 8}, "summed over tenants"


async def test_usage_of_too_many_rows_is_refused_and_never_cut(pool: ToyPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_use_cases, "USAGE_ROWS_MAX", 2)  # no test makes ten thousand
    adapters = [await pool.adapter() for _ in range(3)]
    await pool.wait(*[await pool.forward_backward(each, 1, 4) for each in adapters])
    alice = await pool.principal()
    error = await refusal(grouped(pool, alice, ADAPTER))
    assert (error.code, "fewer groups" in error.message) == (Code.INVALID_ARGUMENT, True)
    assert tokens_by(await grouped(pool, alice, DAY, MODEL), "base_model") == {("toy",): 12}

"""The history: what operations waited for, where they ran, and the metrics of adapters by step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code
from coordinator.base.tenant_limits import TenantLimits
from coordinator.storage.rows import HistoryRow
from tests.support.database import query
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.history import progress_of
from tinkerpool.v1 import history_pb2 as pb
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2

ORDER, CYCLE, BUDGET = pb.WAIT_REASON_ORDER, pb.WAIT_REASON_CYCLE, pb.WAIT_REASON_BUDGET


async def entry_of(pool: ToyPool, name: str, tenant: str = "alice") -> pb.HistoryEntry:
    request = pb.GetHistoryEntryRequest(name=name)
    entry: pb.HistoryEntry = (await pool.service.get_history_entry(await pool.principal(tenant), request)).entry
    return entry


async def page(pool: ToyPool, target_id: str, tenant: str = "alice", **values: Any) -> pb.ListHistoryResponse:
    request = pb.ListHistoryRequest(target_id=target_id, **values)
    response: pb.ListHistoryResponse = await pool.service.list_history(await pool.principal(tenant), request)
    return response


async def report(
    pool: ToyPool, adapter_id: str, step: int, metrics: Mapping[str, float], tenant: str = "alice"
) -> None:
    request = pb.ReportMetricsRequest(adapter_id=adapter_id, step=step, metrics=metrics)
    await pool.service.report_metrics(await pool.principal(tenant), request)


def moments(entry: pb.HistoryEntry) -> list[int]:
    return [each.ToNanoseconds() for each in (entry.arrive_time, entry.begin_time, entry.end_time)]


def waits(entry: pb.HistoryEntry) -> dict[int, float]:
    return {each.reason: each.seconds for each in entry.waits}


async def test_the_error_for_an_operation_without_an_entry_says_that_refused_ones_have_none(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await refusal(pool.forward_backward(adapter, 1, 5, token=1000))
        assert (await refusal(entry_of(pool, f"{adapter}:1"))).message.endswith("a refused operation is not in it")


async def test_an_entry_tells_when_an_operation_came_what_it_waited_for_and_where_it_ran(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
        await pool.release()
        done = await pool.wait(*names)
        first, second = [await entry_of(pool, name) for name in names]
        for entry, operation in ((first, done[0]), (second, done[1])):
            assert moments(entry) == sorted(moments(entry))
            assert (entry.cycle_id, entry.worker_id, entry.num_tenants) == (operation.cycle_id, "w0", 1)
            assert (entry.num_tokens, entry.engine_seconds) == (operation.num_tokens, operation.engine_seconds)
            assert entry.state == ops_pb.OPERATION_STATE_SUCCEEDED
            assert (entry.num_begins, entry.position, entry.waits_for) == (1, 0, 0)
            waited_s = (entry.begin_time.ToNanoseconds() - entry.arrive_time.ToNanoseconds()) / 1e9
            assert sum(waits(entry).values()) == pytest.approx(waited_s, abs=2e-3)
        assert dict(first.metrics) == dict(done[0].forward_backward.metrics)
        assert dict(second.metrics) == dict(done[1].optim_step.metrics)
        assert ORDER in waits(second), "the step waited for its pass"
        assert set(waits(first)) <= {CYCLE}


async def test_an_operation_behind_a_seq_that_had_not_arrived_waited_for_that(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        behind = await pool.forward_backward(adapter, 2, 5)
        await asyncio.sleep(0.05)
        now = await entry_of(pool, behind)
        assert (now.state, now.waits_for) == (ops_pb.OPERATION_STATE_QUEUED, pb.WAIT_REASON_SEQUENCE)
        assert 0.05 <= waits(now)[pb.WAIT_REASON_SEQUENCE] < 60
        await pool.wait(await pool.forward_backward(adapter, 1, 5), behind)
        assert waits(await entry_of(pool, behind))[pb.WAIT_REASON_SEQUENCE] >= 0.05


async def test_an_operation_waits_for_the_budget_while_others_have_their_turn(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=5) as pool:
        adapters = [await pool.adapter(tenant) for tenant in ("alice", "bob")]
        pool.hold()
        names = [await pool.forward_backward(adapters[0], seq, 5) for seq in (1, 2)]
        other = await pool.forward_backward(adapters[1], 1, 5, tenant="bob")
        await until(lambda: pool.log_of(adapters[0]).waits.reason == ORDER)
        waiting = await entry_of(pool, names[1])
        assert (waiting.state, waiting.position, waiting.waits_for) == (ops_pb.OPERATION_STATE_QUEUED, 1, ORDER)
        running = await entry_of(pool, names[0])
        assert (running.state, running.waits_for) == (ops_pb.OPERATION_STATE_RUNNING, 0)
        assert running.cycle_id == 1
        assert progress_of(running) == f"{names[0]} (forward_backward) runs on w0 in cycle 1"
        await pool.release()
        await pool.wait(*names)
        await pool.wait(other, tenant="bob")
        entries = [await entry_of(pool, names[1]), await entry_of(pool, other, "bob")]
        assert BUDGET in waits(max(entries, key=lambda each: each.cycle_id)), "one of them was last"


async def test_an_adapter_waits_for_a_slot_of_its_worker(tmp_path: Path) -> None:
    async with running_pool(tmp_path, cycle_tokens_max=1000) as pool:
        num_slots = pool.core.fleet.worker("w0").info.num_slots
        adapters = [await pool.adapter() for _ in range(num_slots + 1)]
        pool.hold()
        first = await pool.adapter()
        blocker = await pool.forward_backward(first, 1, 5)
        await until(lambda: pool.log_of(first).waits.reason == ORDER)
        names = [await pool.forward_backward(adapter, 1, 5) for adapter in adapters]
        await pool.release()
        await pool.wait(blocker, *names)
        entries = [await entry_of(pool, name) for name in names]
        assert any(pb.WAIT_REASON_SLOTS in waits(entry) for entry in entries)


async def test_a_sample_has_an_entry_without_a_cycle(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        sampler = await pool.sampler(await pool.session())
        name = await pool.sample(sampler, 1, max_tokens=3)
        [sample] = await pool.wait(name)
        entry = await entry_of(pool, name)
        assert (entry.cycle_id, entry.worker_id, entry.num_tokens) == (0, "w0", sample.num_tokens)
        assert moments(entry) == sorted(moments(entry))


async def test_a_failed_operation_has_its_reason_and_a_discard_no_worker(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        names = [
            await pool.forward_backward(adapter, 1, 4, token=POISON_TOKEN),
            await pool.discard_gradient(adapter, 2),
        ]
        failed, _ = await pool.wait(*names)
        entries = (await page(pool, adapter)).entries
        assert [each.operation for each in entries] == names
        assert (entries[0].state, entries[0].error_reason) == (ops_pb.OPERATION_STATE_FAILED, failed.error.reason)
        assert (entries[1].worker_id, entries[1].num_begins, entries[1].cycle_id) == ("", 0, 0)


async def test_what_ends_with_its_adapter_has_an_entry_too(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        name = await pool.forward_backward(adapter, 2, 5)  # seq 1 never comes
        await pool.delete_adapter(adapter)
        entry = await entry_of(pool, name)
        assert (entry.state, entry.error_reason) == (ops_pb.OPERATION_STATE_FAILED, "ADAPTER_DELETED")


async def test_the_history_is_listed_by_pages_in_the_order_of_commits_with_reported_metrics(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        for seq in (1, 2, 3):
            await pool.wait(await pool.forward_backward(adapter, seq, 5))
            await report(pool, adapter, seq, {"reward": seq / 2})
        whole = await page(pool, adapter)
        assert [each.operation for each in whole.entries] == [
            f"{adapter}:1",
            "",
            f"{adapter}:2",
            "",
            f"{adapter}:3",
            "",
        ]
        assert [(each.step, dict(each.metrics)) for each in whole.entries][1::2] == [
            (seq, {"reward": seq / 2}) for seq in (1, 2, 3)
        ]
        assert not whole.has_more
        first = await page(pool, adapter, page_size=4)
        rest = await page(pool, adapter, page_size=4, page_token=first.next_page_token)
        assert ([*first.entries, *rest.entries], first.has_more, rest.has_more) == (list(whole.entries), True, False)
        later = await page(pool, adapter, page_token=whole.next_page_token)
        assert not later.entries
        await report(pool, adapter, 4, {"reward": 9.0})
        assert len((await page(pool, adapter, page_token=later.next_page_token)).entries) == 1


async def test_a_repeated_report_is_added_once(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter, other = await pool.adapter(), await pool.adapter()
        await asyncio.gather(*(report(pool, adapter, 1, {"loss": math.nan, "reward": 0.5}) for _ in range(3)))
        await report(pool, adapter, 1, {"reward": 0.5})
        await report(pool, adapter, 2, {"reward": 0.5})
        await report(pool, adapter, 1, {"reward": 0.5, "loss": math.nan})
        await report(pool, other, 2, {"reward": 0.5})
        found = [(each.step, sorted(each.metrics)) for each in (await page(pool, adapter)).entries]
        assert found == [(1, ["loss", "reward"]), (1, ["reward"]), (2, ["reward"])]
        assert len((await page(pool, other)).entries) == 1


async def test_the_history_of_others_is_empty_and_their_operations_are_unknown(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        name = await pool.forward_backward(adapter, 1, 5)
        pool_has = await pool.wait(name)
        assert pool_has
        assert not (await page(pool, adapter, "eve")).entries
        for each in (name, "unknown:1", f"{adapter}:01", "x"):
            error = await refusal(entry_of(pool, each, "eve"))
            assert (error.code, error.reason) == (Code.NOT_FOUND, "NOT_FOUND")
        error = await refusal(report(pool, adapter, 1, {"loss": 1.0}, "eve"))
        assert error.code is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("step", "metrics", "reason"),
    [
        (0, {}, "0 metrics in one report: send 1 to 64"),
        (0, {f"m{i}": 1.0 for i in range(65)}, "65 metrics in one report"),
        (0, {"": 1.0}, "the name of a metric has 1 to 128 characters"),
        (0, {"x" * 129: 1.0}, "the name of a metric has 1 to 128 characters"),
        (-1, {"loss": 1.0}, "step must be 0 or more, not -1"),
    ],
)
async def test_a_bad_report_is_refused(tmp_path: Path, step: int, metrics: dict[str, float], reason: str) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        error = await refusal(report(pool, adapter, step, metrics))
        assert error.code is Code.INVALID_ARGUMENT
        assert reason in error.message
        assert not (await page(pool, adapter)).entries


async def test_a_page_of_a_negative_size_is_refused(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        assert (await refusal(page(pool, "a", page_size=-1))).code is Code.INVALID_ARGUMENT


async def test_reports_take_from_the_rate_of_operations(tmp_path: Path) -> None:
    async with running_pool(tmp_path, tenant_limits=TenantLimits(operations_per_s=0.3)) as pool:
        adapter = await pool.adapter()
        await report(pool, adapter, 0, {"loss": 1.0})
        assert (await refusal(report(pool, adapter, 1, {"loss": 1.0}))).reason == "RATE_LIMITED"


async def test_entries_survive_a_crash_and_what_came_before_it_has_no_arrival(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True, replay_s_max=1e6) as pool:
        adapter = await pool.adapter()
        name = await pool.forward_backward(adapter, 1, 5)
        await pool.wait(name)
        before = await entry_of(pool, name)
        pool.hold()
        waiting = await pool.forward_backward(adapter, 2, 5)
    async with running_pool(tmp_path, replay_s_max=1e6) as pool:
        await pool.wait(waiting)
        assert await entry_of(pool, name) == before, "the replay has not changed it"
        entry = await entry_of(pool, waiting)
        assert not entry.HasField("arrive_time")
        assert entry.HasField("begin_time")
        assert not entry.waits


async def test_a_tenant_keeps_its_newest_entries_whatever_others_do(tmp_path: Path) -> None:
    async with running_pool(tmp_path, history_rows=3, sweep_interval_s=0.02) as pool:
        adapters = {tenant: await pool.adapter(tenant) for tenant in ("alice", "bob")}
        await pool.wait(await pool.forward_backward(adapters["bob"], 1, 5, tenant="bob"), tenant="bob")
        for seq in range(1, 8):
            await pool.wait(await pool.forward_backward(adapters["alice"], seq, 5))
        await until(lambda: len(pool.store.history.page(pool.tenant_id(), adapters["alice"], 0, 100)) <= 3)
        left = [each.operation for each in (await page(pool, adapters["alice"])).entries]
        assert left == [f"{adapters['alice']}:{seq}" for seq in (5, 6, 7)]
        assert len((await page(pool, adapters["bob"], "bob")).entries) == 1
        assert (await refusal(entry_of(pool, f"{adapters['alice']}:1"))).code is Code.NOT_FOUND


async def test_old_entries_are_deleted_and_entries_count_as_rows_of_their_tenant(tmp_path: Path) -> None:
    async with running_pool(tmp_path, sweep_interval_s=0.02) as pool:
        adapter, tenant_id = await pool.adapter(), pool.tenant_id()
        before = pool.store.tenants.row_bytes(tenant_id)
        await pool.store.history.report(tenant_id, adapter, b"x" * 1000, lambda _: False)
        assert pool.store.tenants.row_bytes(tenant_id) - before >= 1000
        await pool.store.history.drop(pool.store.service_time() + 1.0, 100)
        assert pool.store.tenants.row_bytes(tenant_id) == before
        assert query(tmp_path, "SELECT history_rows FROM tenants WHERE tenant_id = ?", tenant_id)[0][0] == 0


async def test_a_pool_without_a_history_writes_no_entries(tmp_path: Path) -> None:
    async with running_pool(tmp_path, history_rows=0) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        assert not pool.store.history.page(pool.tenant_id(), adapter, 0, 10)


async def test_an_entry_has_nothing_of_a_requests_contents(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        [row] = pool.store.history.page(pool.tenant_id(), adapter, 0, 10)
        assert isinstance(row, HistoryRow)
        known = {field.name for field, _ in pb.HistoryEntry.FromString(row.entry).ListFields()}
        assert not known & {"payload", "tokens", "logprobs"}
        assert len(row.entry) < 400


async def test_a_cycle_tells_administrators_where_the_time_of_its_workers_went(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.wait(await pool.forward_backward(await pool.adapter(), 1, 5))
        for principal, workers in ((await pool.administrator(), ["w0"]), (await pool.principal(), [])):
            [cycle] = (await pool.service.get_pool_status(principal, pool_pb2.GetPoolStatusRequest())).cycles
            assert [each.worker_id for each in cycle.workers] == workers
            assert all(0 < each.seconds["forward"] <= cycle.pass_seconds for each in cycle.workers)

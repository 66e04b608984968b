"""Metrics over HTTP: what a pool counts, in both of Prometheus's formats."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
from prometheus_client import Metric, parser
from prometheus_client.openmetrics import parser as open_parser

from coordinator.base.config import MetricsConfig
from coordinator.base.errors import invalid
from coordinator.doors.door import DoorError, to_refusal
from coordinator.doors.metrics import MetricsDoor
from coordinator.runtime.gauges import GAUGES, REST
from tests.support.metrics import fetch, served
from tests.support.toy_engine import POISON_TOKEN
from tests.support.toy_pool import running_pool
from tests.support.waiting import until

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(url: str) -> Samples:
    _, text = await asyncio.to_thread(fetch, url, "text/plain")
    return samples(parser.text_string_to_metric_families(text))


def samples(families: Iterable[Metric]) -> Samples:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def risen(before: Samples, after: Samples, name: str, **labels: str) -> float:
    key = (f"tinkerpool_{name}", tuple(sorted(labels.items())))
    return after.get(key, 0.0) - before.get(key, 0.0)


async def test_what_a_pool_does_is_counted(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        before = await scrape(url)
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.forward_backward(adapter, 1, 5), await pool.optim_step(adapter, 2)]
        await until(lambda: pool.log_of(adapter).copy.is_running(pool.log_of(adapter).operations[1]))
        during = await scrape(url)
        await pool.release()
        done = await pool.wait(*names)
        await pool.wait(await pool.forward_backward(adapter, 3, 4, token=POISON_TOKEN))
        after = await scrape(url)
        assert during["tinkerpool_unfinished_operations", (("kind", "forward_backward"),)] == 1
        assert during["tinkerpool_oldest_operation_seconds", (("kind", "optim_step"),)] >= 0
        assert ("tinkerpool_unfinished_operations", (("kind", "optim_step"),)) not in after
        assert risen(before, after, "operations_total", kind="optim_step", outcome="succeeded") == 1
        assert risen(before, after, "operations_total", kind="forward_backward", outcome="failed") == 1
        assert risen(before, after, "operation_seconds_count", kind="forward_backward") == 2
        tokens = risen(before, after, "tokens_total", kind="forward_backward")
        assert tokens == done[0].num_tokens, "a failed pass may have run no token"
        assert risen(before, after, "cycles_total", base_model="toy") == 2
        for phase in ("pass", "step", "commit"):
            assert risen(before, after, "cycle_seconds_count", base_model="toy", phase=phase) == 2
        assert risen(before, after, "cycle_tenants_sum", base_model="toy") == 2
        assert risen(before, after, "cycle_budget_used_ratio_count", base_model="toy") == 2
        assert risen(before, after, "operation_wait_seconds_total", reason="order") > 0
        assert risen(before, after, "adapter_installs_total") == 1
        assert risen(before, after, "database_commit_seconds_count") > 0
        assert risen(before, after, "database_bytes_total") > 100
        assert after["tinkerpool_data_bytes", ()] > 10_000
        assert after["tinkerpool_disk_free_bytes", ()] > 0
        assert after["tinkerpool_worker_adapters", (("worker", "w0"),)] == 1
        assert after["tinkerpool_workers", (("base_model", "toy"), ("state", "ready"))] == 1


async def test_losses_replays_and_refusals_are_counted_by_their_cause(tmp_path: Path) -> None:
    async with running_pool(tmp_path, replay_s_max=1e6) as pool, served(pool) as url:
        before = await scrape(url)
        adapter = await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 5))
        pool.lose_worker()
        await pool.wait(await pool.forward_backward(adapter, 2, 5))
        after = await scrape(url)
        assert risen(before, after, "worker_losses_total", cause="died") == 1
        assert risen(before, after, "replayed_operations_total") == 1
        assert risen(before, after, "adapter_installs_total") == 2


async def test_limits_have_gauges_and_every_gauge_is_served(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        adapter = await pool.adapter()
        pool.hold()
        name = await pool.forward_backward(adapter, 1, 5)
        text = (await asyncio.to_thread(fetch, url, ""))[1]
        await pool.release()
        await pool.wait(name)
        found = {family.name: family for family in parser.text_string_to_metric_families(text)}
        assert {f"tinkerpool_{name}" for name in GAUGES} <= found.keys()
        limits = {sample.labels["limit"]: sample.value for sample in found["tinkerpool_limit_used_ratio"].samples}
        assert limits.keys() == pool.core.quotas.listed.keys()
        assert limits["adapters_max"] == 1 / pool.core.quotas.of(pool.tenant_id()).adapters_max
        assert found["process_cpu_seconds"].samples, "processor time of the coordinator"


async def test_a_scrape_walks_no_operations_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        adapter = await pool.adapter()
        pool.hold()
        name = await pool.forward_backward(adapter, 1, 5)
        walk = Mock(wraps=pool.core.in_flight.all)
        monkeypatch.setattr(pool.core.in_flight, "all", walk)
        found = await scrape(url)
        assert found["tinkerpool_unfinished_operations", (("kind", "forward_backward"),)] == 1
        assert found["tinkerpool_active_tenants", ()] == 1
        assert not walk.call_count
        await pool.release()
        await pool.wait(name)


async def test_tenants_are_named_only_if_they_are_asked_for_and_then_only_the_largest(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        for tenant, length in (("alice", 5), ("bob", 4), ("carol", 3)):
            await pool.wait(
                await pool.forward_backward(await pool.adapter(tenant), 1, length, tenant=tenant), tenant=tenant
            )
        async with served(pool) as url:
            text = (await asyncio.to_thread(fetch, url, ""))[1]
            assert not any(name in text for name in ("alice", "bob", "carol", *pool.core.registry.logs))
        async with served(pool, num_tenants=1) as url:
            found = await scrape(url)
            tokens = {key[1][0][1]: value for key, value in found.items() if key[0] == "tinkerpool_tenant_tokens_total"}
            assert tokens == {"alice": 5.0, REST: 7.0}


async def test_both_formats_are_served_and_parse(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        await pool.wait(await pool.forward_backward(await pool.adapter(), 1, 5))
        kind, text = await asyncio.to_thread(fetch, url, OPENMETRICS)
        assert kind.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")
        assert samples(open_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
        kind, text = await asyncio.to_thread(fetch, url, "text/plain")
        assert kind.startswith("text/plain")
        assert samples(parser.text_string_to_metric_families(text))


async def test_a_port_in_use_is_reported_with_the_option(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(DoorError, match="--metrics-port"):
            MetricsDoor(MetricsConfig(port=port)).bind()


async def test_a_refused_call_is_counted_by_its_reason(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool, served(pool) as url:
        before = await scrape(url)
        for error in (ValueError("a fault"), invalid("no"), invalid("no again")):
            to_refusal(error, "a call")
        after = await scrape(url)
        assert risen(before, after, "refusals_total", reason="INTERNAL") == 1
        assert risen(before, after, "refusals_total", reason="INVALID_ARGUMENT") == 2

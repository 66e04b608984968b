"""Usage by day, model and adapter: every sum is exact, also after merges, and merges bound the rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.base.time import day_of, month_of
from coordinator.storage.rows import FileUse, UsageRow
from coordinator.storage.sqlite import Connection
from coordinator.storage.store import Store
from coordinator.storage.usage import MERGED_MAX, add_file_use, add_usage
from tests.support.database import TENANT, adapter_row, open_store, query, sampler_row, session_row

ALL = ("day", "model", "adapter", "kind")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    store = await open_store(tmp_path / "log.db")
    store.sessions.insert(session_row("s"))
    await store.adapters.insert(adapter_row("s:train:0", "s"), None)
    yield store
    await store.close()


async def add(store: Store, day: int, target_id: str, kind: str = "forward_backward", num_tokens: int = 10) -> None:
    def write(db: Connection) -> None:
        add_usage(db, TENANT, target_id, kind, day, num_tokens=num_tokens, engine_s=0.5)

    await store.database.write(write)


async def add_adapters(store: Store, day: int, number: int) -> None:
    """Add the use of files of so many adapters, one byte each."""

    def write(db: Connection) -> None:
        for index in range(number):
            use = FileUse(
                adapter_id=f"s:train:{index}", base_model="toy", tenant_id=TENANT, kind="copy", num_bytes=1, seconds=0.5
            )
            add_file_use(db, use, day)

    await store.database.write(write)


def rows(store: Store, *groups: str, since: int = 0) -> list[UsageRow]:
    return list(store.usage.by(groups or ALL, TENANT, since))


def key(row: UsageRow) -> tuple[int | None, str | None, str | None, str]:
    return row.day, row.base_model, row.adapter_id, row.kind


def totals(found: list[UsageRow]) -> list[tuple[str, int, int, float, int, float]]:
    return [(r.kind, r.num_operations, r.num_tokens, r.engine_s, r.file_bytes, r.file_s) for r in found]


def num_adapter_rows(path: Path) -> tuple[int, int]:
    """Return the number of rows that name an adapter, and what the tenant counts."""
    [[number]] = query(path / "log.db", "SELECT COUNT(*) FROM usage_days WHERE adapter_id NOT IN ('', '*')")
    [[counted]] = query(path / "log.db", "SELECT usage_adapter_rows FROM tenants")
    return number, counted


def test_a_day_is_of_the_calendar_in_utc() -> None:
    assert day_of(1_795_564_799.0) == 20261124  # 2026-11-24 23:59:59
    assert day_of(1_795_564_800.0) == 20261125
    assert month_of(20261125) == 202611


async def test_an_operation_counts_for_the_model_and_adapter_of_its_target(store: Store) -> None:
    await store.samplers.insert(sampler_row("s:sample:0", base_model="other"))
    await store.samplers.insert(sampler_row("s:sample:1", adapter_id="s:train:0"))
    await add(store, 20261126, "s:train:0")
    await add(store, 20261126, "s:sample:0", "sample")
    await add(store, 20261126, "s:sample:1", "sample")
    await add(store, 20261127, "s:train:0", num_tokens=3)
    await add(store, 20261127, "gone", "sample", num_tokens=4)
    assert [(*key(row), row.num_tokens) for row in rows(store)] == [
        (20261126, "other", "", "sample", 10),
        (20261126, "toy", "s:train:0", "forward_backward", 10),
        (20261126, "toy", "s:train:0", "sample", 10),
        (20261127, "", "", "sample", 4),
        (20261127, "toy", "s:train:0", "forward_backward", 3),
    ]
    assert [(row.adapter_id, row.num_tokens) for row in rows(store, "adapter", since=20261127)] == [
        ("", 4),
        ("s:train:0", 3),
    ]
    assert totals(rows(store, "kind")) == totals(store.usage.of(TENANT))


async def test_days_that_are_merged_keep_their_sums_without_day_and_adapter(store: Store, tmp_path: Path) -> None:
    for day in (20251001, 20251002, 20261126):
        await add(store, day, "s:train:0")
        await add_adapters(store, day, 3)
    before = totals(rows(store, "kind"))
    await store.usage.merge(3, 1000)
    assert store.usage.first_day() == 0
    await store.usage.merge(2, 1000)
    assert store.usage.first_day() == 20251002
    assert [(*key(row), row.num_operations) for row in rows(store) if not row.day] == [
        (0, "toy", "*", "copy", 3),
        (0, "toy", "*", "forward_backward", 1),
    ]
    assert {row.day for row in rows(store)} == {0, 20251002, 20261126}
    await store.usage.merge(1, 1000)
    assert [(*key(row), row.num_operations) for row in rows(store) if not row.day] == [
        (0, "toy", "*", "copy", 6),
        (0, "toy", "*", "forward_backward", 2),
    ]
    assert totals(rows(store, "kind")) == before == totals(store.usage.of(TENANT))
    assert num_adapter_rows(tmp_path) == (4, 4)
    assert [row["day"] for row in query(tmp_path / "log.db", "SELECT day FROM used_days")] == [20261126]


async def test_a_clock_that_runs_ahead_for_a_day_makes_no_day_old(store: Store) -> None:
    for day in (20261125, 20991231, 20261126):
        await add(store, day, "s:train:0")
    await store.usage.merge(3, 1000)
    assert {row.day for row in rows(store)} == {20261125, 20261126, 20991231}


async def test_beyond_the_most_rows_the_oldest_days_lose_their_adapters_and_no_sum(
    store: Store, tmp_path: Path
) -> None:
    for day in (20261124, 20261125, 20261126):
        await add_adapters(store, day, MERGED_MAX + 100)
    before = totals(rows(store, "day", "kind"))
    await store.usage.merge(3, 2 * MERGED_MAX)
    assert num_adapter_rows(tmp_path) == (2 * MERGED_MAX, 2 * MERGED_MAX)
    assert totals(rows(store, "day", "kind")) == before
    assert store.usage.first_day() == 0, "every day is kept"
    by_day = {day: [row for row in rows(store) if row.day == day] for day in (20261124, 20261125, 20261126)}
    assert [len(found) for found in by_day.values()] == [1, 401, MERGED_MAX + 100]
    assert by_day[20261124][0].adapter_id == "*"
    assert totals(rows(store, "kind")) == totals(store.usage.of(TENANT))

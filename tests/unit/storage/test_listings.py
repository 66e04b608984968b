"""Lists of a tenant with many adapters, whose metadata may be large: what a page has, and what SQLite reads for it."""

import sqlite3
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from coordinator.base.errors import Failure
from coordinator.limits.turns import Turns
from coordinator.service.listings import Listed, page_bounds
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import EXAMINED_MAX, START, Listing, Place
from coordinator.storage.sqlite import Connection, open_connection
from coordinator.storage.store import Store
from tests.support.database import TENANT, adapter_row, session_row
from tests.support.toy_pool import FakeTime
from tinkerpool.names import CheckpointPath
from tinkerpool.v1.checkpoints_pb2 import Checkpoint, ListCheckpointsRequest


def plans(path: Path, statements: list[str]) -> list[list[str]]:
    """Return how SQLite runs each statement."""
    db = sqlite3.connect(path)
    try:
        return [[row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")] for statement in statements]
    finally:
        db.close()


def traced(path: Path, statements: list[str]) -> Store:
    """Return a new store that adds each statement which SQLite runs for it."""

    def connect(path: Path) -> Connection:
        db = open_connection(path)
        db.set_trace_callback(statements.append)
        return db

    return Store(path, FakeTime(), Failure(), connect=connect)


@pytest.mark.parametrize("wanted", [{}, {"name_prefix": "run"}, {"reference": "run"}, {"reference": "s:train:1"}])
async def test_a_list_of_adapters_is_walked_in_an_index_and_reads_the_rows_of_its_page_only(
    tmp_path: Path, wanted: dict[str, str]
) -> None:
    path, statements = tmp_path / "log.db", list[str]()
    store = traced(path, statements)
    await store.tenants.create(TENANT, Act(at=0.0, act="tenant.create", subject="alice"))
    await store.sessions.insert(session_row("s"))
    for number in range(3):
        await store.adapters.insert(adapter_row(f"s:train:{number}", "s"), None)
    statements.clear()
    listing = store.adapters.listing(TENANT, 16, START, **wanted)
    walked = list(statements)
    statements.clear()
    store.adapters.listing(TENANT, 16, Place((1.0, "s:train:1"), 2), **wanted)
    _, behind = list(statements)
    statements.clear()
    listing.read([f"s:train:{number}" for number in range(16)])
    store.adapters.sort_keys(TENANT, **wanted)
    read, *ids = list(statements)
    await store.close()
    for plan in plans(path, [*walked, *ids]):
        assert plan == ["SEARCH adapters USING COVERING INDEX adapters_listed (tenant_id=?)"]
    assert len(walked) == 2
    [plan] = plans(path, [behind])
    assert plan == ["SEARCH adapters USING COVERING INDEX adapters_listed (tenant_id=? AND created_at<?)"]
    [plan] = plans(path, [read])
    assert any("adapters USING INDEX sqlite_autoindex_adapters_1 (adapter_id=?)" in line for line in plan), plan
    assert not any("tenant_id=?" in line for line in plan)


async def test_a_page_of_sessions_checkpoints_and_tenants_is_walked_in_an_index_from_its_place(tmp_path: Path) -> None:
    path, statements = tmp_path / "log.db", list[str]()
    store = traced(path, statements)
    place = Place((1.0, "s"), 2)
    statements.clear()
    store.sessions.listing(TENANT, 16, place)
    store.checkpoints.listing(TENANT, ["weights"], "", 16, place)
    store.tenants.listing(16, place)
    _, of_sessions, _, of_checkpoints, _, of_tenants = plans(path, list(statements))
    await store.close()
    assert of_sessions == ["SEARCH sessions USING INDEX sessions_listed (tenant_id=? AND created_at<?)"]
    assert of_checkpoints[0] == "SEARCH checkpoints USING INDEX checkpoints_by_tenant (tenant_id=? AND created_at<?)"
    assert of_tenants == ["SCAN tenants USING COVERING INDEX sqlite_autoindex_tenants_2"]


async def test_a_page_of_keys_is_walked_in_an_index_from_its_place_and_reads_no_tenant(tmp_path: Path) -> None:
    path, statements = tmp_path / "log.db", list[str]()
    store = traced(path, statements)
    statements.clear()
    store.api_keys.listing(16, START)
    store.api_keys.listing(16, Place((1.0, "k"), 2))
    [counted], [of_first_page], counted_again, [behind] = plans(path, list(statements))
    await store.close()
    assert counted.startswith("SCAN api_keys USING COVERING INDEX")
    assert counted_again == [counted]
    assert of_first_page == "SCAN api_keys USING COVERING INDEX api_keys_listed"
    assert behind == "SEARCH api_keys USING COVERING INDEX api_keys_listed (created_at<?)"


async def test_a_page_has_the_rows_behind_its_place_as_a_slice_of_the_whole_list(tmp_path: Path) -> None:
    store = Store(tmp_path / "log.db", FakeTime(), Failure())
    await store.tenants.create(TENANT, Act(at=0.0, act="tenant.create", subject="alice"))
    await store.sessions.insert(session_row("s"))
    times = [0.1 + 0.2, 0.3, 2.0, 2.0, 2.0, 1e9 + 0.123456, -1.5]
    rows = [replace(adapter_row(f"s:train:{n}", "s"), created_at=at) for n, at in enumerate(times)]
    for row in rows:
        await store.adapters.insert(row, None)
    expected = sorted(((row.created_at, row.adapter_id) for row in rows), key=lambda each: (-each[0], each[1]))
    every = store.adapters.sort_keys(TENANT)
    assert every == expected
    for number, limit, skip in product(range(-1, len(rows)), (1, 3, 10), (0, 1, 10)):
        start = number + 1 + skip
        place = Place(expected[number] if number >= 0 else None, skip)
        for listing in (
            store.adapters.listing(TENANT, limit, place),
            store.adapters.listing_of(TENANT, every, limit, place),
        ):
            assert listing.sort_keys == expected[start : start + limit]
            assert (listing.has_more, listing.num_total) == (start + limit < len(rows), len(rows))
    await store.close()


@pytest.mark.parametrize("created_at", [0.0, -3.5, 5e-07, 1764442667.1234567, 1e16, 1e22])
async def test_the_token_of_a_page_names_its_last_row_also_by_the_longest_key(created_at: float) -> None:
    path = str(CheckpointPath.parse(f"tinker://{'a' * 64}:train:999999999/external_weights/{'c' * 128}"))
    listing = Listing([(created_at, path)], True, 2, list[str])
    _, token, _ = await Listed(listing, lambda path: Checkpoint(path=path), Turns(1), TENANT).page()
    request = ListCheckpointsRequest(page_token=token, skip=3)
    assert page_bounds(request, 7) == (7, Place((created_at, path), 3))


async def test_the_newest_checkpoints_of_adapters_are_found_in_an_index_whatever_their_number(tmp_path: Path) -> None:
    path, statements = tmp_path / "log.db", list[str]()
    store = traced(path, statements)
    statements.clear()
    store.checkpoints.newest(TENANT, ["s:train:1", "s:train:2"], ["weights", "sampler_weights"])
    [found] = statements
    await store.close()
    [plan] = plans(path, [found])
    assert "SEARCH older USING INDEX checkpoints_by_adapter (adapter_id=? AND kind=?)" in plan
    assert not any("TEMP B-TREE" in line for line in plan), plan


async def test_the_entries_of_a_session_are_found_in_the_order_of_their_commits_by_slices_of_the_tenants_entries(
    tmp_path: Path,
) -> None:
    path, statements = tmp_path / "log.db", list[str]()
    store = traced(path, statements)
    await store.tenants.create(TENANT, Act(at=0.0, act="tenant.create", subject="alice"))
    targets = ["s:train:1", "s2:train:0", "s:sample:0", "r:train:0"] * (EXAMINED_MAX // 2)
    for target in targets[:-1]:
        store.history.report(TENANT, target, target.encode(), lambda _: False)
    await store.history.report(TENANT, targets[-1], targets[-1].encode(), lambda _: False)
    statements.clear()
    found, last_id, num_slices = [], 0, 0
    while True:
        rows, last_id = store.history.of_session(TENANT, "s", last_id)
        if not last_id:
            break
        found += [row.target_id for row in rows]
        num_slices += 1
    walked = list(statements)
    others = store.history.of_session("another", "s", 0)
    await store.close()
    assert found == [target for target in targets if target.startswith("s:")]
    assert num_slices == len(targets) // EXAMINED_MAX
    assert others == ([], 0)
    for plan in plans(path, walked):
        assert any("history_by_tenant (tenant_id=? AND entry_id>?" in line for line in plan), plan

"""Lists of a tenant with many adapters, whose metadata may be large: what SQLite reads for a page."""

import sqlite3
from pathlib import Path

import pytest

from coordinator.base.errors import Failure
from coordinator.storage.access.audit import Act
from coordinator.storage.sqlite import Connection, open_connection
from coordinator.storage.store import Store
from tests.support.database import TENANT, adapter_row, session_row
from tests.support.toy_pool import FakeTime


def plans(path: Path, statements: list[str]) -> list[list[str]]:
    """Return how SQLite runs each statement."""
    db = sqlite3.connect(path)
    try:
        return [[row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {statement}")] for statement in statements]
    finally:
        db.close()


@pytest.mark.parametrize("wanted", [{}, {"name_prefix": "run"}, {"reference": "run"}, {"reference": "s:train:1"}])
async def test_a_list_of_adapters_is_walked_in_an_index_and_reads_the_rows_of_its_page_only(
    tmp_path: Path, wanted: dict[str, str]
) -> None:
    path = tmp_path / "log.db"
    statements: list[str] = []

    def connect(path: Path) -> Connection:
        db = open_connection(path)
        db.set_trace_callback(statements.append)
        return db

    store = Store(path, FakeTime(), Failure(), connect=connect)
    await store.tenants.create(TENANT, Act(at=0.0, act="tenant.create", subject="alice"))
    await store.sessions.insert(session_row("s"))
    for number in range(3):
        await store.adapters.insert(adapter_row(f"s:train:{number}", "s"), None)
    statements.clear()
    listing = store.adapters.listing(TENANT, 16, 0, **wanted)
    walked = list(statements)
    statements.clear()
    listing.read([f"s:train:{number}" for number in range(16)])
    store.adapters.ids(TENANT, **wanted)
    read, *ids = list(statements)
    await store.close()
    for plan in plans(path, [*walked, *ids]):
        assert plan == ["SEARCH adapters USING COVERING INDEX adapters_listed (tenant_id=?)"]
    assert len(walked) == 2
    [plan] = plans(path, [read])
    assert any("adapters USING INDEX sqlite_autoindex_adapters_1 (adapter_id=?)" in line for line in plan), plan
    assert not any("tenant_id=?" in line for line in plan)

"""The stored records of probations."""

from pathlib import Path

from coordinator.base.errors import Failure
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import ProbationRow
from coordinator.storage.store import Store
from tests.support.toy_pool import FakeTime


async def test_a_record_is_stored_with_the_next_write_unless_its_tenant_is_gone(
    tmp_path: Path,
) -> None:
    """A failed note would fail the commit that it rides with."""
    store = Store(tmp_path / "tinkerpool.db", FakeTime(), Failure())
    await store.database.execute("INSERT INTO tenants (tenant_id, name, created_at) VALUES ('t', 'alice', 0)")
    rows = {
        tenant_id: ProbationRow(
            tenant_id=tenant_id, num_kills=2, killed_service_s=3.0, until_service_s=4.0, operation="a:1"
        )
        for tenant_id in ("t", "gone")
    }
    for row in rows.values():
        store.probations.note(row)
    await store.database.execute("UPDATE tenants SET name = 'bob'")
    assert store.probations.all() == [rows["t"]]
    assert [row.name for row in store.tenants.all()] == ["bob"]
    await store.probations.release("t", Act(at=0.0, act="tenant.release", subject="bob"))
    assert store.probations.all() == []
    await store.close()

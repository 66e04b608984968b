"""The audit log: what was done is listed, and no statement changes it."""

import pytest

from coordinator.storage.access.audit import Act, record
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store


async def record_all(store: Store, *acts: Act) -> None:
    for act in acts:
        await store.database.write(lambda db, act=act: record(db, act))  # type: ignore[misc]


async def test_entries_are_listed_newest_first_by_act_subject_and_key(store: Store) -> None:
    await record_all(
        store,
        Act(at=1.0, act="key.create", subject="k1", key_id="boss", tenant="root", details={"tenant": "bob"}),
        Act(at=2.0, act="key.revoke", subject="k1", key_id="boss", tenant="root"),
        Act(at=3.0, act="tenant.create", subject="bob"),
    )
    everything = store.audit.newest(10)
    assert [(row.act, row.subject) for row in everything] == [
        ("tenant.create", "bob"),
        ("key.revoke", "k1"),
        ("key.create", "k1"),
        ("tenant.create", "alice"),
    ]
    assert everything[2].details == '{"tenant": "bob"}'
    assert [row.act for row in store.audit.newest(10, act="key")] == ["key.revoke", "key.create"]
    assert [row.act for row in store.audit.newest(10, act="key.revoke")] == ["key.revoke"]
    assert [row.act for row in store.audit.newest(10, subject="bob")] == ["tenant.create"]
    assert [row.at for row in store.audit.newest(10, key_id="boss")] == [2.0, 1.0]
    assert [row.at for row in store.audit.newest(1, before=everything[0].audit_id)] == [2.0]


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM audit",
        "UPDATE audit SET subject = 'nobody'",
        "INSERT OR REPLACE INTO audit SELECT audit_id, at, '', '', act, 'nobody', '{}' FROM audit",
    ],
)
async def test_no_statement_changes_or_deletes_an_entry(store: Store, statement: str) -> None:
    before = store.audit.newest(10)
    with pytest.raises(StorageError, match="append-only"):
        await store.database.execute(statement)
    assert store.audit.newest(10) == before

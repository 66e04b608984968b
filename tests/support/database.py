"""A store for tests of one part, and raw rows for tests that must read the file itself."""

import sqlite3
from pathlib import Path
from typing import Any

from coordinator.base.errors import Failure
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import AdapterRow, CheckpointRow, SamplerRow, SessionRow
from coordinator.storage.store import Store
from tests.support.toy_pool import FakeTime

TENANT = "t"


async def open_store(path: Path) -> Store:
    """Return a store in a new epoch with the tenant `TENANT`; its time is constant."""
    store = Store(path, FakeTime(now=1.0), Failure())
    await store.raise_epoch()
    await store.tenants.create(TENANT, Act(at=0.0, act="tenant.create", subject="alice"))
    return store


def query(path: Path, sql: str, *parameters: Any) -> list[sqlite3.Row]:
    """Return the rows of a query over a database, or that of a data directory, opened read-only."""
    file = path / "tinkerpool.db" if path.is_dir() else path
    db = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    try:
        db.row_factory = sqlite3.Row
        return db.execute(sql, parameters).fetchall()
    finally:
        db.close()


def session_row(session_id: str, **values: Any) -> SessionRow:
    """Return a session of the tenant."""
    fields: dict[str, Any] = {"request_id": None, "user_metadata": "{}", "created_at": 0.0}
    return SessionRow(session_id=session_id, tenant_id=TENANT, **fields | values)


def sampler_row(sampler_id: str, **values: Any) -> SamplerRow:
    """Return a sampler of the tenant, in the session that its id names."""
    fields: dict[str, Any] = {"session_id": sampler_id.partition(":")[0], "base_model": "toy", "created_at": 0.0}
    return SamplerRow(sampler_id=sampler_id, tenant_id=TENANT, **fields | values)


def checkpoint_row(path: str, adapter_id: str, **values: Any) -> CheckpointRow:
    """Return a checkpoint of an adapter of the tenant."""
    fields: dict[str, Any] = {"kind": "weights", "size_bytes": 1, "seq": 1, "base_model": "toy", "rank": 8}
    fields |= {"fingerprint": "", "user_metadata": "{}", "created_at": 0.0}
    return CheckpointRow(path=path, tenant_id=TENANT, adapter_id=adapter_id, **fields | values)


def adapter_row(adapter_id: str, session_id: str) -> AdapterRow:
    """Return an adapter of the tenant."""
    return AdapterRow(
        adapter_id=adapter_id,
        tenant_id=TENANT,
        session_id=session_id,
        request_id=None,
        payload=b"",
        base_model="toy",
        rank=8,
        alpha=32.0,
        seed=0,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        user_metadata="{}",
        created_at=0.0,
    )

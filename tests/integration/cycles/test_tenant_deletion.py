"""A deleted tenant: everything of it goes, also over a crash, and neighbours keep what is theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.rows import FileUse
from coordinator.storage.sqlite import DiskFullError
from coordinator.storage.usage import add_file_use, add_month, add_usage
from coordinator.tenants.principals import Caller, Principal, Role
from tests.support.database import query
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tests.support.waiting import until
from tinkerpool.v1 import admin_pb2, checkpoints_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

LOCAL = Caller(is_local=True)
SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED
SOON: dict[str, Any] = {"sweep_interval_s": 0.02}


async def delete(pool: ToyPool, boss: Principal, tenant: str = "alice") -> None:
    response = await pool.service.delete_tenant(boss, admin_pb2.DeleteTenantRequest(tenant=tenant))
    assert response.tenant.state == admin_pb2.TENANT_STATE_DELETING


async def until_gone(pool: ToyPool, tenant: str = "alice") -> None:
    await until(lambda: pool.store.tenants.named(tenant) is None)


async def everything_of(pool: ToyPool, tenant: str = "alice") -> list[str]:
    """Give a tenant one of everything; return the names of its queued operations."""
    adapter, session = await pool.adapter(tenant), await pool.session(tenant)
    await pool.wait(await pool.forward_backward(adapter, 1, 4, tenant=tenant), tenant=tenant)
    await pool.wait(await pool.optim_step(adapter, 2, tenant), tenant=tenant)
    saved = await pool.save(adapter, 3, "kept", tenant)
    sampler = await pool.sampler(session, tenant, model_path=saved.save_state.path)
    await pool.wait(await pool.sample(sampler, 1, tenant, record_stability_info=True), tenant=tenant)
    unnamed = checkpoints_pb2.SaveWeightsForSamplerRequest(adapter_id=adapter, seq=4)
    response = await pool.service.save_weights_for_sampler(await pool.principal(tenant), unnamed)
    await pool.wait(response.operation.name, tenant=tenant)
    pool.hold()
    queued = [await pool.forward_backward(adapter, 5, 4, tenant=tenant), await pool.sample(sampler, 2, tenant)]
    queued.append(await pool.optim_step(adapter, 6, tenant))
    return queued


def rows_of(data_dir: Path, tenant_id: str) -> dict[str, int]:
    """Return how many rows each table has of a tenant, without tables that have none."""
    tables = query(data_dir, "SELECT name FROM sqlite_master WHERE type = 'table'")
    found: dict[str, int] = {}
    for table in (row["name"] for row in tables):
        if "tenant_id" in {column["name"] for column in query(data_dir, f"PRAGMA table_info({table})")}:
            number = query(data_dir, f"SELECT COUNT(*) FROM {table} WHERE tenant_id = ?", tenant_id)[0][0]
            found |= {table: number} if number else {}
    return found


def folders(data_dir: Path) -> int:
    return sum(len(list((data_dir / root).iterdir())) for root in ("checkpoints", "snapshots", "samplers"))


async def test_everything_of_a_deleted_tenant_goes_and_its_name_is_free_again(tmp_path: Path) -> None:
    async with running_pool(tmp_path, **SOON) as pool:
        boss, keys = await pool.administrator(), pool.coordinator.authenticator
        key, _ = await keys.create_key("alice")
        tenant_id = keys.authenticate(key).tenant_id
        other = await pool.adapter("bob")
        await pool.wait(await pool.forward_backward(other, 1, 4, tenant="bob"), tenant="bob")
        await everything_of(pool)
        before = rows_of(tmp_path, tenant_id)
        assert {"sessions", "adapters", "samplers", "operations", "checkpoints", "usage", "api_keys"} <= before.keys()
        assert before["sample_records"] == 1
        assert folders(tmp_path) > 0
        await delete(pool, boss)
        with pytest.raises(ServiceError, match="is being deleted") as raised:
            keys.admit(key, LOCAL, Role.READ_ONLY)
        assert raised.value.reason == "TENANT_DELETED"
        await pool.release()
        await until_gone(pool)
        assert rows_of(tmp_path, tenant_id) == {}
        await until(lambda: folders(tmp_path) == 0)
        with pytest.raises(ServiceError):
            keys.admit(key, LOCAL, Role.READ_ONLY)
        [done] = await pool.wait(await pool.optim_step(other, 2, "bob"), tenant="bob")
        assert done.state == SUCCEEDED
        new, _ = await keys.create_key("alice")
        assert keys.admit(new, LOCAL, Role.MEMBER).tenant_id != tenant_id
        assert [entry.act for entry in pool.store.audit.newest(10, subject="alice")] == [
            "tenant.create",
            "tenant.gone",
            "tenant.delete",
            "tenant.create",
        ]
    async with running_pool(tmp_path, **SOON) as pool:
        await pool.take_over("bob")
        assert (await pool.wait(await pool.forward_backward(other, 3, 4, tenant="bob"), tenant="bob"))[
            0
        ].state == SUCCEEDED
        with pytest.raises(ServiceError, match="unknown or revoked"):
            pool.coordinator.authenticator.admit(key, LOCAL, Role.READ_ONLY)


@pytest.mark.parametrize("has_begun", [False, True], ids=["before", "behind its sessions"])
async def test_a_deletion_goes_on_after_a_crash(tmp_path: Path, *, has_begun: bool) -> None:
    """Behind the end of its sessions: their samples are queued, and no session is left that ends them."""
    async with running_pool(tmp_path, is_crash=True, sweep_interval_s=1000.0) as pool:
        boss = await pool.administrator()
        await everything_of(pool)
        tenant_id = (await pool.principal()).tenant_id
        await delete(pool, boss)
        for session_id in pool.core.sessions.ids_of(tenant_id) if has_begun else ():
            await pool.store.sessions.end(session_id, 0.0)
    async with running_pool(tmp_path, **SOON) as pool:
        await until_gone(pool)
        assert rows_of(tmp_path, tenant_id) == {}
        await until(lambda: folders(tmp_path) == 0)


async def test_weights_that_a_deleted_tenant_published_stay_with_those_who_loaded_them(tmp_path: Path) -> None:
    async with running_pool(tmp_path, **SOON) as pool:
        boss, adapter = await pool.administrator(), await pool.adapter()
        path = (await pool.save(adapter, 1, "public")).save_state.path
        await pool.set_access(path, is_public=True)
        copied, session = await pool.adapter("bob", from_path=path), await pool.session("bob")
        sampler = await pool.sampler(session, "bob", model_path=path)
        await pool.wait(await pool.sample(sampler, 1, "bob"), tenant="bob")
        await delete(pool, boss)
        await until(lambda: not pool.store.checkpoints.of_tenant(pool.principals["alice"].tenant_id))
        [refused] = await pool.wait(await pool.sample(sampler, 2, "bob"), tenant="bob")
        assert "was deleted" in refused.error.message
        [done] = await pool.wait(await pool.forward_backward(copied, 1, 4, tenant="bob"), tenant="bob")
        assert done.state == SUCCEEDED
        assert pool.core.registry.spec(adapter).rank == 8
        gone = checkpoints_pb2.GetCheckpointRequest(path=path)
        assert (await refusal(pool.service.get_checkpoint(await pool.principal("bob"), gone))).code is Code.NOT_FOUND
        assert pool.store.tenants.named("alice") is not None, "its adapter's spec is needed"


async def test_a_tenant_is_deleted_although_the_disk_is_full(tmp_path: Path) -> None:
    async with running_pool(tmp_path, **SOON) as pool:
        boss, adapter = await pool.administrator(), await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 4))
        await pool.save(adapter, 2, "kept")
        database, write = pool.store.database, pool.store.database.write

        def full(*args: Any, is_deletion: bool = False, **options: Any) -> asyncio.Future[Any]:
            if is_deletion:
                return write(*args, is_deletion=True, **options)
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(DiskFullError("no room"))
            return refused

        with mock.patch.object(database, "write", full):  # a real full disk takes deletions alone, too
            await delete(pool, boss)
            await until_gone(pool)
        assert folders(tmp_path) == 0


async def test_a_tenant_that_is_being_deleted_gets_no_key_and_cannot_be_resumed(tmp_path: Path) -> None:
    async with running_pool(tmp_path, sweep_interval_s=1000.0) as pool:
        boss = await pool.administrator()
        await pool.principal()
        await delete(pool, boss)
        await delete(pool, boss)
        for call in (
            pool.service.create_api_key(boss, admin_pb2.CreateApiKeyRequest(tenant="alice")),
            pool.service.resume_tenant(boss, admin_pb2.ResumeTenantRequest(tenant="alice")),
            pool.service.suspend_tenant(boss, admin_pb2.SuspendTenantRequest(tenant="alice")),
        ):
            assert (await refusal(call)).reason == "TENANT_DELETING"
        last = admin_pb2.DeleteTenantRequest(tenant="root")
        assert (await refusal(pool.service.delete_tenant(boss, last))).reason == "LAST_ADMIN_KEY"
        unknown = admin_pb2.DeleteTenantRequest(tenant="nobody")
        assert (await refusal(pool.service.delete_tenant(boss, unknown))).code is Code.NOT_FOUND


async def test_a_tenant_that_is_gone_before_a_change_of_it_is_written_is_not_found_and_its_keys_stay_refused(
    tmp_path: Path,
) -> None:
    async with running_pool(tmp_path, **SOON) as pool:
        boss = await pool.administrator()
        key, _ = await pool.coordinator.authenticator.create_key("alice")
        mark_deletion = pool.store.tenants.mark_deletion

        async def behind_the_deletion(*given: Any) -> None:
            await until_gone(pool)
            await mark_deletion(*given)

        await delete(pool, boss)
        with mock.patch.object(pool.store.tenants, "mark_deletion", behind_the_deletion):  # the queue of writes is long
            again = pool.service.delete_tenant(boss, admin_pb2.DeleteTenantRequest(tenant="alice"))
            assert (await refusal(again)).code is Code.NOT_FOUND
        with pytest.raises(ServiceError) as refused:
            pool.coordinator.authenticator.admit(key, LOCAL, Role.READ_ONLY)
        assert refused.value.reason == "TENANT_DELETED"
        assert len(query(tmp_path, "SELECT * FROM audit WHERE act = 'tenant.delete'")) == 1


async def test_usage_that_is_counted_after_its_tenant_is_gone_harms_no_commit(tmp_path: Path, pool: ToyPool) -> None:
    use = FileUse(adapter_id="a", base_model="toy", tenant_id="gone", kind="export", num_bytes=1, seconds=1.0)
    for write in (
        lambda db: add_usage(db, "gone", "s", "sample", 20261126, num_tokens=1, engine_s=1.0),
        lambda db: add_month(db, "gone", 1, 1),
        lambda db: add_file_use(db, use, 20261126),
    ):
        await pool.store.database.write(write)
    assert rows_of(tmp_path, "gone") == {}

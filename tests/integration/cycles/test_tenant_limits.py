"""Limits of tenants through the use cases of a running pool: they hold at once, and say what frees or raises them."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.tenants.keys import Principal
from tests.support.toy_pool import ToyPool, running_pool
from tinkerpool.v1 import limits_pb2


async def refusal(call: Awaitable[Any]) -> ServiceError:
    with pytest.raises(ServiceError) as raised:
        await call
    return raised.value


async def admin(pool: ToyPool) -> Principal:
    key, _ = await pool.coordinator.authenticator.create_key("root", is_admin=True)
    return pool.coordinator.authenticator.authenticate(key)


async def set_limits(pool: ToyPool, tenant: str, **limits: object) -> None:
    await pool.principal(tenant)
    texts = {name: str(value) for name, value in limits.items()}
    request = limits_pb2.SetTenantLimitsRequest(tenant=tenant, limits=texts)
    await pool.service.set_tenant_limits(await admin(pool), request)


async def used(pool: ToyPool, tenant: str = "alice") -> dict[str, int]:
    """Return what a tenant sees in use of its limits."""
    response = await pool.service.get_tenant_limits(await pool.principal(tenant), limits_pb2.GetTenantLimitsRequest())
    assert response.tenant == tenant
    return {each.name: each.usage for each in response.limits if each.HasField("usage")}


async def test_a_limit_holds_at_once_and_after_a_restart_and_names_the_command_that_raises_it(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.adapter()
        await set_limits(pool, "alice", adapters_max=1)
        error = await refusal(pool.adapter())
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ADAPTER_QUOTA")
        assert "tinkerpool tenant limit alice adapters_max=NUMBER" in error.message
        await pool.adapter("bob")
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        assert (await refusal(pool.adapter())).reason == "ADAPTER_QUOTA"
        await set_limits(pool, "alice", adapters_max="")
        await pool.adapter()


async def test_operations_that_were_accepted_run_after_a_restart_with_lower_limits(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        adapter = await pool.adapter()
        pool.hold()
        names = [await pool.submit(adapter, seq) for seq in range(1, 7)]
        assert (await used(pool))["queued_operations_max"] == 6
        await set_limits(pool, "alice", queued_operations_max=1, queued_bytes_max=1, adapters_max=0)
        assert (await refusal(pool.submit(adapter, 8))).reason == "QUEUE_FULL"
        await pool.release()
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        done = await pool.wait(*names)
        assert not any(operation.HasField("error") for operation in done)
        await pool.wait(await pool.submit(adapter, 7))


async def test_a_member_sees_its_own_limits_and_use_and_no_other_tenants(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        await pool.adapter("alice")
        await pool.adapter("alice")
        assert await used(pool) == {
            "sessions_max": 2,
            "adapters_max": 2,
            "queued_operations_max": 0,
            "queued_bytes_max": 0,
        }
        bob, others = await pool.principal("bob"), limits_pb2.GetTenantLimitsRequest(tenant="alice")
        unknown = limits_pb2.GetTenantLimitsRequest(tenant="nobody")
        errors = [await refusal(pool.service.get_tenant_limits(bob, request)) for request in (others, unknown)]
        assert {(error.code, error.reason) for error in errors} == {(Code.NOT_FOUND, "NOT_FOUND")}
        assert (await pool.service.get_tenant_limits(await admin(pool), others)).tenant == "alice"
        change = limits_pb2.SetTenantLimitsRequest(tenant="bob", limits={"adapters_max": "9"})
        assert (await refusal(pool.service.set_tenant_limits(bob, change))).reason == "ADMIN_ONLY"

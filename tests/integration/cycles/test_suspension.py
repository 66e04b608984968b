"""A suspended tenant: its calls are refused, its queued work waits, nothing of it is lost, and neighbours go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from coordinator.base.errors import Code, ServiceError
from coordinator.tenants.principals import Caller, Principal, Role
from tests.support.toy_pool import FakeTime, ToyPool, refusal, running_pool
from tinkerpool.v1 import admin_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

LOCAL = Caller(is_local=True)
SUCCEEDED = ops_pb.OPERATION_STATE_SUCCEEDED


async def suspend(pool: ToyPool, boss: Principal, tenant: str = "alice", reason: str = "") -> None:
    request = admin_pb2.SuspendTenantRequest(tenant=tenant, reason=reason)
    response = await pool.service.suspend_tenant(boss, request)
    assert response.tenant.state == admin_pb2.TENANT_STATE_SUSPENDED


async def resume(pool: ToyPool, boss: Principal, tenant: str = "alice") -> None:
    response = await pool.service.resume_tenant(boss, admin_pb2.ResumeTenantRequest(tenant=tenant))
    assert response.tenant.state == admin_pb2.TENANT_STATE_ACTIVE


async def test_a_suspended_tenants_calls_are_refused_with_the_reason_also_after_a_restart(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        boss, keys = await pool.administrator(), pool.coordinator.authenticator
        key, row = await keys.create_key("alice")
        await suspend(pool, boss, reason="unpaid")
        with pytest.raises(ServiceError, match=r"suspended \(unpaid\).*tenant resume alice") as raised:
            keys.admit(key, LOCAL, Role.READ_ONLY)
        assert (raised.value.code, raised.value.reason) == (Code.PERMISSION_DENIED, "TENANT_SUSPENDED")
        with pytest.raises(ServiceError, match="suspended"):
            keys.holder(row.key_id)  # as for a signed download
        wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
        with pytest.raises(ServiceError, match="unknown or revoked"):
            keys.admit(wrong, LOCAL, Role.READ_ONLY)
    async with running_pool(tmp_path) as pool:
        keys = pool.coordinator.authenticator
        with pytest.raises(ServiceError, match="unpaid"):
            keys.admit(key, LOCAL, Role.READ_ONLY)
        await resume(pool, boss)
        assert keys.admit(key, LOCAL, Role.MEMBER).tenant_name == "alice"
    async with running_pool(tmp_path) as pool:
        assert pool.coordinator.authenticator.admit(key, LOCAL, Role.MEMBER).tenant_name == "alice"
        acts = [entry.act for entry in pool.store.audit.newest(10, act="tenant", subject="alice")]
        assert acts == ["tenant.resume", "tenant.suspend", "tenant.create"]


async def test_open_calls_of_a_suspended_tenant_end_and_those_of_others_do_not(pool: ToyPool) -> None:
    boss, keys = await pool.administrator(), pool.coordinator.authenticator

    async def call(principal: Principal) -> None:
        with keys.while_valid(principal):
            await asyncio.Event().wait()

    calls = [asyncio.create_task(call(await pool.principal(name))) for name in ("alice", "bob")]
    await asyncio.sleep(0)
    await suspend(pool, boss)
    assert (await refusal(calls[0])).reason == "TENANT_SUSPENDED"
    assert not calls[1].done()
    calls[1].cancel()


async def test_queued_operations_and_samples_wait_while_their_tenant_is_suspended_and_run_when_it_is_resumed(
    pool: ToyPool,
) -> None:
    boss, mine, other = await pool.administrator(), await pool.adapter(), await pool.adapter("bob")
    sampler = await pool.sampler(mine.partition(":")[0], base_model="toy")
    await suspend(pool, boss)
    names = [await pool.forward_backward(mine, 1, 4), await pool.optim_step(mine, 2), await pool.sample(sampler, 1)]
    for seq in range(1, 4):
        [done] = await pool.wait(await pool.forward_backward(other, seq, 4, tenant="bob"), tenant="bob")
        assert done.state == SUCCEEDED
    waiting = [pool.core.in_flight.get(name) for name in names]
    assert all(operation is not None and operation.is_undecided for operation in waiting)
    await resume(pool, boss)
    assert [done.state for done in await pool.wait(*names)] == [SUCCEEDED] * 3


async def test_queued_operations_of_a_suspended_tenant_wait_over_a_restart(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        boss, adapter = await pool.administrator(), await pool.adapter()
        await suspend(pool, boss)
        name = await pool.forward_backward(adapter, 1, 4)
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        other = await pool.adapter("bob")
        await pool.wait(await pool.forward_backward(other, 1, 4, tenant="bob"), tenant="bob")
        operation = pool.core.in_flight.get(name)
        assert operation is not None
        assert operation.is_undecided
        await resume(pool, boss)
        assert (await pool.wait(name))[0].state == SUCCEEDED


async def test_a_suspended_tenants_adapter_is_not_rebuilt_after_a_crash_before_it_is_resumed(tmp_path: Path) -> None:
    async with running_pool(tmp_path, is_crash=True) as pool:
        boss, adapter = await pool.administrator(), await pool.adapter()
        await pool.wait(await pool.forward_backward(adapter, 1, 4), await pool.optim_step(adapter, 2))
        await suspend(pool, boss)
        name = await pool.forward_backward(adapter, 3, 4)
    async with running_pool(tmp_path) as pool:
        await pool.take_over("alice")
        other = await pool.adapter("bob")
        for seq in range(1, 4):
            await pool.wait(await pool.forward_backward(other, seq, 4, tenant="bob"), tenant="bob")
        [engine] = pool.engines["w0"]
        assert {item.adapter_id for batch in engine.batches for item in batch.items} == {other}
        await resume(pool, boss)
        assert (await pool.wait(name))[0].state == SUCCEEDED


async def test_nothing_of_a_suspended_tenant_expires_and_its_sessions_have_their_whole_timeout_again(
    tmp_path: Path,
) -> None:
    time = FakeTime()
    async with running_pool(tmp_path, time=time, session_timeout_s=60.0, gap_timeout_s=60.0) as pool:
        boss, adapter, other = await pool.administrator(), await pool.adapter(), await pool.session("bob")
        session = adapter.partition(":")[0]
        behind_gap = await pool.forward_backward(adapter, 2, 4)
        await suspend(pool, boss)
        await time.until(lambda: pool.core.sessions.get(other) is None)
        await time.advance(300)
        assert pool.core.sessions.get(session) is not None
        await resume(pool, boss)
        await time.advance(50)
        assert pool.core.sessions.get(session) is not None
        operation = pool.core.in_flight.get(behind_gap)
        assert operation is not None
        assert operation.is_undecided
        await time.until(lambda: pool.core.sessions.get(session) is None)


async def test_the_tenant_of_the_last_administrators_key_cannot_be_suspended(pool: ToyPool) -> None:
    boss = await pool.administrator()
    request = admin_pb2.SuspendTenantRequest(tenant="root")
    assert (await refusal(pool.service.suspend_tenant(boss, request))).reason == "LAST_ADMIN_KEY"
    await pool.coordinator.authenticator.create_key("other", role=Role.ADMIN)
    await suspend(pool, boss, "root")
    unknown = admin_pb2.SuspendTenantRequest(tenant="nobody")
    assert (await refusal(pool.service.suspend_tenant(boss, unknown))).code is Code.NOT_FOUND
    long = admin_pb2.SuspendTenantRequest(tenant="other", reason="x" * 501)
    assert (await refusal(pool.service.suspend_tenant(boss, long))).code is Code.INVALID_ARGUMENT


async def test_a_tenant_is_shown_with_its_state_and_what_it_has(pool: ToyPool) -> None:
    boss, adapter = await pool.administrator(), await pool.adapter()
    await pool.save(adapter, 1, "saved")
    await suspend(pool, boss, reason="unpaid")
    shown = await pool.service.get_tenant(boss, admin_pb2.GetTenantRequest(tenant="alice"))
    assert (shown.num_keys, shown.num_sessions, shown.num_adapters, shown.num_checkpoints) == (1, 1, 1, 1)
    assert shown.stored_bytes > 0
    assert (shown.tenant.state, shown.tenant.suspension_reason) == (admin_pb2.TENANT_STATE_SUSPENDED, "unpaid")
    listed = (await pool.service.list_tenants(boss, admin_pb2.ListTenantsRequest())).tenants
    assert {each.name: each.state for each in listed} == {
        "alice": admin_pb2.TENANT_STATE_SUSPENDED,
        "root": admin_pb2.TENANT_STATE_ACTIVE,
    }

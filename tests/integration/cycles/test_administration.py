"""Administration through the service: tenants and keys, and the audit log of what was done."""

import dataclasses
from pathlib import Path

from coordinator.base.errors import Code
from coordinator.tenants.keys import GRACE_S_DEFAULT
from coordinator.tenants.principals import Caller, Role
from tests.support.database import query
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tinkerpool.v1 import admin_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb


def named(response: admin_pb2.ListApiKeysResponse) -> dict[str, admin_pb2.ApiKey]:
    return {key.key_id: key for key in response.api_keys}


async def test_a_created_tenant_is_listed_and_its_name_is_taken(pool: ToyPool) -> None:
    boss = await pool.administrator()
    request = admin_pb2.CreateTenantRequest(tenant="bob")
    assert (await pool.service.create_tenant(boss, request)).tenant.name == "bob"
    taken = await refusal(pool.service.create_tenant(boss, request))
    assert (taken.code, taken.reason) == (Code.ALREADY_EXISTS, "TENANT_EXISTS")
    wrong = await refusal(pool.service.create_tenant(boss, admin_pb2.CreateTenantRequest(tenant="a b")))
    assert wrong.code is Code.INVALID_ARGUMENT
    listed = (await pool.service.list_tenants(boss, admin_pb2.ListTenantsRequest())).tenants
    assert [each.name for each in listed] == ["bob", "root"]
    [entry] = pool.store.audit.newest(10, subject="bob")
    assert (entry.act, entry.key_id, entry.tenant) == ("tenant.create", boss.key_id, "root")


async def test_keys_and_tenants_are_listed_in_pages(pool: ToyPool) -> None:
    boss = await pool.administrator()
    for name in ("carol", "alice", "bob"):
        await pool.service.create_api_key(boss, admin_pb2.CreateApiKeyRequest(tenant=name))
    token, found = "", []
    for size in (3, 1):
        request = admin_pb2.ListTenantsRequest(page_size=3, page_token=token)
        page = await pool.service.list_tenants(boss, request)
        assert (len(page.tenants), page.total_size) == (size, 4)
        found += [tenant.name for tenant in page.tenants]
        token = page.next_page_token
    assert (found, token) == (["alice", "bob", "carol", "root"], "")
    first = await pool.service.list_api_keys(boss, admin_pb2.ListApiKeysRequest(page_size=2))
    assert [key.tenant for key in first.api_keys] == ["bob", "alice"], "the newest first"
    rest = admin_pb2.ListApiKeysRequest(page_token=first.next_page_token)
    second = await pool.service.list_api_keys(boss, rest)
    assert [key.tenant for key in second.api_keys] == ["carol", "root"]
    assert (second.next_page_token, second.total_size) == ("", 4)
    wrong = await refusal(pool.service.list_api_keys(boss, admin_pb2.ListApiKeysRequest(page_token="x")))
    assert wrong.code is Code.INVALID_ARGUMENT


async def test_a_member_rotates_its_own_key_and_an_administrator_any(pool: ToyPool) -> None:
    boss, keys = await pool.administrator(), pool.coordinator.authenticator
    created = [await pool.service.create_api_key(boss, admin_pb2.CreateApiKeyRequest(tenant="bob")) for _ in range(2)]
    bob = keys.authenticate(created[0].key)
    own = await pool.service.rotate_api_key(bob, admin_pb2.RotateApiKeyRequest(grace_seconds=0))
    assert (own.replaced.key_id, own.replaced.is_revoked) == (bob.key_id, True)
    assert keys.authenticate(own.key).tenant_name == "bob"
    other = admin_pb2.RotateApiKeyRequest(key_id=created[1].api_key.key_id)
    refused = await refusal(pool.service.rotate_api_key(keys.authenticate(own.key), other))
    assert (refused.code, refused.reason) == (Code.PERMISSION_DENIED, "ADMIN_ONLY")
    rotated = await pool.service.rotate_api_key(boss, other)
    assert not rotated.replaced.is_revoked
    assert rotated.replaced.expire_time.seconds - rotated.api_key.create_time.seconds == GRACE_S_DEFAULT
    assert rotated.replaced.successor == rotated.api_key.key_id
    assert keys.authenticate(created[1].key).tenant_name == "bob", "it is valid for a day"


async def test_a_keys_role_expiry_and_last_use_are_listed(pool: ToyPool) -> None:
    boss = await pool.administrator()
    request = admin_pb2.CreateApiKeyRequest(
        tenant="bob", role=admin_pb2.ROLE_READ_ONLY, ttl_seconds=60, certificate_sha256="AB" * 32
    )
    created = await pool.service.create_api_key(boss, request)
    listed = named(await pool.service.list_api_keys(boss, admin_pb2.ListApiKeysRequest()))
    key = listed[created.api_key.key_id]
    assert key == created.api_key
    assert (key.role, key.certificate_sha256, key.tenant) == (admin_pb2.ROLE_READ_ONLY, "ab" * 32, "bob")
    assert key.expire_time.seconds - key.create_time.seconds == 60
    assert not key.HasField("last_use_time")
    assert listed[boss.key_id].role == admin_pb2.ROLE_ADMIN
    assert not listed[boss.key_id].HasField("expire_time")
    for wrong in ({"role": 9}, {"ttl_seconds": -1}, {"certificate_sha256": "ab"}):
        error = await refusal(pool.service.create_api_key(boss, admin_pb2.CreateApiKeyRequest(tenant="bob", **wrong)))
        assert error.code is Code.INVALID_ARGUMENT


async def test_the_audit_log_is_listed_by_pages_and_survives_a_restart(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        boss = await pool.administrator()
        for name in ("a", "b", "c"):
            await pool.service.create_tenant(boss, admin_pb2.CreateTenantRequest(tenant=name))
    async with running_pool(tmp_path) as pool:
        request = admin_pb2.ListAuditEntriesRequest(page_size=2, key_id=boss.key_id)
        first = await pool.service.list_audit_entries(boss, request)
        request.page_token = first.next_page_token
        second = await pool.service.list_audit_entries(boss, request)
        assert [entry.subject for entry in [*first.entries, *second.entries]] == ["c", "b", "a"]
        assert (second.next_page_token, second.entries[0].tenant) == ("", "root")
        request.page_token = "x"
        assert (await refusal(pool.service.list_audit_entries(boss, request))).code is Code.INVALID_ARGUMENT


async def test_a_result_that_a_key_for_reading_fetches_does_not_count_as_fetched(tmp_path: Path, pool: ToyPool) -> None:
    alice, adapter = await pool.principal(), await pool.adapter()
    reader = dataclasses.replace(alice, role=Role.READ_ONLY)
    name = await pool.forward_backward(adapter, 1, 4)
    await pool.wait(name)
    other = await pool.optim_step(adapter, 2)
    request = ops_pb.WaitOperationsRequest(names=[other])
    assert [found async for found in pool.service.wait_operations(reader, request)] != []
    await pool.service.get_operation(reader, ops_pb.GetOperationRequest(name=other))
    await pool.forward_backward(adapter, 3, 4)  # a write that others ride on
    rows = query(tmp_path, "SELECT seq FROM operations WHERE fetched_service_s IS NOT NULL ORDER BY seq")
    assert [row["seq"] for row in rows] == [1]


async def test_the_operators_new_key_is_of_a_tenant_that_may_call(pool: ToyPool) -> None:
    """Otherwise a pool whose default tenant is suspended, and whose other keys are lost, could not be administered."""
    keys, key = pool.coordinator.authenticator, await pool.coordinator.first_admin_key()
    assert key is not None
    boss = await pool.administrator()
    await pool.service.suspend_tenant(boss, admin_pb2.SuspendTenantRequest(tenant="default"))
    new = await pool.coordinator.new_admin_key()
    assert keys.admit(new, Caller(is_local=True), Role.ADMIN).tenant_name == "operator-1"
    await pool.service.resume_tenant(boss, admin_pb2.ResumeTenantRequest(tenant="default"))
    newer = await pool.coordinator.new_admin_key()
    assert keys.admit(newer, Caller(is_local=True), Role.ADMIN).tenant_name == "default"

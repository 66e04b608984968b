"""Administration through the service: tenants and keys, and the audit log of what was done."""

from pathlib import Path

from coordinator.base.errors import Code
from coordinator.tenants.keys import Principal
from tests.support.toy_pool import ToyPool, refusal, running_pool
from tinkerpool.v1 import admin_pb2


async def administrator(pool: ToyPool) -> Principal:
    key, _ = await pool.coordinator.authenticator.create_key("root", is_admin=True)
    return pool.coordinator.authenticator.authenticate(key)


async def test_a_created_tenant_is_listed_and_its_name_is_taken(tmp_path: Path) -> None:
    async with running_pool(tmp_path) as pool:
        boss = await administrator(pool)
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

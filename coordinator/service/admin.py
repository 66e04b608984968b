"""Administration: the tenants and their API keys. Only administrators may call it.

Every change is durable and in effect when its call returns, and is recorded in the audit log with its own transaction.
"""

from __future__ import annotations

from coordinator.service.access import UseCases, check_admin, timestamp, uninterrupted
from coordinator.storage.rows import ApiKeyRow, TenantRow
from coordinator.tenants.keys import Principal
from tinkerpool.v1 import admin_pb2 as pb


class AdminUseCases(UseCases):
    """AdminService."""

    @uninterrupted
    async def create_api_key(self, principal: Principal, request: pb.CreateApiKeyRequest) -> pb.CreateApiKeyResponse:
        """Create a key. Only the response has its secret."""
        check_admin(principal)
        key, row = await self._authenticator.create_key(request.tenant, is_admin=request.is_admin)
        return pb.CreateApiKeyResponse(key=key, api_key=_key(row))

    async def list_api_keys(self, principal: Principal, request: pb.ListApiKeysRequest) -> pb.ListApiKeysResponse:
        """List all keys, without secrets."""
        check_admin(principal)
        return pb.ListApiKeysResponse(api_keys=[_key(row) for row in self._authenticator.list_keys()])

    @uninterrupted
    async def revoke_api_key(self, principal: Principal, request: pb.RevokeApiKeyRequest) -> pb.RevokeApiKeyResponse:
        """Revoke a key."""
        check_admin(principal)
        await self._authenticator.revoke_key(request.key_id)
        return pb.RevokeApiKeyResponse()

    @uninterrupted
    async def create_tenant(self, principal: Principal, request: pb.CreateTenantRequest) -> pb.CreateTenantResponse:
        """Create a tenant without a key."""
        check_admin(principal)
        row = await self._core.accounts.create(request.tenant, key_id=principal.key_id, by_tenant=principal.tenant_name)
        return pb.CreateTenantResponse(tenant=_tenant(row))

    async def list_tenants(self, principal: Principal, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        """List all tenants, by name."""
        check_admin(principal)
        return pb.ListTenantsResponse(tenants=[_tenant(row) for row in self._core.accounts.all()])

    async def holder_of_key(self, key_id: str) -> Principal:
        """Return the principal of a key by its id. Raises ServiceError UNAUTHENTICATED once it is revoked."""
        return self._authenticator.holder(key_id)


def _key(row: ApiKeyRow) -> pb.ApiKey:
    return pb.ApiKey(
        key_id=row.key_id,
        tenant=row.tenant_name,
        is_admin=row.is_admin,
        create_time=timestamp(row.created_at),
        is_revoked=row.revoked_at is not None,
    )


def _tenant(row: TenantRow) -> pb.Tenant:
    return pb.Tenant(name=row.name, create_time=timestamp(row.created_at))

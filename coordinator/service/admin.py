"""Administration: the tenants, their API keys, and the audit log.

Every change is durable and in effect when its call returns, and is recorded in the audit log with its own transaction.
The doors admit administrators only (`service.roles`); members may replace their own key.
"""

from __future__ import annotations

import json

from coordinator.base.errors import denied, invalid
from coordinator.service.access import UseCases, check_ttl, timestamp, uninterrupted
from coordinator.service.listings import number_of, rows_of_page
from coordinator.storage.rows import ApiKeyRow, AuditRow, TenantRow
from coordinator.tenants.keys import GRACE_S_DEFAULT
from coordinator.tenants.principals import Principal, Role
from tinkerpool.v1 import admin_pb2 as pb

PAGE_SIZE = 100
ROLES = {
    pb.ROLE_UNSPECIFIED: Role.MEMBER,
    pb.ROLE_READ_ONLY: Role.READ_ONLY,
    pb.ROLE_MEMBER: Role.MEMBER,
    pb.ROLE_ADMIN: Role.ADMIN,
}
_NUMBERS = {role: number for number, role in ROLES.items()}


class AdminUseCases(UseCases):
    """AdminService."""

    @uninterrupted
    async def create_api_key(self, principal: Principal, request: pb.CreateApiKeyRequest) -> pb.CreateApiKeyResponse:
        """Create a key. Only the response has its secret."""
        check_ttl(request.ttl_seconds)
        if (role := ROLES.get(request.role)) is None:
            raise invalid(f"role must be read-only (1), member (2) or admin (3), not {request.role}")
        key, row = await self._authenticator.create_key(
            request.tenant,
            role=role,
            ttl_s=request.ttl_seconds,
            certificate_sha256=request.certificate_sha256,
            by=principal,
        )
        return pb.CreateApiKeyResponse(key=key, api_key=self._key(row))

    async def list_api_keys(self, principal: Principal, request: pb.ListApiKeysRequest) -> pb.ListApiKeysResponse:
        """List keys, newest first, without secrets."""
        listed = self._listed(principal, self._core.store.api_keys.listing, request, PAGE_SIZE, self._key)
        keys, token, total = await listed.page()
        return pb.ListApiKeysResponse(api_keys=keys, next_page_token=token, total_size=total)

    @uninterrupted
    async def rotate_api_key(self, principal: Principal, request: pb.RotateApiKeyRequest) -> pb.RotateApiKeyResponse:
        """Replace a key: the caller's own, or by an administrator any."""
        key_id = request.key_id or principal.key_id
        if key_id != principal.key_id and not principal.is_admin:
            raise denied(
                "ADMIN_ONLY", "a key may replace itself; to replace another one, ask the administrator of the pool"
            )
        grace_s = request.grace_seconds if request.HasField("grace_seconds") else GRACE_S_DEFAULT
        key, row, replaced = await self._authenticator.rotate_key(key_id, grace_s=grace_s, by=principal)
        return pb.RotateApiKeyResponse(key=key, api_key=self._key(row), replaced=self._key(replaced))

    @uninterrupted
    async def revoke_api_key(self, principal: Principal, request: pb.RevokeApiKeyRequest) -> pb.RevokeApiKeyResponse:
        """Revoke a key; say which of its successors are valid."""
        successors = await self._authenticator.revoke_key(request.key_id, by=principal)
        return pb.RevokeApiKeyResponse(successors=successors)

    @uninterrupted
    async def create_tenant(self, principal: Principal, request: pb.CreateTenantRequest) -> pb.CreateTenantResponse:
        """Create a tenant without a key."""
        row = await self._core.accounts.create(request.tenant, by=principal)
        return pb.CreateTenantResponse(tenant=_tenant(row))

    async def list_tenants(self, principal: Principal, request: pb.ListTenantsRequest) -> pb.ListTenantsResponse:
        """List tenants, by name."""
        listed = self._listed(principal, self._core.store.tenants.listing, request, PAGE_SIZE, _tenant)
        tenants, token, total = await listed.page()
        return pb.ListTenantsResponse(tenants=tenants, next_page_token=token, total_size=total)

    async def get_tenant(self, principal: Principal, request: pb.GetTenantRequest) -> pb.GetTenantResponse:
        """Return a tenant with the numbers of what it has."""
        row = self._core.accounts.named(request.tenant)
        held = self._core.holdings
        return pb.GetTenantResponse(
            tenant=_tenant(row),
            num_keys=self._core.store.api_keys.num_unrevoked(row.tenant_id),
            num_sessions=self._core.ceilings.sessions.used(row.tenant_id),
            num_adapters=self._core.ceilings.adapters.used(row.tenant_id),
            num_checkpoints=held.num_checkpoints(row.tenant_id),
            stored_bytes=held.num_bytes(row.tenant_id),
        )

    @uninterrupted
    async def suspend_tenant(self, principal: Principal, request: pb.SuspendTenantRequest) -> pb.SuspendTenantResponse:
        """Refuse a tenant's calls, end its open ones, and let its queued work wait."""
        row = await self._core.accounts.suspend(request.tenant, request.reason, by=principal)
        self._authenticator.end_calls_of(row.tenant_id)
        return pb.SuspendTenantResponse(tenant=_tenant(row))

    @uninterrupted
    async def resume_tenant(self, principal: Principal, request: pb.ResumeTenantRequest) -> pb.ResumeTenantResponse:
        """Let a suspended tenant call again, and its queued work run."""
        row = await self._core.accounts.resume(request.tenant, by=principal)
        self._core.sessions.renew(row.tenant_id)
        return pb.ResumeTenantResponse(tenant=_tenant(row))

    @uninterrupted
    async def delete_tenant(self, principal: Principal, request: pb.DeleteTenantRequest) -> pb.DeleteTenantResponse:
        """Refuse a tenant's calls for good, and begin to delete everything that it has."""
        row = await self._core.accounts.delete(request.tenant, by=principal)
        self._authenticator.end_calls_of(row.tenant_id)
        return pb.DeleteTenantResponse(tenant=_tenant(row))

    async def list_audit_entries(
        self, principal: Principal, request: pb.ListAuditEntriesRequest
    ) -> pb.ListAuditEntriesResponse:
        """List what administrators did, the newest first. A page's token is its oldest entry."""
        limit = rows_of_page(request.page_size, PAGE_SIZE)
        rows = self._core.store.audit.newest(
            limit + 1,
            before=number_of(request.page_token),
            act=request.act,
            subject=request.subject,
            key_id=request.key_id,
            start=request.start_time.seconds + request.start_time.nanos / 1e9,
        )
        shown = rows[:limit]
        more = str(shown[-1].audit_id) if len(rows) > limit else ""
        return pb.ListAuditEntriesResponse(entries=[_entry(row) for row in shown], next_page_token=more)

    async def holder_of_key(self, key_id: str) -> Principal:
        """Return the principal of a key by its id. Raises ServiceError UNAUTHENTICATED once it is not valid."""
        return self._authenticator.holder(key_id)

    def _key(self, row: ApiKeyRow) -> pb.ApiKey:
        used = self._authenticator.last_use(row)
        return pb.ApiKey(
            key_id=row.key_id,
            tenant=row.tenant_name,
            role=_NUMBERS[Role(row.role)],
            create_time=timestamp(row.created_at),
            is_revoked=row.revoked_at is not None,
            expire_time=timestamp(row.expires_at) if row.expires_at is not None else None,
            is_expired=row.expires_at is not None and row.expires_at <= self._core.time.wall(),
            last_use_time=timestamp(used) if used is not None else None,
            is_local=row.is_local,
            certificate_sha256=row.certificate_sha256,
            successor=row.successor,
        )


def _tenant(row: TenantRow) -> pb.Tenant:
    return pb.Tenant(
        name=row.name,
        create_time=timestamp(row.created_at),
        state=(
            pb.TENANT_STATE_DELETING
            if row.deletion_at is not None
            else pb.TENANT_STATE_SUSPENDED
            if row.suspended_at is not None
            else pb.TENANT_STATE_ACTIVE
        ),
        suspension_reason=row.suspension_reason,
    )


def _entry(row: AuditRow) -> pb.AuditEntry:
    return pb.AuditEntry(
        entry_id=row.audit_id,
        time=timestamp(row.at),
        key_id=row.key_id,
        tenant=row.tenant,
        act=row.act,
        subject=row.subject,
        details=json.loads(row.details),
    )

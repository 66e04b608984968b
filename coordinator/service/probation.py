"""The release of tenants from probation, by administrators."""

from __future__ import annotations

from coordinator.base.errors import not_found
from coordinator.service.access import UseCases, uninterrupted
from coordinator.storage.access.audit import Act
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import probation_pb2 as pb


class ProbationUseCases(UseCases):
    """ProbationService."""

    @uninterrupted
    async def release_tenant(self, principal: Principal, request: pb.ReleaseTenantRequest) -> pb.ReleaseTenantResponse:
        """End a tenant's probation, durable when it returns."""
        row = self._core.store.tenants.named(request.tenant)
        if row is None:
            raise not_found("tenant", request.tenant)
        act = Act(
            at=self._core.time.wall(),
            key_id=principal.key_id,
            tenant=principal.tenant_name,
            act="tenant.release",
            subject=request.tenant,
        )
        await self._core.probation.release(row.tenant_id, act)
        return pb.ReleaseTenantResponse()

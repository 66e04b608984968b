"""The release of tenants from probation, by administrators."""

from __future__ import annotations

from coordinator.service.access import UseCases, uninterrupted
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import probation_pb2 as pb


class ProbationUseCases(UseCases):
    """ProbationService."""

    @uninterrupted
    async def release_tenant(self, principal: Principal, request: pb.ReleaseTenantRequest) -> pb.ReleaseTenantResponse:
        """End a tenant's probation, durable when it returns."""
        row = self._core.accounts.named(request.tenant)
        act = self._core.accounts.act("tenant.release", request.tenant, principal)
        await self._core.probation.release(row.tenant_id, act)
        return pb.ReleaseTenantResponse()

"""The limits of a tenant, and what is in use of them: shown to its members, changed by administrators.

Does not depend on what a limit means. Main invariant: a tenant of which the caller may not see the limits is refused
like a missing one.
"""

from __future__ import annotations

from coordinator.base.errors import not_found
from coordinator.base.tenant_limits import LIMIT_NAMES, as_text
from coordinator.service.access import UseCases, uninterrupted
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import limits_pb2 as pb


class LimitUseCases(UseCases):
    """LimitService."""

    async def get_tenant_limits(
        self, principal: Principal, request: pb.GetTenantLimitsRequest
    ) -> pb.GetTenantLimitsResponse:
        """Return the limits of the caller's tenant; of any tenant to an administrator."""
        name = request.tenant or principal.tenant_name
        if name != principal.tenant_name and not principal.is_admin:
            raise not_found("tenant", name)
        row = self._core.accounts.named(name)
        return pb.GetTenantLimitsResponse(tenant=row.name, limits=self._limits(row.tenant_id))

    @uninterrupted
    async def set_tenant_limits(
        self, principal: Principal, request: pb.SetTenantLimitsRequest
    ) -> pb.SetTenantLimitsResponse:
        """Set limits of a tenant, durable and in effect when it returns."""
        tenant_id, limits = self._core.accounts.named(request.tenant).tenant_id, dict(request.limits)
        act = self._core.accounts.act("tenant.limit", request.tenant, principal, limits)
        await self._core.quotas.change(tenant_id, limits, act)
        self._core.weigh(tenant_id)
        return pb.SetTenantLimitsResponse(limits=self._limits(tenant_id))

    def _limits(self, tenant_id: str) -> list[pb.TenantLimit]:
        limits, listed = self._core.quotas.of(tenant_id), self._core.quotas.listed
        return [
            pb.TenantLimit(
                name=name,
                value=as_text(name, getattr(limits, name)),
                is_set=self._core.quotas.is_set(tenant_id, name),
                usage=listed[name].used(tenant_id) if name in listed else None,
            )
            for name in LIMIT_NAMES
        ]

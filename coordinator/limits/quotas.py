"""The limits of every tenant: the pool's defaults, with what an administrator set for one tenant.

The only owner of a tenant's limits in memory. A check reads the limit at that moment, so that a change holds at once;
operations that were accepted before are not checked again. Does not depend on what is limited.

Main invariant: a change is in memory only once it is durable.
"""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.base.errors import Quota
from coordinator.base.tenant_limits import LABELS, LIMIT_NAMES, TenantLimits, limits_with, parse_limit
from coordinator.storage.access.audit import Act
from coordinator.storage.store import Store


class Quotas:
    """The limits of all tenants."""

    def __init__(self, store: Store, defaults: TenantLimits) -> None:
        """`defaults`: of a tenant for which none were set."""
        self._store = store
        self._defaults = defaults
        self._set: dict[str, dict[str, str]] = store.tenants.limits()
        self._limits = {tenant_id: limits_with(defaults, texts) for tenant_id, texts in self._set.items()}

    def of(self, tenant_id: str) -> TenantLimits:
        """Return the limits of a tenant."""
        return self._limits.get(tenant_id, self._defaults)

    def is_set(self, tenant_id: str, name: str) -> bool:
        """Return whether an administrator set this limit of a tenant."""
        return name in self._set.get(tenant_id, ())

    def weights(self) -> dict[str, float]:
        """Return the weights that are not 1, by tenant."""
        return {tenant_id: limits.weight for tenant_id, limits in self._limits.items() if limits.weight != 1.0}

    def quota(self, tenant_id: str, name: str, usage: int, maximum: int | None = None) -> Quota:
        """Return a limit of a tenant, of which so much is in use, for a refusal. `maximum`: if the limit has others."""
        if maximum is None:
            maximum = getattr(self.of(tenant_id), name)
        return Quota(LABELS[name], usage, maximum, self.command(tenant_id, f"{name}=NUMBER"))

    def command(self, tenant_id: str, change: str) -> str:
        """Return what an administrator types to change a limit of a tenant."""
        row = self._store.tenants.get(tenant_id)
        return f"tinkerpool tenant limit {row.name if row is not None else 'NAME'} {change}"

    async def change(self, tenant_id: str, texts: Mapping[str, str], act: Act) -> None:
        """Set limits of a tenant by their text; an empty one: the pool's default again. All or none.

        `act` is recorded with it.

        Raises ServiceError INVALID_ARGUMENT, and StorageError if the change is not durable.
        """
        for name, text in texts.items():
            if text or name not in LIMIT_NAMES:
                parse_limit(name, text)
        await self._store.tenants.set_limits(tenant_id, texts, act)
        self._set[tenant_id] = self._store.tenants.limits().get(tenant_id, {})
        self._limits[tenant_id] = limits_with(self._defaults, self._set[tenant_id])

"""The limits of every tenant: the pool's defaults, with what an administrator set for one tenant.

The only owner of a tenant's limits in memory. A check reads the limit at that moment, so that a change holds at once;
operations that were accepted before are not checked again. Does not depend on what is limited.

Main invariant: a change is in memory only once it is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.base.errors import Quota, denied, over_ceiling
from coordinator.base.tenant_limits import LABELS, LIMIT_NAMES, TenantLimits, limits_with, parse_limit
from coordinator.limits.ceiling import Ceiling, Limit, Refusal, full
from coordinator.storage.access.audit import Act
from coordinator.storage.store import Store

QUEUE_FULL = Refusal("QUEUE_FULL", "wait for some operations to finish", full)
_REFUSALS: Mapping[str, Refusal] = {
    "sessions_max": Refusal("SESSION_QUOTA", "finish some (those without a client expire by themselves)", over_ceiling),
    "adapters_max": Refusal("ADAPTER_QUOTA", "delete some", over_ceiling),
    "queued_operations_max": QUEUE_FULL,
    "queued_bytes_max": QUEUE_FULL,
    "streams_max": Refusal("STREAMS_FULL", "wait for more operations in one call, or end some calls"),
    "samples_max": Refusal("SAMPLES_FULL", "wait for some samples to finish", full),
    "samplers_max": Refusal("SAMPLER_QUOTA", "finish sessions that have some", over_ceiling),
    "checkpoints_max": Refusal("CHECKPOINT_QUOTA", "delete some, or save with a time to live", over_ceiling),
    "stored_bytes_max": Refusal(
        "STORAGE_QUOTA",
        "this may add {added}: delete checkpoints or adapters, or finish sessions",
        over_ceiling,
    ),
    "tokens_per_month": Refusal("TOKEN_BUDGET", "this may take {added}: wait for the next month", over_ceiling),
}
"""The refusal of each limit that counts."""


class Quotas:
    """The limits of all tenants."""

    def __init__(self, store: Store, defaults: TenantLimits) -> None:
        """`defaults`: of a tenant for which none were set."""
        self._store = store
        self._defaults = defaults
        self.listed: dict[str, Limit] = {}
        """Every limit on what a tenant takes, by name: those of the table that count something, which `ceiling` lists,
        and those that the pool has beside them, listed where they are made."""
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

    def quota(self, tenant_id: str, name: str, usage: int, maximum: int) -> Quota:
        """Return a limit of a tenant, of which so much is in use, for a refusal."""
        return Quota(LABELS[name], usage, maximum, self.command(tenant_id, f"{name}=NUMBER"))

    def ceiling(self, name: str, stored: Callable[[str], int] = lambda _: 0) -> Ceiling:
        """Return the ceiling of a limit, and list it. `stored`: see `Ceiling`."""
        self.listed[name] = ceiling = _QuotaCeiling(name, self, stored)
        return ceiling

    def check_permitted(self, tenant_id: str, base_model: str, rank: int | None = None) -> None:
        """Refuse a base model or rank that the tenant may not use for something new.

        An imported adapter may have a rank between two that can be created: it counts as the larger one.
        """
        limits = self.of(tenant_id)
        if limits.base_models is not None and base_model not in limits.base_models:
            command = self.command(tenant_id, f"base_models={base_model},...")
            raise denied(
                "BASE_MODEL_NOT_PERMITTED",
                f"you may use the base models {', '.join(limits.base_models)}, not {base_model}: name one of them, or "
                f"ask an administrator: {command}",
            )
        rank = None if rank is None else 1 << (rank - 1).bit_length()
        if rank is not None and limits.ranks is not None and rank not in limits.ranks:
            command = self.command(tenant_id, f"ranks={rank},...")
            raise denied(
                "RANK_NOT_PERMITTED",
                f"you may use the ranks {', '.join(map(str, limits.ranks))}, not {rank}: use one of them, or ask an "
                f"administrator: {command}",
            )

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


class _QuotaCeiling(Ceiling):
    """The ceiling of one of the limits."""

    def __init__(self, name: str, quotas: Quotas, stored: Callable[[str], int]) -> None:
        super().__init__(_REFUSALS[name], LABELS[name], stored)
        self._name, self._quotas = name, quotas

    def maximum(self, tenant_id: str) -> int | None:
        limit: int | None = getattr(self._quotas.of(tenant_id), self._name)
        return limit

    def command(self, tenant_id: str) -> str:
        return self._quotas.command(tenant_id, f"{self._name}=NUMBER")

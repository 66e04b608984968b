"""The tenants: creation, suspension, the begin of their deletion, and which of them may not call.

Does not depend on keys, use cases or transports. Main invariant: a change is in memory only once it is durable.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from coordinator.base.errors import ServiceError, denied, exists, invalid, not_found, unmet
from coordinator.base.time import Signal
from coordinator.storage.access.admins import NoAdminError
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import TenantRow
from coordinator.storage.store import Store
from coordinator.tenants.principals import Principal
from tinkerpool.names import is_tenant_name

REASON_LENGTH_MAX = 500
"""Characters of the reason for a suspension, which is part of each refusal."""


class Accounts:
    """All tenants, for administrators, and their standing."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self.changed = Signal()
        """A tenant was suspended, resumed or marked for deletion: its queued work waits now, or may run again."""
        self._store = store
        self._wall = wall
        self._held = {
            row.tenant_id: row
            for row in store.tenants.all()
            if row.suspended_at is not None or row.deletion_at is not None
        }
        """The tenants that are suspended or being deleted, or were deleted in this epoch: their keys are in memory."""

    def is_held(self, tenant_id: str) -> bool:
        """Return whether a tenant is suspended or being deleted: its calls are refused, its queued work waits."""
        return tenant_id in self._held

    def refusal(self, tenant_id: str) -> ServiceError | None:
        """Return the refusal of a tenant's calls; None if it may call."""
        if (row := self._held.get(tenant_id)) is None:
            return None
        if row.deletion_at is not None:
            message = f"tenant {row.name!r} is being deleted, with everything that it has"
            return denied("TENANT_DELETED", message)
        reason = f" ({row.suspension_reason})" if row.suspension_reason else ""
        return denied(
            "TENANT_SUSPENDED",
            f"tenant {row.name!r} is suspended{reason}: nothing of it is lost; ask the administrator of the pool to "
            f"resume it, with `tinkerpool tenant resume {row.name}`",
        )

    async def create(self, name: str, *, by: Principal) -> TenantRow:
        """Create a tenant, as an administrator. Raises ServiceError for a name that is wrong or in use."""
        check_tenant_name(name)
        if not await self._store.tenants.create(new_tenant_id(), self.act("tenant.create", name, by)):
            raise exists("TENANT_EXISTS", f"there is a tenant {name!r}: choose another name")
        return self.named(name)

    async def suspend(self, name: str, reason: str, *, by: Principal) -> TenantRow:
        """Suspend a tenant, or give its suspension another reason.

        Raises ServiceError if it is unknown or being deleted, or if no administrator could call any more.
        """
        if len(reason) > REASON_LENGTH_MAX:
            raise invalid(f"the reason has {len(reason)} characters: at most {REASON_LENGTH_MAX} are allowed")
        row = self._changeable(name)
        details = {"reason": reason} if reason else {}
        try:
            await self._store.tenants.suspend(row.tenant_id, reason, self.act("tenant.suspend", name, by, details))
        except NoAdminError:
            raise last_admin_key() from None
        return self._reload(row)

    async def resume(self, name: str, *, by: Principal) -> TenantRow:
        """Let a suspended tenant call again. Raises ServiceError if it is unknown or being deleted."""
        row = self._changeable(name)
        await self._store.tenants.resume(row.tenant_id, self.act("tenant.resume", name, by))
        return self._reload(row)

    async def delete(self, name: str, *, by: Principal) -> TenantRow:
        """Mark a tenant for deletion; its calls are refused from then on.

        Raises ServiceError if it is unknown, or if no administrator could call any more.
        """
        row = self.named(name)
        try:
            await self._store.tenants.mark_deletion(row.tenant_id, self.act("tenant.delete", name, by))
        except NoAdminError:
            raise last_admin_key() from None
        return self._reload(row)

    def named(self, name: str) -> TenantRow:
        """Return the tenant of a name. Raises ServiceError NOT_FOUND."""
        row = self._store.tenants.named(name)
        if row is None:
            raise not_found("tenant", name)
        return row

    def _changeable(self, name: str) -> TenantRow:
        row = self.named(name)
        if row.deletion_at is not None:
            raise tenant_deleting(name)
        return row

    def _reload(self, before: TenantRow) -> TenantRow:
        """Return a tenant after a change. Raises ServiceError NOT_FOUND if its deletion has ended meanwhile."""
        row = self._store.tenants.get(before.tenant_id)
        if row is None:
            raise not_found("tenant", before.name)  # it stays held: its keys are in memory
        if row.suspended_at is not None or row.deletion_at is not None:
            self._held[before.tenant_id] = row
        else:
            self._held.pop(before.tenant_id, None)
        self.changed.notify()
        return row

    def act(self, act: str, name: str, by: Principal, details: dict[str, str] | None = None) -> Act:
        """Return an act of a caller on a tenant, for the audit log."""
        return Act(
            at=self._wall(), key_id=by.key_id, tenant=by.tenant_name, act=act, subject=name, details=details or {}
        )


def check_tenant_name(name: str) -> None:
    """Refuse a name that no tenant can have."""
    if not is_tenant_name(name):
        raise invalid(f"tenant must be 1 to 64 letters, digits, '-' and '_', not {name[:80]!r}")


def new_tenant_id() -> str:
    """Return an id for a new tenant."""
    return secrets.token_hex(8)


def tenant_deleting(name: str) -> ServiceError:
    """Return the refusal of a change to a tenant that is being deleted."""
    return unmet(
        "TENANT_DELETING", f"tenant {name!r} is being deleted: choose another name, or try again when it is gone"
    )


def last_admin_key() -> ServiceError:
    """Return the refusal of a change after which no administrator could call."""
    return unmet("LAST_ADMIN_KEY", "no administrator's key without an expiry would remain: create another one first")

"""The tenants: creation and listing. Does not depend on keys, use cases or transports."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import TenantRow
from coordinator.storage.store import Store
from coordinator.tenants.principals import Principal
from tinkerpool.names import is_tenant_name


class Accounts:
    """All tenants, for administrators."""

    def __init__(self, store: Store, wall: Callable[[], float]) -> None:
        self._store = store
        self._wall = wall

    async def create(self, name: str, *, by: Principal) -> TenantRow:
        """Create a tenant, as an administrator. Raises ServiceError for a name that is wrong or in use."""
        check_tenant_name(name)
        act = Act(at=self._wall(), key_id=by.key_id, tenant=by.tenant_name, act="tenant.create", subject=name)
        if not await self._store.tenants.create(new_tenant_id(), act):
            raise ServiceError(Code.ALREADY_EXISTS, "TENANT_EXISTS", f"there is a tenant {name!r}: choose another name")
        row = self._store.tenants.named(name)
        assert row is not None
        return row

    def all(self) -> list[TenantRow]:
        """Return all tenants, by name."""
        return sorted(self._store.tenants.all(), key=lambda row: row.name)


def check_tenant_name(name: str) -> None:
    """Refuse a name that no tenant can have."""
    if not is_tenant_name(name):
        raise invalid(f"tenant must be 1 to 64 letters, digits, '-' and '_', not {name[:80]!r}")


def new_tenant_id() -> str:
    """Return an id for a new tenant."""
    return secrets.token_hex(8)

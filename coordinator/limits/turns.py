"""Turns at a shared resource: a few holders at a time, and the tenant that used the least is served next.

In memory; does not depend on what is done in a turn. A turn is charged to its tenant by what it used, bytes of files
for example, and at least one. As with the virtual counters of workers, a tenant that was idle is lifted to the lowest
counter of the active ones; above that it keeps its own, because a call has no turn while its client reads.

Main invariant: beside a tenant with hundreds of waiting calls, a call waits for the running turns, and then for at most
as much as it uses itself, for each other active tenant.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class Turn:
    """A turn that is held."""

    num_used: int = 0

    def use(self, amount: int) -> None:
        """Charge what the turn has used to its tenant."""
        self.num_used += amount


@dataclass(slots=True)
class _Tenant:
    """A tenant with calls that hold or await turns, or that used more than the active ones."""

    num_used: int = 0
    num_held: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)

    @property
    def is_active(self) -> bool:
        """Whether a call holds or awaits a turn."""
        return bool(self.num_held or self.waiting)


class Turns:
    """The turns at one resource."""

    def __init__(self, num_at_once: int) -> None:
        """`num_at_once`: the most holders at a time."""
        self._num_at_once = num_at_once
        self._num_free = num_at_once
        self._tenants: dict[str, _Tenant] = {}

    def used(self, tenant_id: str) -> int:
        """Return the number of turns that a tenant holds."""
        tenant = self._tenants.get(tenant_id)
        return tenant.num_held if tenant is not None else 0

    def maximum(self, _tenant_id: str) -> int:
        """Return the most that are held at a time, also by one tenant."""
        return self._num_at_once

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[Turn]:
        """Wait for a turn of this tenant, and hold it during the block."""
        tenant = self._tenants.setdefault(tenant_id, _Tenant())
        if not tenant.is_active:
            tenant.num_used = max(tenant.num_used, self._lowest())
        if self._num_free:
            self._num_free -= 1
            tenant.num_held += 1
        else:
            await self._wait(tenant)
        turn = Turn()
        try:
            yield turn
        finally:
            self._end(tenant, max(turn.num_used, 1))

    async def _wait(self, tenant: _Tenant) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._end(tenant, 0)
            else:
                with suppress(ValueError):
                    tenant.waiting.remove(granted)
                self._forget_idle()
            raise

    def _end(self, tenant: _Tenant, num_used: int) -> None:
        """Charge a turn that has ended, and give it to the next tenant, if one waits."""
        tenant.num_used += num_used
        tenant.num_held -= 1
        self._num_free += 1
        self._grant()
        self._forget_idle()

    def _grant(self) -> None:
        while self._num_free and (waiting := [each for each in self._tenants.values() if each.waiting]):
            tenant = min(waiting, key=lambda each: each.num_used)
            granted = tenant.waiting.popleft()
            if granted.cancelled():
                continue
            granted.set_result(None)
            self._num_free -= 1
            tenant.num_held += 1

    def _lowest(self) -> int:
        """Return the lowest counter of the active tenants; 0 if there is none."""
        return min((each.num_used for each in self._tenants.values() if each.is_active), default=0)

    def _forget_idle(self) -> None:
        """Forget idle tenants that would be lifted when they return, and all of them when none is active."""
        lowest, has_active = self._lowest(), any(each.is_active for each in self._tenants.values())
        for tenant_id, each in list(self._tenants.items()):
            if not each.is_active and (each.num_used <= lowest or not has_active):
                del self._tenants[tenant_id]

"""Turns at a shared resource: a few holders at a time, and the tenant that used the least is served next.

In memory; does not depend on what is done in a turn. A turn is charged to its tenant by what it used, bytes of files
for example, and at least one. As with the virtual counters of workers, a tenant that was idle begins at the lowest
counter of the active ones. Main invariant: beside a tenant with hundreds of waiting calls, a call waits for the running
turns, and then for at most as much as it uses itself, for each other active tenant.
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
    """A tenant with calls that hold or await turns."""

    num_used: int
    num_held: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Turns:
    """The turns at one resource."""

    def __init__(self, num_at_once: int) -> None:
        """`num_at_once`: the most holders at a time."""
        self._num_free = num_at_once
        self._active: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[Turn]:
        """Wait for a turn of this tenant, and hold it during the block."""
        if tenant_id not in self._active:
            floor = min((each.num_used for each in self._active.values()), default=0)
            self._active[tenant_id] = _Tenant(floor)
        tenant = self._active[tenant_id]
        if self._num_free:
            self._num_free -= 1
            tenant.num_held += 1
        else:
            await self._wait(tenant_id, tenant)
        turn = Turn()
        try:
            yield turn
        finally:
            self._end(tenant_id, tenant, max(turn.num_used, 1))

    async def _wait(self, tenant_id: str, tenant: _Tenant) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._end(tenant_id, tenant, 0)
            else:
                with suppress(ValueError):
                    tenant.waiting.remove(granted)
                self._forget_idle(tenant_id, tenant)
            raise

    def _end(self, tenant_id: str, tenant: _Tenant, num_used: int) -> None:
        """Charge a turn that has ended, and give it to the next tenant, if one waits."""
        tenant.num_used += num_used
        tenant.num_held -= 1
        self._num_free += 1
        self._grant()
        self._forget_idle(tenant_id, tenant)

    def _grant(self) -> None:
        while self._num_free and (waiting := [each for each in self._active.values() if each.waiting]):
            tenant = min(waiting, key=lambda each: each.num_used)
            granted = tenant.waiting.popleft()
            if granted.cancelled():
                continue
            granted.set_result(None)
            self._num_free -= 1
            tenant.num_held += 1

    def _forget_idle(self, tenant_id: str, tenant: _Tenant) -> None:
        if not tenant.waiting and not tenant.num_held and self._active.get(tenant_id) is tenant:
            del self._active[tenant_id]

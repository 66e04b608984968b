"""Turns at a shared resource: a few holders at a time, and the tenant that used the least is served next.

In memory; does not depend on what is done in a turn. A turn is charged to its tenant by what it used, bytes of files
for example, and at least one. As with the virtual counters of workers, a tenant that was idle is lifted to the lowest
counter of the active ones; above that it keeps its own, because a call has no turn while its client reads.

Main invariant: beside a tenant with hundreds of waiting calls, a call waits for the running turns, and then for at most
as much as it uses itself, for each other active tenant.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from coordinator.limits.budget import Budget


@dataclass(slots=True)
class Turn:
    """A turn that is held."""

    num_used: int = 0

    def use(self, amount: int) -> None:
        """Charge what the turn has used to its tenant."""
        self.num_used += amount


class Turns:
    """The turns at one resource."""

    def __init__(self, num_at_once: int) -> None:
        """`num_at_once`: the most holders at a time, also of one tenant."""
        self._budget = Budget(num_at_once, num_at_once, sys.maxsize, order=self._by_use)
        self.used, self.maximum = self._budget.used, self._budget.maximum
        self._num_used: dict[str, int] = {}
        """Counters of the tenants that hold or await turns, or that used more than these."""

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[Turn]:
        """Wait for a turn of this tenant, and hold it during the block."""
        num_used = self._num_used.get(tenant_id, 0)
        self._num_used[tenant_id] = num_used if self._budget.is_active(tenant_id) else max(num_used, self._lowest())
        turn = Turn()
        try:
            await self._budget.take(tenant_id, 1, None)
            try:
                yield turn
            finally:
                self._num_used[tenant_id] += max(turn.num_used, 1)
                self._budget.give(tenant_id, 1)
        finally:
            self._forget_idle()

    def _by_use(self, waiting: Collection[str]) -> list[str]:
        return sorted(filter(waiting.__contains__, self._num_used), key=self._num_used.__getitem__)

    def _lowest(self) -> int:
        """Return the lowest counter of the active tenants; 0 if there is none."""
        return min((used for tenant_id, used in self._num_used.items() if self._budget.is_active(tenant_id)), default=0)

    def _forget_idle(self) -> None:
        """Forget idle tenants that would be lifted when they return, and all of them when none is active."""
        lowest, has_active = self._lowest(), any(map(self._budget.is_active, self._num_used))
        for tenant_id, used in list(self._num_used.items()):
            if not self._budget.is_active(tenant_id) and (used <= lowest or not has_active):
                del self._num_used[tenant_id]

"""Long polls of all tenants: how many may wait at a time, and which is answered early to make room.

Does not depend on what a poll waits for. Main invariant: no poll is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

POLL_S_MIN = 1.0
"""Seconds for which a poll is held at least. Its client asks again at once: without this, too many polls would become a
flood of calls."""


class Polls:
    """Long polls: calls that wait for a result. Beyond `num_max`, a poll is answered early, with nothing yet.

    The oldest poll of the tenant with the most polls is answered, at least `POLL_S_MIN` after its start; of a tenant
    with more polls than it may have, its own oldest.
    """

    def __init__(self, num_max: int, of_tenant_max: Callable[[str], int | None]) -> None:
        """`of_tenant_max`: the most polls of a tenant; None: as many as there is room for."""
        self.maximum = of_tenant_max
        self._num_max = num_max
        self._waiting: dict[str, dict[asyncio.Timeout, float]] = {}
        """Deadlines and their starts, by tenant, the oldest first."""
        self._count = 0

    def used(self, tenant_id: str) -> int:
        """Return the number of a tenant's polls."""
        return len(self._waiting.get(tenant_id, ()))

    @asynccontextmanager
    async def held(self, tenant_id: str, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block after `seconds`, or earlier to make room for other polls."""
        async with asyncio.timeout(seconds) as deadline:
            self._waiting.setdefault(tenant_id, {})[deadline] = asyncio.get_running_loop().time()
            self._count += 1
            try:
                of_tenant_max = self.maximum(tenant_id)
                if of_tenant_max is not None and self.used(tenant_id) > of_tenant_max:
                    self._answer_one(tenant_id)
                elif self._count > self._num_max:
                    self._answer_one(max(self._waiting, key=lambda each: len(self._waiting[each])))
                yield
            finally:
                self._forget(tenant_id, deadline)

    def _answer_one(self, tenant_id: str) -> None:
        for deadline, began in list(self._waiting[tenant_id].items()):
            self._forget(tenant_id, deadline)
            if not deadline.expired():  # one that has passed makes room itself, and cannot be moved any more
                deadline.reschedule(max(began + POLL_S_MIN, asyncio.get_running_loop().time()))
                return

    def _forget(self, tenant_id: str, deadline: asyncio.Timeout) -> None:
        polls = self._waiting.get(tenant_id, {})
        if deadline in polls:
            del polls[deadline]
            self._count -= 1
        if not polls:
            self._waiting.pop(tenant_id, None)

"""Amounts that many calls share, bytes of requests for example: taken before they are used, by tenants in turn.

Does not depend on what an amount stands for. Main invariant: what calls have taken never exceeds the total, nor a
tenant's calls their part of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

from coordinator.base.errors import Quota
from coordinator.limits.ceiling import Refusal

_BUSY = Refusal("CALLS_BUSY", "wait for some calls to end")
PARTS = 4
"""One tenant may hold one part of everything."""


class Budget:
    """An amount that calls take and give back. A call waits if the rest or its tenant's part is too small.

    Tenants with waiting calls take turns; calls of one tenant are served in the order of their arrival.
    """

    def __init__(
        self,
        total: int,
        of_tenant_max: int,
        waiting_max: int,
        *,
        unit: str = "bytes",
        what: str = "requests that are being read",
        refusal: Refusal = _BUSY,
        order: Callable[[Collection[str]], Iterable[str]] = list,
    ) -> None:
        """`unit` and `what` name the amount in a `refusal`: `unit` of `what`.

        `order` returns the waiting tenants in the order in which they are served, of those that wait in turn.
        """
        self._order = order
        self._refusal = refusal
        self._total = total
        self._unit = unit
        self._what = what
        self._free = total
        self._of_tenant_max = of_tenant_max
        self._waiting_max = waiting_max
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        self._num_waiting = 0

    def used(self, tenant_id: str) -> int:
        """Return what the calls of a tenant have taken."""
        return self._taken[tenant_id]

    def maximum(self, _tenant_id: str) -> int:
        """Return the part that one tenant may take."""
        return self._of_tenant_max

    def is_active(self, tenant_id: str) -> bool:
        """Return whether calls of a tenant hold a part, or wait for one."""
        return tenant_id in self._taken or tenant_id in self._waiting

    async def take(self, tenant_id: str, amount: int, timeout_s: float | None) -> None:
        """Take an amount. Raises ServiceError CALLS_BUSY after `timeout_s` seconds, or if too many calls wait."""
        if tenant_id not in self._waiting and self._fits(tenant_id, amount):
            self._grant(tenant_id, amount)
            return
        self.check_waiting(tenant_id)
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append((granted, amount))
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException as error:
            if granted.cancelled():
                self._leave(tenant_id, (granted, amount))
                self._serve()  # this call may have been the first of its tenant
            else:
                self.give(tenant_id, amount)
            if isinstance(error, TimeoutError):
                raise self._refusal.of(self._quota(tenant_id, amount)) from None
            raise

    def check_waiting(self, tenant_id: str) -> None:
        """Raise ServiceError CALLS_BUSY if so many calls wait that another one would be refused."""
        num_own, own_max = len(self._waiting.get(tenant_id, ())), self._waiting_max // PARTS
        if num_own >= own_max:
            raise self._refusal.of(Quota("calls of yours that wait for room", num_own, own_max))
        if self._num_waiting >= self._waiting_max:
            of_all = Quota("calls of all tenants that wait for room", self._num_waiting, self._waiting_max)
            raise self._refusal.of(of_all)

    def take_now(self, tenant_id: str, amount: int) -> None:
        """Take an amount without waiting. Raises ServiceError CALLS_BUSY if the rest or the tenant's part is small."""
        if not self._fits(tenant_id, amount):
            raise self._refusal.of(self._quota(tenant_id, amount))
        self._grant(tenant_id, amount)

    def give(self, tenant_id: str, amount: int) -> None:
        """Give an amount back, and serve waiting calls."""
        self._free += amount
        self._taken[tenant_id] -= amount
        if not self._taken[tenant_id]:
            del self._taken[tenant_id]
        if self._waiting:
            self._serve()

    def _fits(self, tenant_id: str, amount: int) -> bool:
        return amount <= self._free and self._taken[tenant_id] + amount <= self._of_tenant_max

    def _quota(self, tenant_id: str, amount: int) -> Quota:
        """Return the quota for which this amount waited: the tenant's own part, or the whole."""
        of_tenant = self._taken[tenant_id]
        if of_tenant + amount > self._of_tenant_max:
            return Quota(f"{self._unit} of your {self._what}", of_tenant, self._of_tenant_max)
        return Quota(f"{self._unit} of all {self._what}", self._total - self._free, self._total)

    def _grant(self, tenant_id: str, amount: int) -> None:
        self._free -= amount
        self._taken[tenant_id] += amount

    def _leave(self, tenant_id: str, call: tuple[asyncio.Future[None], int]) -> None:
        """Drop a call that waits no more, unless `_serve` has."""
        queue = self._waiting.get(tenant_id, deque())
        if call in queue:
            queue.remove(call)
            self._num_waiting -= 1
            if not queue:
                del self._waiting[tenant_id]

    def _serve(self) -> None:
        """Grant what fits, a call of each tenant in turn. Calls that have left are dropped."""
        is_progress = True
        while is_progress:
            is_progress = False
            for tenant_id in self._order(self._waiting):
                granted, amount = (queue := self._waiting[tenant_id])[0]
                has_left = granted.cancelled()
                if not has_left and not self._fits(tenant_id, amount):
                    continue
                is_progress = True
                queue.popleft()
                self._num_waiting -= 1
                if queue:
                    self._waiting.move_to_end(tenant_id)
                else:
                    del self._waiting[tenant_id]
                if not has_left:
                    self._grant(tenant_id, amount)
                    granted.set_result(None)


class Held:
    """What one call has taken of a budget. Give it back at the end of the call with `close`."""

    def __init__(self, budget: Budget, tenant_id: str) -> None:
        self._budget = budget
        self._tenant_id = tenant_id
        self._amount = 0

    async def take(self, amount: int, timeout_s: float) -> None:
        """Take an amount, once. Raises ServiceError CALLS_BUSY, as the budget does."""
        assert not self._amount, "a call that waits for more would hold what others wait for"
        await self._budget.take(self._tenant_id, amount, timeout_s)
        self._amount = amount

    def check(self) -> None:
        """Raise ServiceError CALLS_BUSY if so many calls wait that this one could not."""
        self._budget.check_waiting(self._tenant_id)

    def grow(self, amount: int) -> None:
        """Take what lacks to an amount, without waiting. Raises ServiceError CALLS_BUSY."""
        if amount > self._amount:
            self._budget.take_now(self._tenant_id, amount - self._amount)
            self._amount = amount

    def shrink(self, amount: int) -> None:
        """Give back what is above an amount."""
        if amount < self._amount:
            self._budget.give(self._tenant_id, self._amount - amount)
            self._amount = amount

    def close(self) -> None:
        """Give back everything. Idempotent."""
        self.shrink(0)

"""Rates of tenants: token buckets of operations and of tokens through the base model.

The creation of a session, adapter or sampler counts as one operation: it costs a sync to disk, as an operation does.

A bucket holds what its rate gives in `BURST_S` seconds, and is full at the start of an epoch. A request is accepted if
the bucket has at least one operation or token, and takes all of its amount, also below zero: the next requests wait
until that is paid back. So the size of a request decides nothing, a large one does not starve behind small ones of its
tenant, and on average the rate holds. A refusal has the exact delay after which any request would be accepted, if the
tenant sends nothing else meanwhile.

Does not depend on what is counted. Main invariant: without a rate nothing is refused and nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.base.errors import busy
from coordinator.base.tenant_limits import BURST_S
from coordinator.limits.quotas import Quotas

TENANTS_KEPT = 4096
"""Buckets of a rate that are kept while they may be full; above that, the full ones are dropped."""
_LEAST = 1.0
"""Operations or tokens that a bucket must have for a request to be accepted."""


@dataclass(slots=True)
class _Bucket:
    level: float
    """What is left; below zero after a request for more than that, or one that others awaited."""
    at: float
    """The time of the level, in seconds."""


class Rate:
    """The buckets of all tenants for one of their rates."""

    def __init__(self, name: str, quotas: Quotas, monotonic: Callable[[], float]) -> None:
        self._name = name
        self._quotas = quotas
        self._monotonic = monotonic
        self._buckets: dict[str, _Bucket] = {}

    def used(self, tenant_id: str) -> int:
        """Return how much a tenant's bucket lacks of its size."""
        rate = self._rate(tenant_id)
        return 0 if rate is None else math.ceil(_size(rate) - self._level(tenant_id, rate))

    def maximum(self, tenant_id: str) -> int | None:
        """Return the size of a tenant's bucket."""
        rate = self._rate(tenant_id)
        return None if rate is None else math.floor(_size(rate))

    def check(self, tenant_id: str, amount: int) -> None:
        """Raise ServiceError RATE_LIMITED with a delay if a request of this amount draws from an empty bucket."""
        rate = self._rate(tenant_id)
        if rate is None or not amount:
            return
        missing = _LEAST - self._level(tenant_id, rate)
        if missing > 0:
            quota = self._quotas.quota(tenant_id, self._name, self.used(tenant_id), math.floor(_size(rate)))
            delay_s = math.ceil(missing / rate * 1000) / 1000
            raise busy("RATE_LIMITED", quota, "send less at once", delay_s=delay_s)

    def draw(self, tenant_id: str, amount: int) -> None:
        """Take the amount of an accepted request."""
        rate = self._rate(tenant_id)
        if rate is None or not amount:
            return
        self._buckets[tenant_id] = _Bucket(self._level(tenant_id, rate) - amount, self._monotonic())
        if len(self._buckets) > TENANTS_KEPT:
            self._drop_full()

    def _rate(self, tenant_id: str) -> float | None:
        rate: float | None = getattr(self._quotas.of(tenant_id), self._name)
        return rate

    def _level(self, tenant_id: str, rate: float) -> float:
        """Return what a bucket holds now. A new rate holds for the time since the last request."""
        bucket = self._buckets.get(tenant_id)
        if bucket is None:
            return _size(rate)
        return min(_size(rate), bucket.level + (self._monotonic() - bucket.at) * rate)

    def _drop_full(self) -> None:
        for tenant_id in list(self._buckets):
            rate = self._rate(tenant_id)
            if rate is None or self._level(tenant_id, rate) >= _size(rate):
                del self._buckets[tenant_id]


class Rates:
    """The rates of all tenants, listed among their limits by what a bucket holds."""

    def __init__(self, quotas: Quotas, monotonic: Callable[[], float]) -> None:
        self._operations = Rate("operations_per_s", quotas, monotonic)
        self._tokens = Rate("tokens_per_s", quotas, monotonic)
        quotas.listed.update(operations_at_once=self._operations, tokens_at_once=self._tokens)

    def check(self, tenant_id: str, num_operations: int, num_tokens: int) -> None:
        """Raise ServiceError RATE_LIMITED with a delay if a bucket that a request draws from is empty now."""
        self._operations.check(tenant_id, num_operations)
        self._tokens.check(tenant_id, num_tokens)

    def draw(self, tenant_id: str, num_operations: int, num_tokens: int) -> None:
        """Take the amounts of an accepted request, also of one that the buckets have too little for."""
        self._operations.draw(tenant_id, num_operations)
        self._tokens.draw(tenant_id, num_tokens)

    def take_creation(self, tenant_id: str) -> None:
        """Take one operation for something that is created. Raises ServiceError RATE_LIMITED with a delay."""
        self.check(tenant_id, 1, 0)
        self.draw(tenant_id, 1, 0)


def _size(rate: float) -> float:
    """Return what a full bucket holds, at least what a request needs."""
    return max(_LEAST, rate * BURST_S)

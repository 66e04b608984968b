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
"""Buckets that are kept while they may be full; above that, the full ones are dropped."""
_LEAST = 1.0
"""Operations or tokens that a bucket must have for a request to be accepted."""


@dataclass(slots=True)
class _Bucket:
    level: float
    """What is left; below zero after a request for more than that, or one that others awaited."""
    at: float
    """The time of the level, in seconds."""


class Rates:
    """The buckets of all tenants."""

    def __init__(self, quotas: Quotas, monotonic: Callable[[], float]) -> None:
        self._quotas = quotas
        self._monotonic = monotonic
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def check(self, tenant_id: str, num_operations: int, num_tokens: int) -> None:
        """Raise ServiceError RATE_LIMITED with a delay if a bucket that a request draws from is empty now."""
        self._check(tenant_id, "operations_per_s", num_operations)
        self._check(tenant_id, "tokens_per_s", num_tokens)

    def draw(self, tenant_id: str, num_operations: int, num_tokens: int) -> None:
        """Take the amounts of an accepted request, also of one that the buckets have too little for."""
        self._draw(tenant_id, "operations_per_s", num_operations)
        self._draw(tenant_id, "tokens_per_s", num_tokens)

    def take_creation(self, tenant_id: str) -> None:
        """Take one operation for something that is created. Raises ServiceError RATE_LIMITED with a delay."""
        self.check(tenant_id, 1, 0)
        self.draw(tenant_id, 1, 0)

    def _check(self, tenant_id: str, name: str, amount: int) -> None:
        rate: float | None = getattr(self._quotas.of(tenant_id), name)
        if rate is None or not amount:
            return
        size, level = _size(rate), self._level(tenant_id, name, rate)
        missing = _LEAST - level
        if missing > 0:
            quota = self._quotas.quota(tenant_id, name, math.ceil(size - level), math.floor(size))
            delay_s = math.ceil(missing / rate * 1000) / 1000
            raise busy("RATE_LIMITED", quota, "send less at once", delay_s=delay_s)

    def _draw(self, tenant_id: str, name: str, amount: int) -> None:
        rate: float | None = getattr(self._quotas.of(tenant_id), name)
        if rate is None or not amount:
            return
        level = self._level(tenant_id, name, rate)
        self._buckets[tenant_id, name] = _Bucket(level - amount, self._monotonic())
        if len(self._buckets) > TENANTS_KEPT:
            self._drop_full()

    def _level(self, tenant_id: str, name: str, rate: float) -> float:
        """Return what a bucket holds now. A new rate holds for the time since the last request."""
        bucket = self._buckets.get((tenant_id, name))
        if bucket is None:
            return _size(rate)
        return min(_size(rate), bucket.level + (self._monotonic() - bucket.at) * rate)

    def _drop_full(self) -> None:
        for tenant_id, name in list(self._buckets):
            rate: float | None = getattr(self._quotas.of(tenant_id), name)
            if rate is None or self._level(tenant_id, name, rate) >= _size(rate):
                del self._buckets[tenant_id, name]


def _size(rate: float) -> float:
    """Return what a full bucket holds, at least what a request needs."""
    return max(_LEAST, rate * BURST_S)

"""The calls of each tenant that wait or stream: at most so many at a time.

Does not depend on what a call waits for. Main invariant: a call counts from its start until it has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.base.errors import busy
from coordinator.limits.quotas import Quotas


class Streams:
    """The open calls of all tenants."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._num_open: Counter[str] = Counter()

    def num_of(self, tenant_id: str) -> int:
        """Return the number of a tenant's open calls."""
        return self._num_open[tenant_id]

    @contextmanager
    def open(self, tenant_id: str) -> Iterator[None]:
        """Count a call until the block ends. Raises ServiceError STREAMS_FULL if the tenant has too many."""
        if (num_open := self._num_open[tenant_id]) >= self._quotas.of(tenant_id).streams_max:
            quota = self._quotas.quota(tenant_id, "streams_max", num_open)
            raise busy("STREAMS_FULL", quota, "wait for more operations in one call, or end some calls")
        self._num_open[tenant_id] += 1
        try:
            yield
        finally:
            self._num_open[tenant_id] -= 1
            if not self._num_open[tenant_id]:
                del self._num_open[tenant_id]

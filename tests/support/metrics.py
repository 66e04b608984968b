"""The metrics of a pool of toy engines, over HTTP."""

from __future__ import annotations

import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.base.config import MetricsConfig
from coordinator.doors.metrics import MetricsDoor
from coordinator.runtime.gauges import PoolGauges
from tests.support.toy_pool import ToyPool


@asynccontextmanager
async def served(pool: ToyPool, *, num_tenants: int = 0) -> AsyncIterator[str]:
    """Serve the metrics of a pool; yield their address."""
    door = MetricsDoor(MetricsConfig(port=0, num_tenants=num_tenants))
    door.bind()
    await door.start(PoolGauges(pool.core, num_tenants))
    try:
        yield door.url
    finally:
        await door.stop()


def fetch(url: str, accept: str) -> tuple[str, str]:
    """Return the type and the text of the metrics in the format that is asked for."""
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()

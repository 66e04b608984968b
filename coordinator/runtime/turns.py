"""Turns at a shared resource: a few holders at a time, and the tenants that wait are served one after the other.

In memory; does not depend on what is done in a turn. Main invariant: a tenant with hundreds of waiting calls gets one
turn, then every other waiting tenant gets one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """The turns at one resource."""

    def __init__(self, num_at_once: int) -> None:
        """`num_at_once`: the most holders at a time."""
        self._num_free = num_at_once
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, in the order of their next turns."""

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait for a turn of this tenant, and hold it during the block."""
        if self._num_free:
            self._num_free -= 1
        else:
            await self._wait(tenant_id)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant_id: str) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a turn that has ended to the next tenant, if one waits."""
        while self._waiting:
            tenant_id, waiting = self._waiting.popitem(last=False)
            granted = waiting.popleft()
            if waiting:
                self._waiting[tenant_id] = waiting
            if not granted.done():
                granted.set_result(None)
                return
        self._num_free += 1

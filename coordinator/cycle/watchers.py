"""The streams that watch cycles: a cycle goes to the streams of each tenant in slices, with pauses between them.

Each stream takes the event loop a fifth of a millisecond for each cycle, and a tenant may have thousands. Does not
depend on what a cycle holds, nor on what a stream shows of it. Main invariant: the streams of a tenant get each cycle
in order, wait for no stream of another tenant, and leave most of the event loop's time to others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tinkerpool.v1 import pool_pb2

UNREAD_MAX = 1000
"""Cycles that a slow stream may have unread, and that wait for the streams of a tenant; later ones are dropped."""
AT_ONCE = 16
"""Streams of a tenant that get a cycle at a time: sending it takes them 3 ms."""
PAUSE_S = 0.005
"""Seconds between two slices of one tenant."""

Watcher = asyncio.Queue[pool_pb2.Cycle | None]
"""Cycles that a stream has not sent; None: the coordinator stops."""


class Watchers:
    """The streams of all tenants."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        """By tenant."""
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of streams."""
        return sum(map(len, self._groups.values()))

    @contextmanager
    def watch(self, tenant_id: str) -> Iterator[Watcher]:
        """Make a queue of the cycles that are committed during the block, for a stream of a tenant."""
        watcher = Watcher()
        if self._is_closed:
            watcher.put_nowait(None)
        group = self._groups.setdefault(tenant_id, _Group())
        group.add(watcher)
        try:
            yield watcher
        finally:
            group.discard(watcher)
            if not group:
                del self._groups[tenant_id]

    def publish(self, cycle: pool_pb2.Cycle) -> None:
        """Hand a committed cycle to every stream, now or soon."""
        for group in self._groups.values():
            group.publish(cycle)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for group in self._groups.values():
            group.close()


class _Group:
    """The streams of one tenant."""

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}
        self._listed: tuple[Watcher, ...] | None = None
        """All of them; None: they have changed since a cycle was published."""
        self._unshown: deque[tuple[pool_pb2.Cycle, tuple[Watcher, ...]]] = deque()
        """Cycles with the streams that there were, of which some have not got them."""
        self._num_shown = 0
        """Streams that have got the first of these."""

    def __len__(self) -> int:
        return len(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """Add a stream."""
        self._watchers[watcher], self._listed = None, None

    def discard(self, watcher: Watcher) -> None:
        """Remove a stream."""
        self._watchers.pop(watcher)
        self._listed = None

    def publish(self, cycle: pool_pb2.Cycle) -> None:
        """Hand a cycle to the streams, behind those before it."""
        if self._listed is None:
            self._listed = tuple(self._watchers)
        if len(self._unshown) < UNREAD_MAX:
            self._unshown.append((cycle, self._listed))
            if len(self._unshown) == 1:
                self._show()

    def close(self) -> None:
        """End the streams."""
        self._unshown.clear()
        self._num_shown = 0
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def _show(self) -> None:
        if not self._unshown:
            return  # closed meanwhile
        cycle, watchers = self._unshown[0]
        for watcher in watchers[self._num_shown : self._num_shown + AT_ONCE]:
            if watcher.qsize() < UNREAD_MAX:
                watcher.put_nowait(cycle)
        self._num_shown += AT_ONCE
        if self._num_shown >= len(watchers):
            self._unshown.popleft()
            self._num_shown = 0
        if self._unshown:
            asyncio.get_running_loop().call_later(PAUSE_S, self._show)

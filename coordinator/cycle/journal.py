"""The journal of cycles: their ids, the notes of plans in the log, the last committed cycles and their watchers.

Does not depend on what a cycle runs. Main invariant: ids grow over all base models and epochs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.scheduling.planner import PassPlan
from coordinator.storage.cycles import Cycles
from tinkerpool.v1 import pool_pb2

CYCLES_SHOWN_MAX = 1000
"""Cycles that are kept, and that a slow watcher may have unread; later ones are dropped for it."""


class CycleJournal:
    """The cycles of all base models; their ids come from one counter."""

    def __init__(self, cycles: Cycles) -> None:
        self._cycles = cycles
        self._last_id = cycles.last_id()
        self.recent: deque[pool_pb2.Cycle] = deque(maxlen=CYCLES_SHOWN_MAX)
        self._watchers: set[asyncio.Queue[pool_pb2.Cycle | None]] = set()
        self._is_closed = False

    def new_id(self) -> int:
        """Return the id of the next cycle."""
        self._last_id += 1
        return self._last_id

    def note_plan(self, cycle_id: int, plan: PassPlan) -> None:
        """Note which adapters run where: a hint after a crash, which becomes durable with the next commit."""
        placements = {adapter_id: plan.placements[adapter_id] for adapter_id in plan.num_chunks}
        self._cycles.note_plan(cycle_id, placements)

    def publish(self, cycle: pool_pb2.Cycle) -> None:
        """Show a committed cycle."""
        self.recent.append(cycle)
        for watcher in self._watchers:
            if watcher.qsize() < CYCLES_SHOWN_MAX:
                watcher.put_nowait(cycle)

    @contextmanager
    def watch(self) -> Iterator[asyncio.Queue[pool_pb2.Cycle | None]]:
        """Make a queue of the cycles that are committed during the block; None in it: the coordinator stops."""
        queue: asyncio.Queue[pool_pb2.Cycle | None] = asyncio.Queue()
        self._watchers.add(queue)
        if self._is_closed:
            queue.put_nowait(None)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)

    def close(self) -> None:
        """End every watch."""
        self._is_closed = True
        for watcher in self._watchers:
            watcher.put_nowait(None)

"""Adds workers to the pool of a history, and drains and removes others, while clients are served.

Does not depend on what the workers run. Raises ContractViolation if a worker that is drained does not end.
"""

from __future__ import annotations

import asyncio

from coordinator.coordinator import Coordinator
from tests.simulation.pool import SimPool
from tests.simulation.standing import ContractViolation
from tests.simulation.world import World
from workers.contract.protocols import WorkerLost

BASE_MODEL = "toy"
WORKERS_MAX = 5
CHANGES_MAX = 8
"""Of one epoch."""
DRAIN_S_MAX = 120.0
"""Most seconds for a worker to lose what it has: it may be paused, and its replacement may be under way."""


class Membership:
    """The joins and removals of a history; most have none."""

    def __init__(self, world: World, pool: SimPool) -> None:
        self._world = world
        self._pool = pool
        self._random = random = world.random("membership")
        self._pause_s = random.choice((0.0, 0.0, 0.05, 0.5))
        """Mean time between two changes; 0: there are none."""
        self._crash = random.choice((0.0, 0.3))
        """Probability that a worker crashes while it is drained."""

    async def change(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Change the workers again and again."""
        core = coordinator.core
        for _ in range(CHANGES_MAX if self._pause_s else 0):
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            available = [each.info.worker_id for each in core.fleet.available(BASE_MODEL)]
            if len(available) < 2 or (len(core.fleet.worker_ids()) < WORKERS_MAX and self._random.random() < 0.5):
                await self._add(coordinator)
            else:
                await self._remove(coordinator, self._random.choice(available), is_last=is_last)

    async def _add(self, coordinator: Coordinator) -> None:
        try:
            worker = await coordinator.core.supervisor.add(BASE_MODEL)
        except WorkerLost:
            return
        self._world.fault("worker joins", worker.incarnation)

    async def _remove(self, coordinator: Coordinator, worker_id: str, *, is_last: bool) -> None:
        worker = coordinator.core.fleet.worker(worker_id)
        self._world.fault("worker drained", worker.name)
        if not is_last and self._random.random() < self._crash:
            self._pool.crash(worker_id)
        try:
            async with asyncio.timeout(DRAIN_S_MAX):
                await coordinator.core.supervisor.remove(worker_id)
        except TimeoutError:
            raise ContractViolation(f"{worker.name} was drained {DRAIN_S_MAX:.0f} s ago and is still there") from None

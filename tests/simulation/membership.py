"""Adds workers to the pool of a history, drains and removes others, and takes hosts away, while clients are served.

`Membership` outlives coordinators, as an administrator does: what it was told is drained must be so after a restart.
Does not depend on what the workers run. Raises ContractViolation if a drained worker does not end, or ends after its
host.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from coordinator.base.errors import ServiceError
from coordinator.coordinator import Coordinator
from coordinator.tenants.principals import Principal, Role
from tests.simulation.pool import BASE_MODEL, SimPool
from tests.simulation.standing import ContractViolation
from tests.simulation.world import World
from tinkerpool.v1 import pool_pb2
from workers.contract.protocols import WorkerLost

WORKERS_MAX = 5
CHANGES_MAX = 8
"""Of one epoch."""
DRAIN_S_MAX = 120.0
"""Most seconds for a worker to lose what it has: it may be paused, and its replacement may be under way."""
OPERATOR = Principal("operator", "operator", "operator", Role.ADMIN)


class Membership:
    """The joins, removals, drains and notices of a history; most have none."""

    def __init__(self, world: World, pool: SimPool) -> None:
        self._world = world
        self._pool = pool
        self._random = random = world.random("membership")
        self._pause_s = random.choice((0.0, 0.0, 0.05, 0.5))
        """Mean time between two changes; 0: there are none."""
        self._crash = random.choice((0.0, 0.3))
        """Probability that a worker crashes while it is drained."""
        self._drained: set[str] = set()
        """Workers whose drain was acknowledged, and that were not undrained since."""
        self._in_doubt: set[str] = set()
        """Workers that may be drained."""

    async def change(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Change the workers again and again."""
        self._check_start(coordinator)
        core = coordinator.core
        for _ in range(CHANGES_MAX if self._pause_s else 0):
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))
            available = [each.info.worker_id for each in core.fleet.available(BASE_MODEL)]
            live = [each for each in core.fleet.worker_ids() if core.fleet.is_live(each)]
            kinds = ["notice"] * bool(live) + ["remove", "drain"] * (len(available) > 1)
            kinds += ["undrain"] * bool(self._drained)
            kinds += ["add"] * (len(core.fleet.worker_ids()) < WORKERS_MAX) * max(1, len(kinds))
            match self._random.choice(kinds or ["none"]):
                case "add":
                    await self._add(coordinator)
                case "undrain":
                    await self._undrain(coordinator, self._random.choice(sorted(self._drained)))
                case "drain":
                    await self._drain(coordinator, self._random.choice(available), is_last=is_last)
                case "remove":
                    await self._remove(coordinator, self._random.choice(available), is_last=is_last)
                case "notice":
                    await self._take_host(self._random.choice(live), is_last=is_last)

    def _check_start(self, coordinator: Coordinator) -> None:
        """Check that a coordinator has started without the drained workers, but for one if all are drained."""
        configured = [f"w{index}" for index in range(self._pool.num_workers)]
        self._drained.intersection_update(configured)
        if self._drained | self._in_doubt >= set(configured):
            self._drained.discard(configured[0])
        for worker_id in self._drained:
            if not coordinator.core.supervisor.is_drained(worker_id) or worker_id in self._pool.workers:
                raise ContractViolation(f"{worker_id} was started, though it is drained")
            self._world.work["workers drained over a restart"] += 1

    async def _add(self, coordinator: Coordinator) -> None:
        try:
            worker = await coordinator.core.supervisor.add(BASE_MODEL)
        except WorkerLost:
            return
        self._world.fault("worker joins", worker.incarnation)

    async def _remove(self, coordinator: Coordinator, worker_id: str, *, is_last: bool) -> None:
        self._world.fault("worker drained", coordinator.core.fleet.worker(worker_id).name)
        self._crash_some(worker_id, is_last=is_last)
        async with self._soon(worker_id):
            await coordinator.core.supervisor.remove(worker_id)

    async def _drain(self, coordinator: Coordinator, worker_id: str, *, is_last: bool) -> None:
        request = pool_pb2.DrainWorkerRequest(worker_id=worker_id)
        self._in_doubt.add(worker_id)
        if not await self._call(lambda: coordinator.service.drain_worker(OPERATOR, request)):
            return
        self._world.fault("worker drained by hand", worker_id)
        self._in_doubt.discard(worker_id)
        self._drained.add(worker_id)
        self._crash_some(worker_id, is_last=is_last)
        if self._random.random() < 0.5:
            async with self._soon(worker_id):
                while worker_id in coordinator.core.fleet.worker_ids():  # noqa: ASYNC110 (no event for it)
                    await asyncio.sleep(0.1)

    async def _undrain(self, coordinator: Coordinator, worker_id: str) -> None:
        request = pool_pb2.UndrainWorkerRequest(worker_id=worker_id)
        self._drained.discard(worker_id)
        self._in_doubt.add(worker_id)
        if await self._call(lambda: coordinator.service.undrain_worker(OPERATOR, request)):
            self._in_doubt.discard(worker_id)
            self._world.fault("worker undrained", worker_id)

    async def _take_host(self, worker_id: str, *, is_last: bool) -> None:
        """Announce that a worker's host leaves; then it does, or it ends before that."""
        worker, seconds = self._pool.workers[worker_id], self._random.choice((3.0, 8.0, 30.0))
        is_kept = is_last or self._random.random() < 0.6
        self._world.fault("host leaves" if is_kept else "host leaves too early", f"{worker.incarnation} {seconds:g} s")
        self._pool.notices[worker.incarnation] = self._world.time() + seconds
        await asyncio.sleep(seconds if is_kept else seconds * self._random.random())
        if self._pool.workers.get(worker_id) is not worker:
            return
        if is_kept and not worker.is_lost:
            raise ContractViolation(f"{worker.incarnation} was still there when its host left")
        self._pool.crash(worker_id)

    async def _call(self, call: Callable[[], Awaitable[object]]) -> bool:
        """Call the service; return whether it did what it was asked for."""
        try:
            await call()
        except ServiceError as error:
            self._world.trace(f"the membership is not changed: {error.reason}")
            return False
        return True

    def _crash_some(self, worker_id: str, *, is_last: bool) -> None:
        if not is_last and self._random.random() < self._crash and worker_id in self._pool.workers:
            self._pool.crash(worker_id)

    @contextlib.asynccontextmanager
    async def _soon(self, worker_id: str) -> AsyncIterator[None]:
        """Limit the time that a drained worker may take to end."""
        try:
            async with asyncio.timeout(DRAIN_S_MAX):
                yield
        except TimeoutError:
            raise ContractViolation(f"{worker_id} was drained {DRAIN_S_MAX:.0f} s ago and is still there") from None

"""Supervises the workers: pings them, replaces lost ones with back-off, adds and removes workers.

Ray restarts no worker by itself. The part that notices a loss reports it to the recorder of losses; the supervisor
reads the event and starts the worker's next incarnation. A worker is removed once its adapters have left it, which
happens between two cycles, and its samples have ended. Does not depend on what workers run. Main invariant: a lost
worker is replaced until a replacement starts, or it is removed, or the coordinator stops.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.base.config import CoordinatorConfig
from coordinator.base.time import Time, backoff_s, within
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.registry import AdapterRegistry
from coordinator.runtime.tasks import Tasks
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.worker_losses import LossKind, LossRecorder
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import Pool, WorkerLost

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""Seconds after a ping from which on only its own adapters wait for the worker."""
DRAIN_POLL_S = 0.05
"""Interval at which a worker that is to be removed is examined."""
BACKOFF_S, BACKOFF_S_MAX = 0.25, 30.0
"""First and longest pause before the replacement of an incarnation that was lost before its first reply to a batch,
from the second loss on; each pause is twice the one before."""


class Supervisor:
    """Keeps every worker of the pool alive."""

    def __init__(
        self,
        config: CoordinatorConfig,
        pool: Pool,
        time: Time,
        fleet: Fleet,
        registry: AdapterRegistry,
        losses: LossRecorder,
        samples: SampleScheduler,
        tasks: Tasks,
    ) -> None:
        self._config = config
        self._pool = pool
        self._time = time
        self._fleet = fleet
        self._registry = registry
        self._losses = losses
        self._samples = samples
        self._tasks = tasks
        self._wake = asyncio.Event()
        self._lost = losses.subscribe(self._wake)
        self._replacing: set[str] = set()
        self._is_stopping = False

    def start(self) -> None:
        """Follow and ping every worker, replace the ones that are lost, and take in the ones that are still missing."""
        for worker_id in self._fleet.worker_ids():
            self._join(worker_id)
        for worker_id in self._pool.missing():
            self._tasks.spawn(self._await_missing(worker_id))
        self._tasks.spawn(self._replace_lost())

    def stop(self) -> None:
        """Replace no more workers: losses are still recorded."""
        self._is_stopping = True

    async def add(self, base_model: str) -> WorkerInfo:
        """Start another worker of a base model that the pool serves. Raises WorkerLost if it does not start."""
        worker = await self._pool.add(base_model)
        self._take_in(worker)
        return worker

    async def remove(self, worker_id: str) -> None:
        """Drain a worker and end it. Its adapters go on elsewhere, with the same bits; its samples end there first.

        Raises ValueError if no other worker of its base model would take work.
        """
        base_model = self._fleet.worker(worker_id).info.model.name
        if all(each.info.worker_id == worker_id for each in self._fleet.available(base_model)):
            raise ValueError(f"{worker_id} is the last worker of {base_model}: add another one first")
        self._fleet.drain(worker_id)
        while not self._is_vacant(worker_id):
            await self._time.sleep(DRAIN_POLL_S)
        self._losses.settled(worker_id)
        self._fleet.remove(worker_id)
        await self._pool.remove(worker_id)
        logger.info("worker %s was removed", worker_id)

    def _take_in(self, worker: WorkerInfo) -> None:
        logger.info("worker %s of %s joined", worker.incarnation, worker.model.name)
        self._fleet.add(worker)
        self._join(worker.worker_id)

    async def _await_missing(self, worker_id: str) -> None:
        """Take in a worker that was not ready when the pool was; start it again, with back-off, while it fails to."""
        worker, num_failures = None, 0
        while worker is None:
            try:
                worker = await self._pool.replace(worker_id)
            except WorkerLost as error:
                num_failures += 1
                logger.error("worker %s does not start: %s; retrying", worker_id, error)
                await self._time.sleep(backoff_s(BACKOFF_S, BACKOFF_S_MAX, num_failures))
        self._take_in(worker)

    def _join(self, worker_id: str) -> None:
        self._samples.follow(self._fleet.worker(worker_id))
        self._tasks.spawn(self._ping(worker_id))

    def _is_vacant(self, worker_id: str) -> bool:
        has_copies = self._registry.num_on(worker_id) > 0
        return self._fleet.worker(worker_id).is_clear and not has_copies and worker_id not in self._replacing

    async def _ping(self, worker_id: str) -> None:
        while worker_id in self._fleet.worker_ids():
            await self._time.sleep(self._config.ping_interval_s)
            worker = self._fleet.find(worker_id)
            if worker is None:
                continue
            await self._ping_once(worker)

    async def _ping_once(self, worker: Incarnation) -> None:
        """Wait for the reply to a ping. A worker is late when it is overdue by `LATE_S`, and lost soon after."""
        timeout_s = self._config.ping_timeout_s
        late_s = min(LATE_S, timeout_s)
        worker_id, ping = worker.info.worker_id, asyncio.ensure_future(self._pool.ping(worker.info.worker_id))
        try:
            try:
                await within(late_s, asyncio.shield(ping))
            except TimeoutError:
                self._fleet.be_late(worker, is_late=True)
                await within(timeout_s - late_s, ping)
            self._fleet.be_late(worker, is_late=False)
        except WorkerLost as error:
            self._losses.record(worker_id, worker.name, LossKind.DIED, str(error))
        except TimeoutError:
            reason = f"no reply within {timeout_s:g} s"
            self._losses.record(worker_id, worker.name, LossKind.SILENT, reason)
        finally:
            ping.cancel()

    async def _replace_lost(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for loss in self._lost.take():
                if not self._is_stopping:
                    self._replacing.add(loss.worker_id)
                    self._tasks.spawn(self._replace(loss.worker_id, is_at_once=loss.had_turn))

    async def _replace(self, worker_id: str, *, is_at_once: bool) -> None:
        """Replace a lost worker. `is_at_once`: the loss was not its fault, so the first attempt has no back-off."""
        worker = None
        while worker is None:
            num_losses = 1 if is_at_once else self._fleet.note_loss(worker_id)
            await self._time.sleep(backoff_s(BACKOFF_S, BACKOFF_S_MAX, num_losses - 2) if num_losses > 1 else 0.0)
            is_at_once = False
            if self._fleet.worker(worker_id).is_draining:
                break
            try:
                worker = await self._pool.replace(worker_id)
            except WorkerLost as error:
                logger.error("worker %s does not start again: %s; retrying", worker_id, error)
                self._losses.not_replaced(worker_id)
        self._replacing.discard(worker_id)
        if worker is None or self._fleet.worker(worker_id).is_draining:
            return  # `remove` ends it
        logger.warning("worker %s replaced by %s", worker_id, worker.incarnation)
        self._fleet.add(worker)
        self._losses.settled(worker_id)
        self._samples.follow(self._fleet.worker(worker_id))

"""Supervises the workers: pings them, has losses recorded, and replaces lost workers with back-off.

Ray restarts no worker by itself. The part that notices a loss reports it to the recorder of losses; the supervisor
reads the event and starts the worker's next incarnation. Does not depend on what workers run. Main invariant: a lost
worker is replaced until a replacement starts, or the coordinator stops.
"""

from __future__ import annotations

import asyncio
import logging

from coordinator.base.time import Time, within
from coordinator.fleet.fleet import Fleet
from coordinator.runtime.tasks import Tasks
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.worker_losses import LossRecorder
from workers.contract.protocols import Pool, WorkerLost

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 5.0
BACKOFF_S, BACKOFF_S_MAX = 0.25, 30.0
"""First and longest pause before the replacement of an incarnation that was lost before its first reply to a batch;
each pause is twice the one before."""


class Supervisor:
    """Keeps every worker of the pool alive."""

    def __init__(
        self,
        pool: Pool,
        time: Time,
        fleet: Fleet,
        losses: LossRecorder,
        samples: SampleScheduler,
        tasks: Tasks,
    ) -> None:
        self._pool = pool
        self._time = time
        self._fleet = fleet
        self._losses = losses
        self._samples = samples
        self._tasks = tasks
        self._wake = asyncio.Event()
        self._lost = losses.subscribe(self._wake)
        self._is_stopping = False

    def start(self) -> None:
        """Follow and ping every worker, and replace the ones that are lost."""
        for worker_id in self._fleet.worker_ids():
            self._samples.follow(self._fleet.worker(worker_id))
            self._tasks.spawn(self._ping(worker_id))
        self._tasks.spawn(self._replace_lost())

    def stop(self) -> None:
        """Replace no more workers: losses are still recorded."""
        self._is_stopping = True

    async def _ping(self, worker_id: str) -> None:
        while True:
            await self._time.sleep(PING_INTERVAL_S)
            worker = self._fleet.find(worker_id)
            if worker is None:
                continue
            try:
                await within(PING_TIMEOUT_S, self._pool.ping(worker_id))
            except (WorkerLost, TimeoutError) as error:
                self._losses.record(worker_id, worker.name, f"no reply to a ping: {str(error) or 'time-out'}")

    async def _replace_lost(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for loss in self._lost.take():
                if not self._is_stopping:
                    self._tasks.spawn(self._replace(loss.worker_id, is_at_once=loss.had_turn))

    async def _replace(self, worker_id: str, *, is_at_once: bool) -> None:
        """Replace a lost worker. `is_at_once`: the loss was not its fault, so the first attempt has no back-off."""
        worker = None
        while worker is None:
            await self._time.sleep(0.0 if is_at_once else _backoff_s(self._fleet.note_loss(worker_id)))
            is_at_once = False
            try:
                worker = await self._pool.replace(worker_id)
            except WorkerLost as error:
                logger.error("worker %s does not start again: %s; retrying", worker_id, error)
                self._losses.not_replaced(worker_id)
        logger.warning("worker %s replaced by %s", worker_id, worker.incarnation)
        self._fleet.revive(worker)
        self._losses.replaced(worker_id)
        self._samples.follow(self._fleet.worker(worker_id))


def _backoff_s(num_losses: int) -> float:
    """Return the pause before the next incarnation: none after the first loss."""
    return min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (num_losses - 2)) if num_losses > 1 else 0.0

"""Supervises the workers: pings them, replaces lost ones with back-off, adds workers, drains and removes them.

Ray restarts no worker by itself. The part that notices a loss reports it to the recorder of losses; the supervisor
reads the event and starts the worker's next incarnation. A drained worker ends once its adapters have left it, which
happens between two cycles, and its samples have ended. A worker whose host is about to leave is drained too, and ended
before its host; its next incarnation starts meanwhile. Does not depend on what workers run. Main invariant: a lost
worker is replaced until a replacement starts, or it is drained for good, or the coordinator stops.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection

from coordinator.base.config import CoordinatorConfig
from coordinator.base.time import Time, backoff_s, within
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.registry import AdapterRegistry
from coordinator.runtime.base_weights import BaseWeights
from coordinator.runtime.tasks import Tasks
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.worker_losses import LossKind, LossRecorder, WorkerLoss
from workers.contract.logs import about
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import Pool, WorkerLost

logger = logging.getLogger(__name__)

LATE_S = 1.0
"""Seconds after a ping from which on only its own adapters wait for the worker."""
DRAIN_POLL_S = 0.05
"""Interval at which a worker that is drained is examined."""
NOTICE_POLL_S = 1.0
"""Interval at which the pool is asked which hosts leave."""
NEAR_S = 5.0
"""Seconds before the end of its host at which a worker is drained that no other worker can stand in for."""
END_S = 1.0
"""Seconds before the end of its host at which a worker is ended, whatever it does."""
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
        base_weights: BaseWeights,
        drained: Collection[str] = (),
    ) -> None:
        """`drained`: workers that were not started, because an administrator has drained them."""
        self._config = config
        self._pool = pool
        self._time = time
        self._fleet = fleet
        self._registry = registry
        self._losses = losses
        self._samples = samples
        self._tasks = tasks
        self._base_weights = base_weights
        self._wake = asyncio.Event()
        self._lost = losses.subscribe(self._wake)
        self._replacing: set[str] = set()
        self._ending: set[str] = set(drained)
        """Workers that end, or have ended, and are not replaced."""
        self._pinged: set[str] = set()
        self._notices: dict[str, float] = {}
        """Incarnation to the service time at which its host leaves."""
        self._prepared: set[str] = set()
        """Incarnations whose next one is ready."""
        self._is_stopping = False

    def start(self) -> None:
        """Follow and ping every worker, replace the lost and missing ones, and obey notices of hosts that leave."""
        for worker_id in self._fleet.worker_ids():
            self._join(worker_id)
        for worker_id in self._pool.base_models():
            if worker_id not in self._fleet.worker_ids() and worker_id not in self._ending:
                self._begin_replace(worker_id, is_at_once=True)
        self._tasks.spawn(self._replace_lost())
        self._tasks.spawn(self._obey_notices())

    def stop(self) -> None:
        """Replace no more workers: losses are still recorded."""
        self._is_stopping = True

    async def add(self, base_model: str) -> WorkerInfo:
        """Start another worker of a base model that the pool serves. Raises WorkerLost if it does not start."""
        worker = await self._pool.add(base_model)
        if problem := self._base_weights.problem(worker):
            await self._pool.remove(worker.worker_id)
            raise WorkerLost(problem)
        ids = about(worker=worker.worker_id, incarnation=worker.incarnation)
        logger.info("worker %s of %s joined", worker.incarnation, base_model, extra=ids)
        self._fleet.add(worker)
        self._join(worker.worker_id)
        return worker

    async def remove(self, worker_id: str) -> None:
        """Drain a worker and end it. Its adapters go on elsewhere, with the same bits; its samples end there first.

        Raises ValueError if no other worker of its base model would take work.
        """
        self._begin_end(worker_id)
        await self._end(worker_id)

    def drain(self, worker_id: str) -> None:
        """Do in the background what `remove` does, until `undrain`. Idempotent. Raises ValueError as it does."""
        if worker_id not in self._ending:
            self._begin_end(worker_id)
            self._tasks.spawn(self._end(worker_id))

    def undrain(self, worker_id: str) -> None:
        """Let a drained worker take work again; start it again, in the background, if it has ended. Idempotent."""
        if worker_id not in self._ending:
            return
        self._ending.discard(worker_id)
        self._fleet.expect([worker_id])
        worker = self._fleet.find(worker_id)
        if worker_id in self._fleet.worker_ids():
            self._fleet.undrain(worker_id)
            if worker is not None and worker.name in self._notices:
                self._fleet.drain(worker_id, is_ending=False)  # it is replaced
            self._losses.drained(worker_id)
        if worker is None:
            self._begin_replace(worker_id, is_at_once=True)

    def is_drained(self, worker_id: str) -> bool:
        """Return whether a worker ends or has ended, and is not replaced."""
        return worker_id in self._ending

    def host_leaves_in_s(self, worker: Incarnation) -> float | None:
        """Return the seconds until a worker's host leaves, infinite if that is not known; None: there is no notice."""
        at_s = self._notices.get(worker.name)
        return None if at_s is None else max(0.0, at_s - self._time.monotonic())

    def _begin_end(self, worker_id: str) -> None:
        if worker_id in self._fleet.worker_ids():
            base_model = self._fleet.worker(worker_id).info.model.name
            if all(each.info.worker_id == worker_id for each in self._fleet.available(base_model)):
                raise ValueError(
                    f"{worker_id} is the last worker of {base_model} that takes work: undrain another one first, or "
                    "start the pool with more workers (--workers)"
                )
            self._fleet.drain(worker_id, is_ending=True)
            self._losses.drained(worker_id)
        self._fleet.dismiss(worker_id)
        self._ending.add(worker_id)

    async def _end(self, worker_id: str) -> None:
        """End a drained worker once it has nothing any more, or its host is about to end; unless it is undrained."""
        while worker_id in self._ending and not self._is_vacant(worker_id):
            if (worker := self._fleet.find(worker_id)) is not None:
                self._hurry(worker)
            await self._time.sleep(DRAIN_POLL_S)
        if worker_id not in self._ending:
            return
        if worker_id in self._fleet.worker_ids():
            self._losses.settled(worker_id)
            self._fleet.remove(worker_id)
        await self._pool.remove(worker_id)
        logger.info("worker %s was drained and has ended", worker_id, extra=about(worker=worker_id))

    def _join(self, worker_id: str) -> None:
        self._samples.follow(self._fleet.worker(worker_id))
        if worker_id not in self._pinged:
            self._pinged.add(worker_id)
            self._tasks.spawn(self._ping(worker_id))

    def _is_vacant(self, worker_id: str) -> bool:
        if worker_id in self._replacing:
            return False
        is_known = worker_id in self._fleet.worker_ids()
        return not is_known or (self._fleet.worker(worker_id).is_clear and not self._registry.num_on(worker_id))

    # ---- hosts that leave

    async def _obey_notices(self) -> None:
        while True:
            for worker_id, seconds in (await self._pool.leaving()).items():
                if (worker := self._fleet.find(worker_id)) is None or self._is_stopping:
                    continue
                is_new, at_s = worker.name not in self._notices, self._time.monotonic() + seconds
                self._notices[worker.name] = min(at_s, self._notices.get(worker.name, math.inf))
                if is_new:
                    when = "" if math.isinf(seconds) else f" in {seconds:.0f} s"
                    ids = about(worker=worker_id, incarnation=worker.name)
                    logger.warning(
                        "%s, the host of worker %s, leaves%s", worker.info.node, worker.name, when, extra=ids
                    )
                    self._tasks.spawn(self._leave(worker))
            await self._time.sleep(NOTICE_POLL_S)

    async def _leave(self, worker: Incarnation) -> None:
        """Move a worker away from a host that leaves: what it has goes on elsewhere, and it is replaced.

        Nothing leaves a worker that no other one can stand in for before its next incarnation is ready, or the end of
        its host is near.
        """
        worker_id = worker.info.worker_id
        if not worker.is_ending:
            self._tasks.spawn(self._prepare(worker))
        while worker.is_live and not self._may_leave(worker):
            await self._time.sleep(DRAIN_POLL_S)
        if worker.is_live:
            self._fleet.drain(worker_id, is_ending=False)
            self._losses.drained(worker_id)
        while worker.is_live and not self._has_left(worker):
            self._hurry(worker)
            await self._time.sleep(DRAIN_POLL_S)
        self._losses.record(worker_id, worker.name, LossKind.LEFT, "its host leaves")
        del self._notices[worker.name]
        self._prepared.discard(worker.name)

    async def _prepare(self, worker: Incarnation) -> None:
        """Start the next incarnation of a worker that goes on meanwhile."""
        while worker.is_live and worker.name not in self._prepared:
            try:
                await self._pool.prepare(worker.info.worker_id)
            except WorkerLost as error:
                worker_id = worker.info.worker_id
                ids = about(worker=worker_id)
                logger.error("worker %s does not start on another host: %s; retrying", worker_id, error, extra=ids)
                await self._time.sleep(BACKOFF_S_MAX)
            else:
                self._prepared.add(worker.name)

    def _may_leave(self, worker: Incarnation) -> bool:
        is_near = self._time.monotonic() >= self._notices[worker.name] - NEAR_S
        return is_near or worker.name in self._prepared or self._has_others(worker)

    def _has_others(self, worker: Incarnation) -> bool:
        """Return whether workers that stay take work of the same base model, with the same numerics."""
        model = worker.info.model
        peers = [each for each in self._fleet.available(model.name) if each.info.model.fingerprint == model.fingerprint]
        return any(each.name not in self._notices for each in peers)

    def _has_left(self, worker: Incarnation) -> bool:
        """Return whether a drained worker has nothing any more; if no other one takes work, samples do not count."""
        has_work = bool(worker.training) or (bool(worker.samples) and self._has_others(worker))
        return not has_work and not self._registry.num_on(worker.info.worker_id)

    def _hurry(self, worker: Incarnation) -> None:
        """See to it that a drained worker has nothing any more when its host leaves."""
        end_s = self._notices.get(worker.name, math.inf) - END_S
        if self._time.monotonic() >= end_s:
            kind = LossKind.SILENT if worker.is_late else LossKind.LEFT  # what silenced it must not go on unsuspected
            self._losses.record(worker.info.worker_id, worker.name, kind, "its host leaves now")
        elif self._has_others(worker):
            self._samples.leave(worker, end_s)

    async def _replacement(self, worker_id: str) -> WorkerInfo:
        """Return a worker's next incarnation. Raises WorkerLost if none starts, or if it must not take work."""
        worker = await self._pool.replace(worker_id)
        if problem := self._base_weights.problem(worker):
            raise WorkerLost(problem)
        return worker

    # ---- losses

    async def _ping(self, worker_id: str) -> None:
        while worker_id in self._fleet.worker_ids():
            await self._time.sleep(self._config.ping_interval_s)
            worker = self._fleet.find(worker_id)
            if worker is None:
                continue
            await self._ping_once(worker, asyncio.Event())
        self._pinged.discard(worker_id)

    async def _ping_once(self, worker: Incarnation, is_proven: asyncio.Event) -> None:
        """Wait for the reply to a ping. A worker is late when it is overdue by `LATE_S`, and lost soon after.

        One that replies to a batch meanwhile is not late, until it has been silent for another `LATE_S`.

        Sets `is_proven` once the worker has replied, or is late or lost.
        """
        timeout_s = left_s = self._config.ping_timeout_s
        worker_id, ping = worker.info.worker_id, asyncio.ensure_future(self._pool.ping(worker.info.worker_id))
        try:
            while not ping.done():
                wait_s = min(LATE_S, left_s)
                try:
                    await within(wait_s, asyncio.shield(ping))
                except TimeoutError:
                    self._fleet.be_late(worker, is_late=True)
                    is_proven.set()
                    if (left_s := left_s - wait_s) <= 0:
                        raise
            ping.result()
            self._fleet.be_late(worker, is_late=False)
        except WorkerLost as error:
            self._losses.record(worker_id, worker.name, LossKind.DIED, str(error))
        except TimeoutError:
            reason = f"no reply within {timeout_s:g} s"
            self._losses.record(worker_id, worker.name, LossKind.SILENT, reason)
        finally:
            is_proven.set()
            ping.cancel()

    async def _check_others(self, loss: WorkerLoss) -> None:
        """Ping the other workers after a loss: what was in flight there runs next on one that lives."""
        proven = [asyncio.Event() for _ in loss.unproven]
        for worker, is_proven in zip(loss.unproven, proven, strict=True):
            self._tasks.spawn(self._ping_once(worker, is_proven))
        for is_proven in proven:
            await is_proven.wait()
        self._losses.checked(loss)

    async def _replace_lost(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for loss in self._lost.take():
                if loss.unproven:
                    self._tasks.spawn(self._check_others(loss))
                if not self._is_stopping:
                    self._begin_replace(loss.worker_id, is_at_once=loss.is_blameless)

    def _begin_replace(self, worker_id: str, *, is_at_once: bool) -> None:
        """Replace a worker in the background, as `_replace` does, unless that has begun: `undrain` may be first."""
        if worker_id not in self._replacing:
            self._replacing.add(worker_id)
            self._tasks.spawn(self._replace(worker_id, is_at_once=is_at_once))

    async def _replace(self, worker_id: str, *, is_at_once: bool) -> None:
        """Start the next incarnation of a worker that is lost, missing since the start, or drained and ended.

        `is_at_once`: a loss was not its fault, so the first attempt has no back-off.
        """
        worker = None
        while worker is None:
            num_losses = 1 if is_at_once else self._fleet.note_loss(worker_id)
            await self._time.sleep(backoff_s(BACKOFF_S, BACKOFF_S_MAX, num_losses - 2) if num_losses > 1 else 0.0)
            is_at_once = False
            if worker_id in self._ending:
                break
            try:
                worker = await self._replacement(worker_id)
            except WorkerLost as error:
                ids = about(worker=worker_id)
                logger.error("worker %s does not start again: %s; retrying", worker_id, error, extra=ids)
                self._fleet.note_start_problem(worker_id, str(error))
                if worker_id in self._fleet.worker_ids():
                    self._losses.not_replaced(worker_id)
        self._replacing.discard(worker_id)
        if worker is None or worker_id in self._ending:
            return  # `_end` ends it
        ids = about(worker=worker_id, incarnation=worker.incarnation)
        if worker_id in self._fleet.worker_ids():
            logger.warning("worker %s replaced by %s", worker_id, worker.incarnation, extra=ids)
        else:
            logger.info("worker %s of %s joined", worker.incarnation, worker.model.name, extra=ids)
        self._fleet.add(worker)
        self._losses.settled(worker_id)
        self._join(worker_id)

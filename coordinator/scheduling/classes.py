"""Which workers compute an adapter's bits as before: those of its class, which have one fingerprint.

An adapter stays in the class in which it first ran. Without a worker of the class it waits for one that is expected and
was of this class when it last reported; at most for a limited time, then it goes on in another class. That is logged,
and noted in its next result. The classes of workers and of adapters are durable; who waits is in memory. Does not
depend on what a fingerprint says. Main invariant: no adapter changes its class unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from coordinator.base.time import Signal, Time, within
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.adapter_log import AdapterLog
from coordinator.storage.rows import WorkerClassRow
from coordinator.storage.workers import WorkerClasses
from workers.contract.logs import about

logger = logging.getLogger(__name__)


class Classes:
    """The classes of one base model's workers."""

    def __init__(self, base_model: str, fleet: Fleet, time: Time, wait_s: float, reports: WorkerClasses) -> None:
        """`wait_s`: most seconds to wait for a class."""
        self.changed = Signal()
        """The wait for a class is over."""
        self._base_model = base_model
        self._fleet = fleet
        self._time = time
        self._wait_s = wait_s
        self._reports = reports
        self._reported = reports.of_model(base_model)
        """The class of each worker."""
        self._absent_since: dict[str, float] = {}
        """Classes without a worker that takes work, for which adapters wait or have waited."""
        self._wake = asyncio.Event()
        self._moved: dict[str, str] = {}
        """Adapters whose new class is not durable yet."""
        self.targets: dict[str, str] = {}
        """Adapters that are to go on on a certain worker, whatever its class."""
        fleet.changed.subscribe(self._wake)
        self._update()

    def others(self, log: AdapterLog) -> frozenset[str]:
        """Return the workers that take work and on which the adapter must not be placed now: of another class.

        These may be all of them: then it waits.
        """
        fingerprint, target = log.fingerprint, self.targets.get(log.adapter_id)
        available = self._fleet.available(self._base_model)
        if target is not None and any(each.info.worker_id == target for each in available):
            return frozenset(each.info.worker_id for each in available if each.info.worker_id != target)
        others = frozenset(each.info.worker_id for each in available if each.info.model.fingerprint != fingerprint)
        if not fingerprint or not others or (len(others) == len(available) and not self._is_awaited(fingerprint)):
            return frozenset()
        return others

    def send(self, log: AdapterLog, worker_id: str) -> None:
        """Let the adapter go on on this worker, whatever its class, as long as that takes work."""
        if log.home != worker_id:
            self.targets[log.adapter_id] = worker_id
        else:
            self.targets.pop(log.adapter_id, None)

    def placed(self, log: AdapterLog, worker: Incarnation) -> None:
        """Record that a copy of the adapter is placed on a worker, and so of which class the adapter is."""
        self.targets.pop(log.adapter_id, None)
        before, now = log.fingerprint, worker.info.model.fingerprint
        if now == before:
            return
        if before:
            logger.warning(
                "%s goes on with other numerics, on worker %s: its results may differ in the last bits from now on. "
                "Before: %s. Now: %s",
                log.adapter_id,
                worker.name,
                before,
                now,
                extra=about(adapter=log.adapter_id, worker=worker.info.worker_id, incarnation=worker.name),
            )
        log.enter_class(now)
        self._moved[log.adapter_id] = now

    def take_moved(self, adapter_ids: Iterable[str]) -> dict[str, str]:
        """Return those of these adapters whose class is not durable yet, to be committed with their results."""
        return {each: self._moved.pop(each) for each in adapter_ids if each in self._moved}

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self._moved.pop(adapter_id, None)
        self.targets.pop(adapter_id, None)

    async def run(self) -> None:
        """Note which classes workers have, and notify `changed` when the wait for one is over; run until cancelled."""
        while True:
            left_s = [each for each in map(self._left_s, self._absent_since) if each > 0]
            try:
                await (within(min(left_s), self._wake.wait()) if left_s else self._wake.wait())
            except TimeoutError:
                self.changed.notify()
            self._wake.clear()
            self._update()

    def _is_awaited(self, fingerprint: str) -> bool:
        """Return whether a worker of a class that has none at present is to come, and the wait is not over."""
        self._update()  # a worker may just have come with another class than before
        if fingerprint not in {self._reported.get(each) for each in self._fleet.expected}:
            return False
        if fingerprint not in self._absent_since:
            self._absent_since[fingerprint] = self._time.monotonic()
            self._wake.set()
            logger.warning("no worker with these numerics takes work now, and adapters wait for one: %s", fingerprint)
        return self._left_s(fingerprint) > 0

    def _left_s(self, fingerprint: str) -> float:
        return self._absent_since[fingerprint] + self._wait_s - self._time.monotonic()

    def _update(self) -> None:
        """Note the classes of the workers that take work now."""
        for each in self._fleet.available(self._base_model):
            worker_id, fingerprint = each.info.worker_id, each.info.model.fingerprint
            self._absent_since.pop(fingerprint, None)
            if self._reported.get(worker_id) != fingerprint:
                self._reported[worker_id] = fingerprint
                row = WorkerClassRow(worker_id=worker_id, base_model=self._base_model, fingerprint=fingerprint)
                self._reports.put(row)

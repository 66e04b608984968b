"""Sends one phase of a cycle to all its workers at once, and waits for each until the deadline of its batch.

Depends on the fleet, deadlines and the recorder of losses; not on what a result means (`results`). Main invariant: a
batch goes to the incarnation that its copies were built for, or not at all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from coordinator.base.time import Time, within
from coordinator.cycle.items import Entry, PhaseWork, flights
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.scheduling.cost_model import Deadlines
from coordinator.scheduling.losses import LossRecorder
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.virtual_counters import Share, decode_share
from workers.contract.failpoints import failpoint
from workers.contract.messages import Batch, BatchResult, ItemResult
from workers.contract.protocols import Pool, WorkerLost

OVERDUE_S = 5.0
"""Seconds after its deadline at which a cycle that has made no progress counts as stuck."""


class TakenOver(Exception):
    """A coordinator of a later epoch has the workers: this one must end."""


class Dispatch:
    """Sends batches to the workers of one base model."""

    def __init__(
        self,
        pool: Pool,
        time: Time,
        epoch: int,
        fleet: Fleet,
        losses: LossRecorder,
        quarantine: Quarantine,
        deadlines: Deadlines,
    ) -> None:
        self._pool = pool
        self._time = time
        self._epoch = epoch
        self._fleet = fleet
        self._losses = losses
        self._quarantine = quarantine
        self._deadlines = deadlines
        self._overdue_at = math.inf

    @property
    def is_overdue(self) -> bool:
        """Whether the present cycle has passed its deadline by more than `OVERDUE_S`."""
        return self._time.monotonic() > self._overdue_at

    def watch(self, seconds: float) -> None:
        """Start a deadline: the cycle must make progress within these seconds and `OVERDUE_S`."""
        self._overdue_at = self._time.monotonic() + seconds + OVERDUE_S

    def rest(self) -> None:
        """End the deadline."""
        self._overdue_at = math.inf

    async def run(
        self, cycle_id: int, work: PhaseWork, shares: Mapping[str, Share]
    ) -> list[tuple[Entry, Incarnation, ItemResult]]:
        """Run one phase; return the results of the workers that replied, item by item. Raises TakenOver."""
        sent: list[tuple[Incarnation, list[Entry], Batch, float]] = []
        for worker_id in work.worker_ids():
            worker, entries = self._fleet.find(worker_id), work.entries(worker_id)
            if worker is None:
                continue  # lost since the work was built: its copies are not current
            worker.begin_phase(flights(entries))
            batch = self._batch(cycle_id, work, worker, entries, shares)
            sent.append((worker, entries, batch, self._allowed_s(worker, batch)))
        self.watch(max((allowed_s for *_, allowed_s in sent), default=0.0))
        replies = await asyncio.gather(
            *(
                self._run_batch(worker, batch, allowed_s, is_first=index == 0)
                for index, (worker, _, batch, allowed_s) in enumerate(sent)
            ),
            return_exceptions=True,
        )
        self.rest()
        results: list[tuple[Entry, Incarnation, ItemResult]] = []
        for (worker, entries, _, _), reply in zip(sent, replies, strict=True):
            if isinstance(reply, BatchResult):
                worker.end_phase()
                if reply.epoch != self._epoch:
                    raise TakenOver(f"{worker.name} works for epoch {reply.epoch}, this is {self._epoch}")
                results += ((entry, worker, result) for entry, result in zip(entries, reply.results, strict=True))
            elif isinstance(reply, WorkerLost):
                self._losses.record(worker.info.worker_id, worker.name, f"in cycle {cycle_id}: {reply}")
            else:
                raise reply
        return results

    def _batch(
        self, cycle_id: int, work: PhaseWork, worker: Incarnation, entries: list[Entry], shares: Mapping[str, Share]
    ) -> Batch:
        worker_id = worker.info.worker_id
        sampling = {flight.tenant_id for flight in worker.samples.values()}
        return Batch(
            epoch=self._epoch,
            cycle_id=cycle_id,
            installs=work.installs(worker_id),
            removals=worker.take_removals(),
            items=tuple(entry.item for entry in entries),
            decode_share=decode_share(sampling, {entry.log.tenant_id for entry in entries}, shares),
            expected=work.expected(worker_id),
        )

    def _allowed_s(self, worker: Incarnation, batch: Batch) -> float:
        losses = max((self._quarantine.num_solo_losses(flight.name) for flight in worker.training), default=0)
        return self._deadlines.allowed_s(batch, worker.name, losses)

    async def _run_batch(self, worker: Incarnation, batch: Batch, allowed_s: float, *, is_first: bool) -> BatchResult:
        """Return a worker's reply, if it comes in time. Raises WorkerLost."""
        if not is_first:
            failpoint("dispatch.partial")
        began = self._time.monotonic()
        try:
            reply = await within(allowed_s, self._pool.run(worker.info.worker_id, batch))
        except TimeoutError:
            self._deadlines.forget(worker.name)
            raise WorkerLost(f"no reply to a batch within {allowed_s:.0f} s") from None
        self._fleet.answered(worker.info.worker_id)
        self._deadlines.observe(batch, worker.name, self._time.monotonic() - began)
        return reply

"""Sends one phase of a cycle to its workers, all at once, and waits for each no longer than its batch may take.

Knows workers, lives and deadlines, and which operations are on which worker; not what an answer means (`answers`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Sequence

from coordinator.base.time import Time, within
from coordinator.cycle.phase import Entry, Work
from coordinator.operations.operation import Operation
from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.deadlines import Deadlines
from coordinator.scheduling.quarantine import Suspects
from workers.contract.failpoints import failpoint
from workers.contract.messages import Batch, BatchResult, ItemResult, WorkerInfo
from workers.contract.protocols import Pool, WorkerLost

logger = logging.getLogger(__name__)

OVERDUE_S = 5.0
"""How long after its deadline a cycle must have come on, or it is stuck."""


class TakenOver(Exception):
    """A later coordinator has the workers: this one must end."""


class Dispatch:
    """The way to the workers of one base model."""

    def __init__(
        self,
        *,
        pool: Pool,
        time: Time,
        epoch: int,
        suspects: Suspects,
        costs: CycleCosts,
        take_removals: Callable[[str], tuple[str, ...]],
        decode_share: Callable[[str, Collection[str]], float],
        worker_lost: Callable[[str, str], None],
        worker_answered: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._time = time
        self._epoch = epoch
        self._suspects = suspects
        self._take_removals = take_removals
        self._decode_share = decode_share
        self._worker_lost = worker_lost
        self._worker_answered = worker_answered
        self._deadlines = Deadlines(costs)
        self._on_worker: dict[str, list[Operation]] = {}
        self._overdue_at = math.inf

    @property
    def is_overdue(self) -> bool:
        """The present cycle has not come on for longer than it may."""
        return self._time.monotonic() > self._overdue_at

    def watch(self, seconds: float) -> None:
        """The cycle must come on within this time and some more."""
        self._overdue_at = self._time.monotonic() + seconds + OVERDUE_S

    def rest(self) -> None:
        """Nothing is waited for that has a time."""
        self._overdue_at = math.inf

    def running_on(self, worker_id: str) -> list[Operation]:
        """What the worker has of the present phase, and has not answered."""
        return self._on_worker.get(worker_id, [])

    def forget(self, worker_id: str) -> None:
        """That life of the worker is over."""
        self._on_worker.pop(worker_id, None)

    async def run(self, cycle_id: int, work: Work, workers: Sequence[WorkerInfo]) -> list[tuple[Entry, ItemResult]]:
        """Run one phase. Returns what the workers that lived have answered, item by item; of others nothing.

        Raises TakenOver.
        """
        batches = work.batches(self._epoch, cycle_id, self._take_removals, self._decode_share)
        lives = {worker.worker_id: worker.incarnation for worker in workers}
        self._on_worker = {
            worker_id: [operation for _, operation, _ in entries if operation is not None]
            for worker_id, entries in work.items.items()
        }
        allowed = {
            worker_id: self._allowed_s(worker_id, lives.get(worker_id, ""), batch)
            for worker_id, batch in batches.items()
        }
        self.watch(max(allowed.values(), default=0.0))
        answers = await asyncio.gather(
            *(
                self._run_batch(worker_id, lives.get(worker_id, ""), batch, allowed[worker_id], is_first=index == 0)
                for index, (worker_id, batch) in enumerate(batches.items())
            ),
            return_exceptions=True,
        )
        self.rest()
        results: list[tuple[Entry, ItemResult]] = []
        for worker_id, answer in zip(batches, answers, strict=True):
            if isinstance(answer, BatchResult):
                self.forget(worker_id)
                if answer.epoch != self._epoch:
                    raise TakenOver(f"{worker_id} works for epoch {answer.epoch}, this is {self._epoch}")
                results += zip(work.items.get(worker_id, []), answer.results, strict=True)
            elif isinstance(answer, WorkerLost):
                logger.warning("worker %s lost in cycle %d: %s", worker_id, cycle_id, answer)
                self._worker_lost(worker_id, lives.get(worker_id, ""))
            else:
                raise answer
        return results

    def _allowed_s(self, worker_id: str, incarnation: str, batch: Batch) -> float:
        deaths = max((self._suspects.deaths(o.name) for o in self.running_on(worker_id)), default=0)
        return self._deadlines.allowed_s(batch, incarnation, deaths)

    async def _run_batch(
        self, worker_id: str, incarnation: str, batch: Batch, allowed_s: float, *, is_first: bool
    ) -> BatchResult:
        """A worker's answer, if it comes in time. Raises WorkerLost."""
        if not is_first:
            failpoint("dispatch.partial")
        began = self._time.monotonic()
        try:
            answer = await within(allowed_s, self._pool.run(worker_id, batch))
        except TimeoutError:
            self._deadlines.forget(incarnation)
            raise WorkerLost(f"no answer to a batch within {allowed_s:.0f} s") from None
        self._worker_answered(worker_id)
        self._deadlines.observe(batch, incarnation, self._time.monotonic() - began)
        return answer

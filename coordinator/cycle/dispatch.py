"""Sends a phase of a cycle to its workers, each with a deadline, and gathers their replies.

A worker that does not reply to pings is late: the phase ends without it, and its part stays open until it replies or is
lost. Does not depend on what a result means, or on what becomes of a part that stays open. Main invariant: a batch goes
to the incarnation that its copies were built for, or not at all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.base.time import Time, within
from coordinator.cycle.items import Entry, PhaseWork, flights
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.scheduling.cost_model import Deadlines
from coordinator.scheduling.planner import Planning
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.worker_losses import LossKind, LossRecorder
from workers.contract.failpoints import failpoint
from workers.contract.messages import Batch, BatchResult, ItemResult, SaveItem
from workers.contract.protocols import Pool, TakenOver, WorkerLost

OVERDUE_S = 5.0
"""Seconds after its deadline at which a cycle that has made no progress counts as stuck."""


class _Overdue(WorkerLost):
    """A worker has not replied to a batch in time."""


@dataclass(slots=True, eq=False)
class Part:
    """What one worker was sent in a phase, and its reply."""

    worker: Incarnation
    entries: list[Entry]
    reply: asyncio.Task[BatchResult]
    computed_s: float | None = None
    """Seconds that the worker took, as it replied."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Those of each phase of its work."""

    @property
    def has_ended(self) -> bool:
        """Whether the worker has replied or is lost."""
        return self.reply.done() or not self.worker.is_live


WorkerResult = tuple[Entry, Incarnation, ItemResult]


@dataclass(frozen=True, slots=True)
class Replies:
    """What became of a phase."""

    results: list[WorkerResult]
    seconds: float
    """That the workers took. If one is lost or late: until that was known."""
    late: list[Part]
    """Of workers that have not replied and are late: they may reply later."""
    phase_s: Mapping[str, Mapping[str, float]]
    """Worker to the seconds of each phase of its work."""


class Dispatch:
    """Sends one phase to all its workers at once, and waits for each until it is late or its batch overdue."""

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
        self.time = time
        self._epoch = epoch
        self._fleet = fleet
        self._losses = losses
        self._quarantine = quarantine
        self._deadlines = deadlines
        self._overdue_at = math.inf
        self._changed = asyncio.Event()
        fleet.changed.subscribe(self._changed)

    @property
    def is_overdue(self) -> bool:
        """Whether the present cycle has passed its deadline by more than `OVERDUE_S`."""
        return self.time.monotonic() > self._overdue_at

    def watch(self, seconds: float) -> None:
        """Start a deadline: the cycle must make progress within these seconds and `OVERDUE_S`."""
        self._overdue_at = self.time.monotonic() + seconds + OVERDUE_S

    def rest(self) -> None:
        """End the deadline."""
        self._overdue_at = math.inf

    async def run(self, cycle_id: int, work: PhaseWork, planning: Planning) -> Replies:
        """Run one phase; return the results of the workers that replied, item by item. Raises TakenOver."""
        began = self.time.monotonic()
        parts: list[Part] = []
        seconds_max = 0.0
        for worker_id in work.worker_ids():
            worker, entries = self._fleet.find(worker_id), work.entries(worker_id)
            if worker is None or worker.is_apart:
                continue  # lost since the work was built: its copies are not current; or only to be asked
            worker.begin_phase(flights(entries))
            batch = self._batch(cycle_id, work, worker, entries, planning)
            extra_tokens = work.extra_tokens(worker_id)
            allowed_s = self._allowed_s(worker, batch, entries, extra_tokens)
            seconds_max = max(seconds_max, allowed_s)
            running = self._run_batch(worker, batch, extra_tokens, allowed_s, is_first=not parts)
            parts.append(Part(worker, entries, asyncio.get_running_loop().create_task(running)))
        self.watch(seconds_max)
        await self._gather(parts)
        self.rest()
        waited_s, computed_s = self.time.monotonic() - began, 0.0
        results: list[WorkerResult] = []
        late = [part for part in parts if not part.reply.done()]
        for part in parts:
            if part not in late:
                results += self.take(cycle_id, part)
            computed_s = max(computed_s, waited_s if part.computed_s is None else part.computed_s)
        phase_s = {part.worker.info.worker_id: part.phase_s for part in parts if part.phase_s}
        return Replies(results, min(computed_s, waited_s), late, phase_s)

    def take(self, cycle_id: int, part: Part) -> list[WorkerResult]:
        """Return the results that a worker replied with; none if it is lost. Raises TakenOver."""
        if not part.reply.done():
            part.reply.cancel()  # its loss was recorded
            return []
        worker, error = part.worker, part.reply.exception()
        if isinstance(error, WorkerLost):
            kind = LossKind.OVERDUE if isinstance(error, _Overdue) else LossKind.DIED
            self._losses.record(worker.info.worker_id, worker.name, kind, f"in cycle {cycle_id}: {error}")
            return []
        reply = part.reply.result()
        part.computed_s, part.phase_s = reply.wall_s, reply.phase_s
        if reply.epoch != self._epoch:
            raise TakenOver(f"{worker.name} works for epoch {reply.epoch}, this is {self._epoch}")
        return [(entry, worker, result) for entry, result in zip(part.entries, reply.results, strict=True)]

    async def _gather(self, parts: Sequence[Part]) -> None:
        """Return when every worker has replied, or is lost or late."""
        try:
            while waiting := [part.reply for part in parts if not part.reply.done() and not part.worker.is_late]:
                self._changed.clear()
                changed = asyncio.get_running_loop().create_task(self._changed.wait())
                try:
                    await asyncio.wait((*waiting, changed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
        except asyncio.CancelledError:
            for part in parts:
                part.reply.cancel()
            raise

    def _batch(
        self, cycle_id: int, work: PhaseWork, worker: Incarnation, entries: list[Entry], planning: Planning
    ) -> Batch:
        worker_id = worker.info.worker_id
        sampling = {flight.tenant_id for flight in worker.samples.values()}
        return Batch(
            epoch=self._epoch,
            cycle_id=cycle_id,
            installs=work.installs(worker_id),
            removals=worker.take_removals(),
            items=tuple(entry.item for entry in entries),
            decode_share=planning.decode_share(worker_id, sampling, {entry.log.tenant_id for entry in entries}),
            expected=work.expected(worker_id),
        )

    def _allowed_s(self, worker: Incarnation, batch: Batch, entries: list[Entry], extra_tokens: float) -> float:
        losses = max((self._quarantine.num_solo_losses(flight.name) for flight in worker.training), default=0)
        saved = [entry.log for entry in entries if isinstance(entry.item, SaveItem)]
        saved_bytes = sum(self._fleet.copy_bytes(log.base_model, log.spec) for log in saved)
        return self._deadlines.allowed_s(batch, worker.name, losses, extra_tokens, saved_bytes)

    async def _run_batch(
        self, worker: Incarnation, batch: Batch, extra_tokens: float, allowed_s: float, *, is_first: bool
    ) -> BatchResult:
        """Return a worker's reply, if it comes in time; then nothing is in flight there. Raises WorkerLost."""
        if not is_first:
            failpoint("dispatch.partial")
        began = self.time.monotonic()
        try:
            reply = await within(allowed_s, self._pool.run(worker.info.worker_id, batch))
        except TimeoutError:
            self._deadlines.forget(worker.name)
            raise _Overdue(f"no reply to a batch within {allowed_s:.0f} s") from None
        self._fleet.answered(worker.info.worker_id)
        if not worker.is_away:  # else the time shows nothing but its silence
            self._deadlines.observe(batch, worker.name, self.time.monotonic() - began, extra_tokens)
        worker.end_phase(reply.held_bytes, reply.use)
        self._fleet.be_late(worker, is_late=False)
        return reply

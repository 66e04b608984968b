"""The loop of one base model's cycles: plan, log, run, commit.

A cycle has two phases. The pass runs chunks of forwards and forward_backwards of many tenants on every worker at once.
The step phase is planned when the pass has ended; it runs the optimizer steps, saves and loads that are due by then.

Depends on planning, phases and commits; not on doors, tenants' names or SQL. Main invariant: no effect of a cycle is
visible before its commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from coordinator.base.time import Time
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Committer, Cycle, CycleJournal
from coordinator.cycle.phases import Phases
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.clock import CycleClock
from coordinator.scheduling.planner import PassPlan, Planning
from coordinator.storage.sqlite import StorageError
from workers.contract.protocols import WorkerLost

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.01


class CycleLoop:
    """Runs the cycles of one base model over its adapters and workers."""

    def __init__(
        self,
        clock: CycleClock,
        planning: Planning,
        phases: Phases,
        committer: Committer,
        journal: CycleJournal,
        group: AdapterGroup,
        snapshots: Snapshots,
        time: Time,
    ) -> None:
        self._clock = clock
        self.planning = planning
        self._phases = phases
        self._committer = committer
        self._journal = journal
        self._group = group
        self._snapshots = snapshots
        self._time = time
        self._is_over = False
        self._is_idle, self._has_ended = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._has_ended.set()

    async def run(self) -> None:
        """Run cycle after cycle, until `stop`. Raises an error after which going on is unsafe (a failed commit)."""
        self._has_ended.clear()
        try:
            while True:
                await self._clock.next_cycle(self)
                if self._is_over:
                    return
                self._is_idle.clear()
                await self._resume()
                cycle, plan = self._plan()
                self._log(cycle, plan)
                await self._run(cycle, plan)
                lost = await self._commit(cycle)
                await self._snapshot(cycle, lost)
                self._is_idle.set()
        finally:
            self._phases.abandon()
            self._is_idle.set()
            self._has_ended.set()

    async def _resume(self) -> None:
        """Go on with the parts of earlier cycles that were split off, and whose late workers have reported."""
        while (split := self._phases.take_reported()) is not None:
            await self._phases.resume(split)
            if split.cycle.cycle_id:  # not snapshots
                await self._commit(split.cycle)

    def _plan(self) -> tuple[Cycle, PassPlan]:
        cycle, plan = self._new_cycle(self._journal.new_id()), self.planning.plan(self._time.monotonic())
        cycle.planned(plan)
        for log, reason in self.planning.waits(plan):
            log.waits.switch(reason, cycle.started)
        return cycle, plan

    def _log(self, cycle: Cycle, plan: PassPlan) -> None:
        self._journal.note_plan(cycle.cycle_id, plan)

    async def _run(self, cycle: Cycle, plan: PassPlan) -> None:
        await self._phases.run_pass(cycle, plan)
        cycle.end_pass(self._time.monotonic())
        await self._phases.run_steps(cycle)
        cycle.end_steps(self._time.monotonic())

    async def _commit(self, cycle: Cycle) -> frozenset[str]:
        self._phases.dispatch.watch(0.0)
        lost = await self._committer.commit(cycle)
        self._phases.dispatch.rest()
        self._clock.finished(cycle.tenants())
        self.planning.ready.end_cycle()
        return lost

    async def _snapshot(self, cycle: Cycle, lost: frozenset[str]) -> None:
        due = self._snapshots.due(self.planning.ready.past_snapshots(), lost)
        leaving = [log for log in self.planning.memory.take_due() if log not in due and self._can_take(log)]
        await self._take_snapshots(cycle, [*due, *leaving])

    async def _take_snapshots(self, cycle: Cycle, logs: Sequence[AdapterLog]) -> None:
        """Read the states of these adapters behind a cycle, as many at a time as may be in memory: then wait for
        earlier ones.
        """
        while logs:
            number = self._snapshots.num_readable(logs, self.planning.memory.size_of)
            if number:
                await self._phases.take_snapshots(cycle, logs[:number])
                logs = [log for log in logs[number:] if self._can_take(log)]
            else:
                await self._snapshots.finish()
                self._snapshots.settle(self._group.logs)
                logs = [log for log in logs if self._can_take(log)]

    def _can_take(self, log: AdapterLog) -> bool:
        return self._snapshots.can_take(log) and log.home not in self.planning.memory.away

    def _new_cycle(self, cycle_id: int) -> Cycle:
        return Cycle(cycle_id, self._time.wall(), self._time.monotonic())

    def is_ready(self) -> bool:
        """Return whether a cycle would run or decide an operation, or the loop must end."""
        if self._is_over:
            return True
        self._snapshots.settle(self._group.logs)
        if self._phases.has_reports:
            return True
        is_ready = self._refresh()
        while self.planning.memory.make_room():
            is_ready = self._refresh()
        return is_ready or self.planning.memory.needs_cycle

    def _refresh(self) -> bool:
        return self.planning.has_workers() and self.planning.ready.refresh()

    def tenants(self) -> frozenset[str]:
        """Return the tenants that are ready."""
        return self.planning.ready.tenants()

    def is_full(self) -> bool:
        """Return whether the ready chunks fill the budget."""
        return self.planning.is_full()

    @property
    def is_healthy(self) -> bool:
        """Whether a worker is live and the present cycle is not overdue."""
        return self.planning.has_live_workers() and not self._phases.dispatch.is_overdue

    async def stop(self, seconds_max: float) -> None:
        """Begin no more operations; wait for the running cycle, and at most `seconds_max` for operations that ran in
        part.
        """
        self.planning.ready.stop()
        await self._is_idle.wait()
        deadline = self._time.monotonic() + seconds_max
        # The next cycle may have begun before this task ran again, and `is_ready` may be asked only between cycles.
        while not self._is_idle.is_set() or self.is_ready() or self._phases.awaits_workers:
            if self._time.monotonic() >= deadline:
                break
            self._group.changed.notify()
            await asyncio.sleep(STOP_POLL_S)
            await self._is_idle.wait()
        self._is_over = True
        self._group.changed.notify()
        await self._has_ended.wait()

    async def until_idle(self, adapter_id: str = "") -> None:
        """Return when the cycle under way has ended, and no part of one that was split off has this adapter.

        The next cycle may be under way then: an adapter that has left the ready set is not in it.
        """
        await self._is_idle.wait()
        while self._phases.has_part_of(adapter_id):
            await asyncio.sleep(STOP_POLL_S)
            await self._is_idle.wait()

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter that is in no cycle."""
        self.planning.ready.forget(adapter_id)
        self._snapshots.forget(adapter_id)

    async def snapshot_all(self) -> None:
        """Snapshot every adapter whose copy is ahead of its snapshot, so that the next start needs no replay.

        A snapshot that fails is logged: the next start replays that adapter.
        """
        try:
            await self._snapshot_all()
        except (StorageError, WorkerLost) as error:
            logger.warning("some adapters have no snapshot, so the next start replays their logs: %s", error)

    async def _snapshot_all(self) -> None:
        await self._snapshots.finish()
        self._snapshots.settle(self._group.logs)
        for log in self._group.logs.values():
            self._group.mark_dirty(log)
        cycle = self._new_cycle(0)
        await self._commit(cycle)  # operations decided since the last cycle
        due = [log for log in self._group.logs.values() if self._can_take(log)]
        await self._take_snapshots(cycle, due)
        await self._snapshots.finish()
        self._snapshots.settle(self._group.logs)

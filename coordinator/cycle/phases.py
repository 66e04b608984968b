"""Runs the phases of a cycle: the pass, the step phase, and the snapshots between two cycles.

Makes sure that an adapter has a copy where it runs, builds the items, dispatches them and applies the results. Does not
depend on what a result means (`results`). Main invariant: an item is built only for an adapter with a current copy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from coordinator.base.errors import ServiceError
from coordinator.base.time import Time
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Cycle
from coordinator.cycle.dispatch import Dispatch
from coordinator.cycle.items import ItemBuilder, PhaseWork
from coordinator.cycle.results import Results
from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.planner import PassPlan, Planning, place

EXPECTED_MAX = 64
"""Adapters in the hints to one worker; hints for more than it can load during a cycle would be useless."""


class Phases:
    """The phases of one base model's cycles."""

    def __init__(
        self,
        planning: Planning,
        group: AdapterGroup,
        fleet: Fleet,
        items: ItemBuilder,
        dispatch: Dispatch,
        results: Results,
        snapshots: Snapshots,
        time: Time,
    ) -> None:
        self._planning = planning
        self._group = group
        self._fleet = fleet
        self._items = items
        self.dispatch = dispatch
        self._results = results
        self._snapshots = snapshots
        self._time = time

    async def run_pass(self, cycle: Cycle, plan: PassPlan) -> None:
        """Run the planned chunks of forwards and forward_backwards."""
        work = PhaseWork()
        for adapter_id, num_chunks in plan.num_chunks.items():
            log = self._group.logs.get(adapter_id)  # it may have been deleted since the plan was made
            if log is not None and await self._install(log, plan.placements[adapter_id], work):
                for operation, item in self._items.pass_items(log, num_chunks):
                    log.start(operation)
                    work.add(log, operation, item)
                self._planning.ready.planned(adapter_id, cycle.cycle_id)
        for log in itertools.islice(self._planning.left_over(plan), EXPECTED_MAX):
            work.expect(log)
        await self._run(cycle, work)

    async def run_steps(self, cycle: Cycle) -> None:
        """Run the optimizer steps, saves and loads that are due by now."""
        work, ready = PhaseWork(), self._planning.ready
        residents = self._planning.residents()
        for log in ready.due_steps():
            worker_id = log.worker_id or place(residents)
            if worker_id not in residents or not await self._install(log, worker_id, work):
                continue
            residents[worker_id] += 1
            if ready.waits_for_file(log):
                continue  # a load arrived while another copy, or its own, was read
            try:
                items = self._items.state_items(log)
            except ServiceError as error:
                await self._refuse_copy(log, error)
                continue
            for operation, item in items:
                log.start(operation)
                work.add(log, operation, item)
        await self._run(cycle, work)

    async def take_snapshots(self, logs: Iterable[AdapterLog]) -> None:
        """Read these adapters' states from their workers; they are written while later cycles run."""
        work = PhaseWork()
        for log in logs:
            self._snapshots.begin(log)
            work.add(log, None, self._items.snapshot_item(log))
        await self._run(Cycle(0, self._time.wall(), self._time.monotonic()), work)
        self._snapshots.end()

    async def _run(self, cycle: Cycle, work: PhaseWork) -> None:
        for entry, worker, result in await self.dispatch.run(cycle.cycle_id, work, self._planning.shares):
            await self._results.apply(cycle, entry, worker, result)

    async def _install(self, log: AdapterLog, worker_id: str, work: PhaseWork) -> bool:
        """Place a copy of the adapter on the worker, unless it has one; return whether it has one.

        False also if its stored state is damaged; its operations are failed then.
        """
        if log.worker_id:
            return True
        worker = self._fleet.find(worker_id)
        if worker is None or self._snapshots.is_unsettled(log.adapter_id):
            return False  # its copy was lost since the plan was made
        try:
            install = await asyncio.to_thread(self._items.install, log)
        except ServiceError as error:
            await self._refuse_copy(log, error)
            return False
        is_there = self._group.logs.get(log.adapter_id) is log
        if not is_there or not worker.is_live or self._snapshots.is_unsettled(log.adapter_id):
            return False
        log.place_copy(worker_id)
        log.advance()
        work.install(log, install)
        return True

    async def _refuse_copy(self, log: AdapterLog, error: ServiceError) -> None:
        """Handle an adapter of which no copy can be made.

        After a transient failure: back off, so that the next cycle does not retry at once.
        """
        self._results.refuse_copy(log, error)
        if error.retry_delay_s is not None:
            await self._time.sleep(error.retry_delay_s)

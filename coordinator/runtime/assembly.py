"""Puts together the parts that run tasks: cycle loops, the sample scheduler, supervision, deletions, housekeeping.

Makes no decision about them. Main invariant: samples start before supervision, which lets them follow workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.base.time import Time
from coordinator.checkpoints.saver import Saver
from coordinator.cycle.assembly import CycleLoops, make_loops
from coordinator.fleet.fleet import Fleet
from coordinator.operations.epoch import Context, Registers
from coordinator.runtime.base_weights import BaseWeights
from coordinator.runtime.deletion import Deletions
from coordinator.runtime.housekeeping import Housekeeping
from coordinator.runtime.supervision import Supervisor
from coordinator.runtime.tasks import Tasks
from coordinator.runtime.tenant_deletion import TenantDeletions
from coordinator.sampling.assembly import make_sample_scheduler
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.schedule import Scheduling
from coordinator.storage.store import Store
from workers.contract.protocols import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Runners:
    """The parts of a coordinator that run tasks of their own."""

    cycles: CycleLoops
    samples: SampleScheduler
    supervisor: Supervisor
    deletions: Deletions
    housekeeping: Housekeeping
    tenant_deletions: TenantDeletions
    scheduling: Scheduling

    def start(self, tasks: Tasks, time: Time) -> None:
        """Start every part."""
        self.samples.start()
        self.supervisor.start()
        for loop in self.cycles.by_model.values():
            tasks.spawn(loop.run())
        tasks.spawn(self.housekeeping.run())
        tasks.spawn(self.tenant_deletions.run())
        tasks.spawn(self.scheduling.probation.wake_at_ends(time))
        for schedule in self.scheduling.schedules.values():
            tasks.spawn(schedule.snapshots.wake_to_retry())
            tasks.spawn(schedule.classes.run())


def make_runners(
    context: Context,
    pool: Pool,
    store: Store,
    fleet: Fleet,
    registers: Registers,
    saver: Saver,
    scheduling: Scheduling,
    tasks: Tasks,
    base_weights: BaseWeights,
) -> Runners:
    """Return the running parts for every base model that the pool serves."""
    time, quarantines, states = context.time, scheduling.quarantines, saver.states
    cycles = make_loops(context, pool, store, fleet, registers, saver, scheduling)
    samples = make_sample_scheduler(context, pool, store, fleet, registers, states, scheduling)
    deletions = Deletions(store, registers, states, fleet, cycles.by_model, quarantines, time)
    drained = [row.worker_id for row in store.drained_workers.all()]
    housekeeping = Housekeeping(context.config, time, store, registers, states, samples, scheduling.accounts)
    return Runners(
        cycles=cycles,
        samples=samples,
        supervisor=Supervisor(
            context.config,
            pool,
            time,
            fleet,
            registers.registry,
            scheduling.losses,
            samples,
            tasks,
            base_weights,
            drained,
        ),
        deletions=deletions,
        housekeeping=housekeeping,
        tenant_deletions=TenantDeletions(
            context.config, time, store, registers, states, deletions, housekeeping, samples
        ),
        scheduling=scheduling,
    )

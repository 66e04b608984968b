"""Puts together the parts that run operations: per base model the cycle loop, and one scheduler of samples for all.

The one place that knows which signal wakes which receiver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.base.config import CoordinatorConfig
from coordinator.base.failure import Failure
from coordinator.base.time import Time
from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Committer
from coordinator.cycle.dispatch import Dispatch
from coordinator.cycle.items import ItemBuilder
from coordinator.cycle.journal import CycleJournal
from coordinator.cycle.loop import CycleLoop
from coordinator.cycle.phases import Phases
from coordinator.cycle.results import Results
from coordinator.fleet.fleet import Fleet
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.registry import AdapterRegistry
from coordinator.sampling.placement import Placement
from coordinator.sampling.scheduler import SampleQueue, SampleScheduler
from coordinator.sampling.versions import SamplerVersions
from coordinator.scheduling.budget import TokenBudget
from coordinator.scheduling.clock import CycleClock
from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.deadlines import Deadlines
from coordinator.scheduling.fair_queue import FairQueue
from coordinator.scheduling.losses import LossRecorder
from coordinator.scheduling.planning import Planning
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.ready_set import ReadySet
from coordinator.scheduling.virtual_counters import FairState
from coordinator.storage.store import Store
from workers.contract.protocols import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """The parts that all base models share."""

    config: CoordinatorConfig
    pool: Pool
    time: Time
    epoch: int
    store: Store
    fleet: Fleet
    registry: AdapterRegistry
    in_flight: InFlightTable
    saver: Saver
    journal: CycleJournal
    losses: LossRecorder
    quarantines: Mapping[str, Quarantine]
    fair: FairState
    failure: Failure


def assemble_loop(base_model: str, shared: SharedParts) -> CycleLoop:
    """Return the cycle loop of a base model."""
    config, time, fleet, saver = shared.config, shared.time, shared.fleet, shared.saver
    group, quarantine = shared.registry.group(base_model), shared.quarantines[base_model]
    costs = CycleCosts()
    clock = CycleClock(time, config.linger_s, costs, group.arrivals)
    snapshots = Snapshots(saver, time, config.replay_s_max)
    for signal in (group.changed, quarantine.changed, snapshots.changed, saver.publishing.changed):
        signal.subscribe(clock.wake)
    budget = TokenBudget(
        costs,
        base_model=base_model,
        chunk_tokens=fleet.models[base_model].chunk_tokens,
        tokens=config.cycle_tokens_max,
        cycle_s_max=config.cycle_s_max,
    )
    ready = ReadySet(group, quarantine, snapshots, saver.publishing)
    planning = Planning(base_model, ready, budget, costs, fleet, shared.fair)
    dispatch = Dispatch(shared.pool, time, shared.epoch, fleet, shared.losses, quarantine, Deadlines(costs))
    results = Results(saver, snapshots, fleet)
    items = ItemBuilder(shared.store, saver.folders)
    phases = Phases(planning, group, fleet, items, dispatch, results, snapshots, time)
    committer = Committer(planning, group, saver, shared.in_flight, fleet, shared.journal, time)
    return CycleLoop(clock, planning, phases, committer, shared.journal, group, snapshots, time)


def assemble_samples(shared: SharedParts) -> SampleScheduler:
    """Return the scheduler of all base models' samples."""
    queues = {
        base_model: SampleQueue(FairQueue(shared.fair.shares), quarantine)
        for base_model, quarantine in shared.quarantines.items()
    }
    samples = SampleScheduler(
        shared.pool,
        shared.store,
        shared.in_flight,
        SamplerVersions(shared.store, shared.registry, shared.saver),
        Placement(shared.fleet, shared.config.samples_per_worker_max),
        queues,
        shared.losses,
        shared.failure,
    )
    for quarantine in shared.quarantines.values():
        quarantine.changed.subscribe(samples.wake)
    shared.saver.publishing.changed.subscribe(samples.wake)
    return samples

"""Puts the scheduler of samples together, and subscribes it to the signals that wake it. Schedules no sample itself."""

from __future__ import annotations

from coordinator.checkpoints.states import States
from coordinator.fleet.fleet import Fleet
from coordinator.operations.epoch import Context, Registers
from coordinator.sampling.fair_queue import SampleQueues
from coordinator.sampling.placement import Placement, SamplerVersions
from coordinator.sampling.sample import SampleCommits, TokenStreams
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.scheduling.schedule import Scheduling
from coordinator.storage.store import Store
from workers.contract.protocols import Pool


def make_sample_scheduler(
    context: Context,
    pool: Pool,
    store: Store,
    fleet: Fleet,
    registers: Registers,
    states: States,
    scheduling: Scheduling,
) -> SampleScheduler:
    """Return the scheduler of all base models' samples."""
    streams = TokenStreams()
    samples = SampleScheduler(
        pool,
        SamplerVersions(store, fleet, registers.registry, states),
        Placement(fleet, context.config.samples_per_worker_max, scheduling.turns),
        SampleQueues(scheduling),
        SampleCommits(store, registers.in_flight, streams, registers.entries, registers.throughput),
        streams,
        scheduling.losses,
        context.failure,
        context.time,
    )
    fleet.changed.subscribe(samples.wake)
    for quarantine in scheduling.quarantines.values():
        quarantine.changed.subscribe(samples.wake)
    scheduling.probation.changed.subscribe(samples.wake)
    scheduling.accounts.changed.subscribe(samples.wake)
    states.publishing.changed.subscribe(samples.wake)
    return samples

"""Puts the cycle loops of all base models together. Makes no decision about cycles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.checkpoints.saver import Saver
from coordinator.cycle.commit import Committer, CycleJournal
from coordinator.cycle.dispatch import Dispatch
from coordinator.cycle.items import ItemBuilder
from coordinator.cycle.loop import CycleLoop
from coordinator.cycle.phases import Phases
from coordinator.cycle.results import Results
from coordinator.fleet.fleet import Fleet
from coordinator.operations.epoch import Context, Registers
from coordinator.scheduling.schedule import Scheduling
from coordinator.storage.store import Store
from workers.contract.protocols import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleLoops:
    """The loops of all base models, and the journal that they share."""

    journal: CycleJournal
    by_model: Mapping[str, CycleLoop]


def make_loops(
    context: Context,
    pool: Pool,
    store: Store,
    fleet: Fleet,
    registers: Registers,
    saver: Saver,
    scheduling: Scheduling,
) -> CycleLoops:
    """Return a loop for every base model that the pool serves."""
    time, journal, loops = context.time, CycleJournal(store.cycles, registers.throughput), {}
    for base_model, schedule in scheduling.schedules.items():
        group, planning, snapshots = registers.registry.group(base_model), schedule.planning, schedule.snapshots
        dispatch = Dispatch(
            pool, time, context.epoch, fleet, scheduling.losses, schedule.quarantine, schedule.deadlines
        )
        results = Results(saver, snapshots)
        items = ItemBuilder(store, saver.states.folders, registers.in_flight)
        classes = schedule.classes
        phases = Phases(planning, group.logs, fleet, items, dispatch, results, snapshots, journal, classes)
        committer = Committer(
            planning,
            group,
            saver,
            registers.in_flight,
            fleet,
            journal,
            time,
            classes,
            registers.entries,
            context.traces,
        )
        loops[base_model] = CycleLoop(schedule.clock, planning, phases, committer, journal, group, snapshots, time)
    return CycleLoops(journal=journal, by_model=loops)

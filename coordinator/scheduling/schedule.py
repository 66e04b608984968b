"""Puts scheduling together: a schedule for each base model, and the recorder of losses for all of them.

Subscribes each cycle clock to the signals that wake it. Makes no decision about cycles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.checkpoints.snapshots import Snapshots
from coordinator.checkpoints.states import States
from coordinator.fleet.fleet import Fleet
from coordinator.operations.epoch import Context
from coordinator.operations.registry import AdapterRegistry
from coordinator.scheduling.adapter_costs import Costs
from coordinator.scheduling.classes import Classes
from coordinator.scheduling.clock import CycleClock
from coordinator.scheduling.cost_model import CycleCosts, Deadlines, TokenBudget
from coordinator.scheduling.planner import Planning
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.ready_set import ReadySet
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.scheduling.virtual_counters import FairState
from coordinator.scheduling.worker_losses import LossRecorder
from coordinator.scheduling.worker_memory import WorkerMemory
from coordinator.storage.workers import WorkerClasses
from coordinator.tenants.accounts import Accounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The parts that schedule the cycles of one base model."""

    clock: CycleClock
    planning: Planning
    quarantine: Quarantine
    turns: SoloTurns
    deadlines: Deadlines
    snapshots: Snapshots
    classes: Classes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """The schedules of all base models."""

    schedules: Mapping[str, Schedule]
    """By base model."""
    losses: LossRecorder
    fair: FairState
    """Every tenant's weight and virtual counter when this epoch began."""
    probation: Probation
    accounts: Accounts

    @property
    def quarantines(self) -> Mapping[str, Quarantine]:
        """The quarantine of each base model."""
        return {base_model: schedule.quarantine for base_model, schedule in self.schedules.items()}

    @property
    def turns(self) -> Mapping[str, SoloTurns]:
        """The solo turns of each base model."""
        return {base_model: schedule.turns for base_model, schedule in self.schedules.items()}


def make_scheduling(
    context: Context,
    fleet: Fleet,
    registry: AdapterRegistry,
    states: States,
    fair: FairState,
    probation: Probation,
    accounts: Accounts,
    worker_classes: WorkerClasses,
) -> Scheduling:
    """Return the schedules of every base model that the pool serves."""

    def make(base_model: str) -> Schedule:
        config, time, group, costs = context.config, context.time, registry.group(base_model), CycleCosts()
        quarantine, snapshots = Quarantine(), Snapshots(states, time, config.replay_s_max)
        clock = CycleClock(time, config.linger_s, costs, group.arrivals)
        of_model = (group.changed, quarantine.changed, snapshots.changed)
        for signal in (*of_model, fleet.changed, states.publishing.changed, probation.changed, accounts.changed):
            signal.subscribe(clock.wake)
        budget = TokenBudget(
            costs,
            base_model=base_model,
            chunk_tokens=fleet.models[base_model].chunk_tokens,
            tokens=config.cycle_tokens_max,
            cycle_s_max=config.cycle_s_max,
        )
        classes = Classes(base_model, fleet, time, config.class_wait_s, worker_classes)
        classes.changed.subscribe(clock.wake)
        is_held, publishing, item_costs = accounts.is_held, states.publishing, Costs(base_model, fleet)
        turns = SoloTurns(base_model, probation, group, fleet, classes, is_held)
        memory = WorkerMemory(base_model, fleet, group, quarantine, snapshots, publishing, classes, is_held)
        ready = ReadySet(group, quarantine, turns, memory, snapshots, publishing, item_costs, is_held)
        return Schedule(
            clock=clock,
            planning=Planning(base_model, ready, budget, costs, fleet, fair, turns, memory),
            quarantine=quarantine,
            turns=turns,
            deadlines=Deadlines(costs),
            snapshots=snapshots,
            classes=classes,
        )

    schedules = {base_model: make(base_model) for base_model in fleet.models}
    quarantines = {base_model: schedule.quarantine for base_model, schedule in schedules.items()}
    turns = {base_model: schedule.turns for base_model, schedule in schedules.items()}
    losses = LossRecorder(fleet, registry, quarantines, turns, probation, states.publishing, context.time)
    return Scheduling(schedules=schedules, losses=losses, fair=fair, probation=probation, accounts=accounts)

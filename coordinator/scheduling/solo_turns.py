"""The solo turns of tenants on probation: one adapter's operation or one sample at a time, alone on one worker.

The *solo worker*, on which the turns run, is the one with the fewest adapters of others. A turn is granted to an
adapter or a sample. From then on nothing of others begins on the solo worker. The turn begins at a boundary between two
cycles, once nothing of others is in flight there. It ends with the next cycle or with the sample, or when the worker is
lost. Others go on elsewhere; they are placed on the solo worker only if there is no other, or if it has had no turn for
`KEPT_S`. If others use it as well, the next turn begins only `REST_FACTOR` times the length of the last one after its
end, so that they have three quarters of its time at least.

Depends on the probation, the fleet and the adapters of one base model; not on how a plan is run. Main invariants: at
most one turn is granted; while it runs, its worker has nothing else in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from coordinator.fleet.fleet import Fleet
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.classes import Classes
from coordinator.scheduling.probation import Probation

REST_FACTOR = 3.0
"""The time that others have on the solo worker between two turns, by the length of the first of them."""
KEPT_S = 60.0
"""Seconds after its last turn for which adapters and samples of others are placed elsewhere."""


@dataclass(slots=True)
class _Turn:
    """A turn that was granted."""

    name: str
    """The adapter, or the sample's operation."""
    tenant_id: str
    worker_id: str
    is_sample: bool
    granted_s: float
    """Service time from which on nothing of others began on the worker."""
    is_running: bool = False
    charged_s: float = 0.0
    """Seconds of a lost turn that were charged; 0: its cost is not known yet."""


class SoloTurns:
    """The turns of one base model."""

    def __init__(
        self,
        base_model: str,
        probation: Probation,
        group: AdapterGroup,
        fleet: Fleet,
        classes: Classes,
        is_suspended: Callable[[str], bool],
    ) -> None:
        """`is_suspended` returns whether a tenant's queued work waits."""
        self._is_suspended = is_suspended
        self._base_model = base_model
        self._probation = probation
        self._group = group
        self._fleet = fleet
        self._classes = classes
        self._turn: _Turn | None = None
        self._samples: dict[str, str] = {}
        """Samples that ask for a turn, and their tenants."""
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}
        """Tenant to the number of its last turn."""
        self._worker, self._kept_until_s, self._rest_until_s = "", 0.0, 0.0
        self._lost: dict[str, _Turn] = {}
        """Turns that lost their worker, until that is replaced or removed, by worker."""
        self._charges: list[tuple[str, float]] = []
        self._is_paused = False

    def pause(self, *, is_paused: bool) -> None:
        """Begin no turn while a worker is missing, since a kill might leave no worker; or end that pause."""
        self._is_paused = is_paused
        if is_paused and self._turn is not None and not self._turn.is_running:
            self._end(self._turn, can_rest=False)

    # ---- questions of planning and placement

    @property
    def are_idle(self) -> bool:
        """Whether no tenant was put on probation and no turn is granted: then no adapter is held."""
        return self._turn is None and self._probation.is_empty

    @property
    def reserved(self) -> str:
        """The worker on which nothing of others may begin; empty: none."""
        return self._turn.worker_id if self._turn is not None else ""

    @property
    def avoided(self) -> str:
        """The worker on which others are placed only if there is no other; empty: none."""
        return self.reserved or (self._worker if self._probation.now() < self._kept_until_s else "")

    def has_turn(self, name: str) -> bool:
        """Return whether the turn of this adapter or sample runs."""
        return self._turn is not None and self._turn.is_running and self._turn.name == name

    def is_held(self, log: AdapterLog) -> bool:
        """Return whether the adapter runs in its turns only."""
        return self._probation.has(log.tenant_id) or self.has_turn(log.adapter_id)

    def leaves_room(self, log: AdapterLog) -> bool:
        """Return whether an adapter that is not held has a worker besides the reserved one."""
        if self._turn is None:
            return True
        if log.home:
            return log.home != self.reserved
        closed = self._classes.others(log) | {self.reserved}
        return any(each.info.worker_id not in closed for each in self._fleet.available(self._base_model))

    def workers_for(self, log: AdapterLog, residents: Mapping[str, int]) -> dict[str, int]:
        """Return the workers on which an adapter without a copy may be placed, of those with these residents."""
        if self.has_turn(log.adapter_id):
            return {worker: number for worker, number in residents.items() if worker == self.reserved}
        closed = self._classes.others(log)
        residents = {worker: number for worker, number in residents.items() if worker not in closed}
        others = {worker: number for worker, number in residents.items() if worker != self.avoided}
        return others or {worker: number for worker, number in residents.items() if worker != self.reserved}

    def may_sample(self, tenant_id: str, name: str) -> bool:
        """Return whether a queued sample may start; note that it asks for a turn, if it needs one."""
        if self.has_turn(name):
            return True
        if not self._probation.has(tenant_id):
            return True
        if name not in self._samples:
            self._samples[name] = tenant_id
            self._probation.changed.notify()
        return False

    @property
    def sample(self) -> str:
        """The sample whose turn runs; empty: none, or its tenant is suspended."""
        turn = self._turn
        if turn is None or not turn.is_sample or not turn.is_running or self._is_suspended(turn.tenant_id):
            return ""
        return turn.name

    def may_place(self, name: str, worker_id: str) -> bool:
        """Return whether a sample may be sent to the worker."""
        return worker_id == self.reserved if self.has_turn(name) else worker_id != self.reserved

    def take_charges(self) -> list[tuple[str, float]]:
        """Return tenants and the seconds of a worker that their losses cost, since the last call."""
        charges, self._charges = self._charges, []
        return charges

    # ---- turns

    def update(self, can_run: Callable[[AdapterLog], bool], held_back: Collection[str] = ()) -> None:
        """Grant, begin and withdraw turns, between two cycles.

        `can_run`: whether a ready adapter has what it needs. `held_back`: adapters that wait for a late worker.
        """
        if self.are_idle:
            return
        if self._turn is not None and not self._is_wanted(self._turn, can_run):
            self._end(self._turn, can_rest=False)
        if self._turn is None and not self._is_paused:
            self._turn = self._granted(can_run, held_back)
        if self._turn is not None and not self._turn.is_running and self._is_clear(self._turn.worker_id):
            self._begin(self._turn, can_run)

    def end_cycle(self) -> list[str]:
        """End the turn of an adapter that was in the cycle; return it if it has run all that it had then."""
        turn = self._turn
        if turn is None or turn.is_sample or not turn.is_running or turn.worker_id in self._fleet.away:
            return []
        self._end(turn)
        log = self._group.logs.get(turn.name)
        if log is None or log.copy.cursor < log.quarantined[1]:
            return []
        log.release()
        return [turn.name]

    def end_sample(self, name: str) -> None:
        """End the turn of a sample that is decided, or its wait for one."""
        self._samples.pop(name, None)
        if self._turn is not None and self._turn.name == name:
            self._end(self._turn)

    def freed(self, worker_id: str) -> None:
        """Record that a worker has a sample less: a turn may wait for that."""
        if self._turn is not None and not self._turn.is_running and self._is_clear(worker_id):
            self._probation.changed.notify()

    def lose(self, worker_id: str) -> bool:
        """End the turn of a worker that was lost; return whether it was running."""
        turn = self._turn
        if turn is None or turn.worker_id != worker_id or not turn.is_running:
            return False
        self._lost[worker_id] = turn
        self._end(turn)
        return True

    def settled(self, worker_id: str) -> None:
        """Charge a loss to the tenant whose turn it was: its worker is replaced, or is to be removed."""
        self.not_replaced(worker_id)
        self._lost.pop(worker_id, None)

    def not_replaced(self, worker_id: str) -> None:
        """Charge what a loss has cost so far to the tenant whose turn it was: its worker is not replaced yet."""
        if (turn := self._lost.get(worker_id)) is not None:
            seconds = self._probation.now() - turn.granted_s
            self._probation.record_cost(turn.tenant_id, seconds)
            self._charges.append((turn.tenant_id, seconds - turn.charged_s))
            turn.charged_s = seconds

    def _granted(self, can_run: Callable[[AdapterLog], bool], held_back: Collection[str]) -> _Turn | None:
        """Return the next turn: of the tenant whose last one is longest ago."""
        samples = self._samples.items()
        asking = [(name, tenant_id, True) for name, tenant_id in samples if not self._is_suspended(tenant_id)]
        ready = [log for log in self._group.dirty.values() if can_run(log) and log.adapter_id not in held_back]
        asking += [(log.adapter_id, log.tenant_id, False) for log in ready if log.home not in self._fleet.away]
        candidates = [
            (self._last_turns.get(tenant_id, 0), index)
            for index, (_, tenant_id, _) in enumerate(asking)
            if self._probation.has(tenant_id) and not self._probation.is_backing_off(tenant_id)
            if all(tenant_id != lost.tenant_id or lost.charged_s for lost in self._lost.values())
        ]
        if not candidates:
            return None
        name, tenant_id, is_sample = asking[min(candidates)[1]]
        worker_id = self._chosen_worker(frozenset() if is_sample else self._classes.others(self._group.logs[name]))
        now = self._probation.now()
        if not worker_id or (now < self._rest_until_s and self._num_others(worker_id)):
            return None
        self._num_turns += 1
        self._last_turns[tenant_id] = self._num_turns
        self._samples.pop(name, None)
        self._worker, self._kept_until_s = worker_id, now + KEPT_S
        return _Turn(name=name, tenant_id=tenant_id, worker_id=worker_id, is_sample=is_sample, granted_s=now)

    def _begin(self, turn: _Turn, can_run: Callable[[AdapterLog], bool]) -> None:
        if not turn.is_sample:
            log = self._group.logs[turn.name]
            if log.home not in ("", turn.worker_id):
                log.lose_copy()
                if not can_run(log):
                    self._end(turn, can_rest=False)
                    return
            log.run_singly()
        turn.is_running = True
        self._probation.changed.notify()

    def _end(self, turn: _Turn, *, can_rest: bool = True) -> None:
        now = self._probation.now()
        self._turn = None
        if can_rest:
            self._kept_until_s = now + KEPT_S
            self._rest_until_s = now + REST_FACTOR * (now - turn.granted_s)
            self._probation.wake_at(self._rest_until_s)
        self._probation.changed.notify()

    def _is_wanted(self, turn: _Turn, can_run: Callable[[AdapterLog], bool]) -> bool:
        """Return whether a turn may go on: a sample ends its own turn.

        What is in flight keeps its turn, whatever its adapter waits for: a loss of its worker is charged to the turn.
        """
        worker = self._fleet.find(turn.worker_id)
        if worker is None:
            return False
        in_flight = {*worker.samples, *(flight.target_id for flight in worker.training)}
        if turn.is_running and turn.name in in_flight:
            return True
        if worker.is_draining or (turn.is_sample and self._is_suspended(turn.tenant_id)):
            return False
        if turn.is_running and turn.is_sample:
            return True
        if not self._probation.has(turn.tenant_id) and not turn.is_running:
            return False
        log = self._group.dirty.get(turn.name)
        return turn.is_sample or (log is not None and can_run(log))

    def _chosen_worker(self, excluded: frozenset[str]) -> str:
        """Return the solo worker while it is kept, else the one with the fewest adapters of others; empty: none."""
        available = [worker.info.worker_id for worker in self._fleet.available(self._base_model)]
        available = [worker_id for worker_id in available if worker_id not in excluded]
        if self._worker in available and self._probation.now() < self._kept_until_s:
            return self._worker
        return min(available, key=lambda worker: (self._num_others(worker), worker), default="")

    def _num_others(self, worker_id: str) -> int:
        """Return the adapters of tenants that are not on probation, with a copy there, and their samples there."""
        tenants = [self._group.logs[adapter_id].tenant_id for adapter_id in self._group.residency.on(worker_id)]
        tenants += [flight.tenant_id for flight in self._fleet.worker(worker_id).samples.values()]
        return sum(not self._probation.has(tenant_id) for tenant_id in tenants)

    def _is_clear(self, worker_id: str) -> bool:
        worker = self._fleet.find(worker_id)
        return worker is not None and worker.is_clear and not worker.is_away

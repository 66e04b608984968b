"""What an administrator knows of each tenant: whether it may call, and what may run of it.

Clients compare each admitted and each refused call with it, workers what is sent to them. Does not depend on how the
administrator acts. Raises ContractViolation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from coordinator.base.errors import ServiceError
from coordinator.coordinator import Coordinator
from tests.simulation.world import World

SAMPLES_STOP_S = 30.0
"""Seconds after a suspension within which samples that were given to a worker before may begin there: their weights are
sent first, and the worker may hang meanwhile."""


class ContractViolation(AssertionError):
    """The service broke one of its promises."""


class State(Enum):
    """What the administrator did last."""

    ACTIVE = auto()
    CHANGING = auto()
    """A suspension, resumption or deletion was sent and its response has not arrived: it may have happened."""
    SUSPENDED = auto()
    DELETED = auto()
    """Its deletion was acknowledged; the tenant may be there, but must not call."""


@dataclass(slots=True)
class _Suspension:
    cycle_id: int
    """The last cycle that may have begun before it; 0: none in this epoch."""
    since_s: float


class Standings:
    """The standing of every tenant, by name."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._states: dict[str, State] = {}
        self._suspensions: dict[str, _Suspension] = {}
        """By tenant id."""
        self._begun: set[str] = set()
        """Operations that were sent to workers in this epoch."""
        self._classes: dict[str, str] = {}
        """Adapter to the class in which it ran last."""
        self._coordinator: Coordinator

    def begin_epoch(self, coordinator: Coordinator) -> None:
        """Continue with another coordinator, for which nothing of a suspended tenant has begun."""
        self._coordinator = coordinator
        self._begun.clear()
        for tenant_id in self._suspensions:
            self._suspensions[tenant_id] = _Suspension(0, -math.inf)

    def changing(self, name: str) -> None:
        """Record that a change of a tenant is sent now."""
        self._states[name] = State.CHANGING
        if (row := self._coordinator.core.store.tenants.named(name)) is not None:
            self._suspensions.pop(row.tenant_id, None)

    def changed(self, name: str, state: State) -> None:
        """Record that the response to a change has arrived."""
        self._states[name] = state
        if state is State.SUSPENDED:
            row = self._coordinator.core.store.tenants.named(name)
            assert row is not None
            last = self._coordinator.core.journal._last_id  # private: nothing else says which cycle may be planned
            self._suspensions[row.tenant_id] = _Suspension(last, self._world.time())

    def check_admitted(self, name: str) -> None:
        """Check that a call of a tenant may have been admitted now."""
        if self._states.get(name) in (State.SUSPENDED, State.DELETED):
            raise ContractViolation(f"a call of {name}, which is {self._states[name].name}, was admitted")
        if self.is_gone(name):
            raise ContractViolation(f"a call of {name}, whose deletion is complete, was admitted")

    def check_refused(self, name: str, error: ServiceError) -> None:
        """Check that a call of a tenant may have been refused, or ended, because it is suspended or deleted."""
        state = self._states.get(name, State.ACTIVE)
        if state is State.ACTIVE or (error.reason == "TENANT_DELETED" and state is State.SUSPENDED):
            raise ContractViolation(f"a call of {name}, which is {state.name}, was refused: {error.reason}")
        self._world.work[f"calls refused: {error.reason}"] += 1

    def is_gone(self, name: str) -> bool:
        """Return whether a tenant's deletion was sent and is complete, so that its keys are unknown."""
        is_deleted = self._states.get(name) in (State.CHANGING, State.DELETED)
        return is_deleted and self._coordinator.core.store.tenants.named(name) is None

    def check_batch(self, cycle_id: int, operations: frozenset[str]) -> None:
        """Check that a cycle begins no operation of a tenant that was suspended before the cycle."""
        for name in operations - self._begun if self._suspensions else ():
            suspension = self._suspensions.get(self._owner(name))
            if suspension is not None and cycle_id > suspension.cycle_id and not self._is_rematerialized(name):
                raise ContractViolation(f"{name} of a suspended tenant begins in cycle {cycle_id}")
        self._begun |= operations

    def check_classes(self, adapter_ids: Iterable[str], fingerprint: str) -> None:
        """Check that adapters run on workers of their class alone."""
        logs = self._coordinator.core.registry.logs
        for log in (logs[each] for each in adapter_ids if each in logs):
            if log.fingerprint != fingerprint:
                raise ContractViolation(f"{log.adapter_id}, of class {log.fingerprint!r}, runs in {fingerprint!r}")
            if self._classes.setdefault(log.adapter_id, fingerprint) != fingerprint:
                self._world.fault("adapter changes its class", log.adapter_id)
                self._classes[log.adapter_id] = fingerprint

    def check_sample(self, name: str) -> None:
        """Check that no sample of a suspended tenant begins."""
        suspension = self._suspensions.get(self._owner(name)) if self._suspensions else None
        if (
            suspension is not None
            and name not in self._begun
            and self._world.time() > suspension.since_s + SAMPLES_STOP_S
        ):
            raise ContractViolation(f"{name}, a sample of a suspended tenant, begins")
        self._begun.add(name)

    def _is_rematerialized(self, name: str) -> bool:
        """Return whether an operation is replayed for weights that others may sample."""
        adapter_id, _, seq = name.rpartition(":")
        core = self._coordinator.core
        operation = core.admission.find(adapter_id, int(seq))
        needs_log = core.states.publishing.must_rematerialize(adapter_id)
        return needs_log and operation is not None and operation.is_committed

    def _owner(self, name: str) -> str:
        target_id, _, seq = name.rpartition(":")
        return self._coordinator.core.admission.owner(target_id, int(seq)) or ""

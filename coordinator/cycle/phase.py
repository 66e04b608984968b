"""A running cycle: its decided operations and states so far, and the items that a phase sends to the workers.

Data only; makes no decisions. Main invariant: an item belongs to one generation of its adapter's copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.checkpoints.staging import StagedStates
from coordinator.fleet.worker import Flight
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Operation
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import AdapterInstall, Item, ItemResult


@dataclass(frozen=True, slots=True)
class Entry:
    """An item on its way to its adapter's worker."""

    log: AdapterLog
    generation: int
    """The generation of the copy that the item was built for; the result is dropped if the copy has another one."""
    operation: Operation | None
    """None: the item is a snapshot for recovery."""
    item: Item

    @property
    def is_current(self) -> bool:
        """Whether the copy that the item was built for is still the adapter's copy."""
        return self.log.copy.generation == self.generation


@dataclass(slots=True)
class Cycle:
    """The running cycle; id 0: no cycle, only operations that were decided without one."""

    cycle_id: int
    started_wall: float
    started: float
    pass_ended: float = 0.0
    steps_ended: float = 0.0
    finished: list[Operation] = field(default_factory=list)
    """Decided operations, to be committed."""
    entries: dict[str, pool_pb2.CycleEntry] = field(default_factory=dict)
    """The adapters' parts in the cycle, by adapter id."""
    staged: StagedStates = field(default_factory=StagedStates)
    published: list[tuple[str, str, Operation]] = field(default_factory=list)
    """Saves that published weights, which their worker holds since: worker, incarnation, operation."""

    def end_pass(self, now: float) -> None:
        """Record the end of the pass."""
        self.pass_ended = now

    def end_steps(self, now: float) -> None:
        """Record the end of the step phase."""
        self.steps_ended = now

    def finish(self, operations: Iterable[Operation]) -> None:
        """Commit these decided operations with the cycle."""
        self.finished += operations

    def count(self, log: AdapterLog, worker_id: str, result: ItemResult) -> pool_pb2.CycleEntry:
        """Count a result in the adapter's part of the cycle, and return that part.

        Its `tenant` is the tenant's id until the cycle is shown to a user.
        """
        if log.adapter_id not in self.entries:
            self.entries[log.adapter_id] = pool_pb2.CycleEntry(
                adapter_id=log.adapter_id, tenant=log.tenant_id, worker_id=worker_id
            )
        entry = self.entries[log.adapter_id]
        entry.num_tokens += result.num_tokens
        return entry

    def as_message(self, base_model: str) -> pool_pb2.Cycle:
        """Return the cycle as the contract's message."""
        message = pool_pb2.Cycle(
            cycle_id=self.cycle_id,
            base_model=base_model,
            pass_seconds=self.pass_ended - self.started,
            step_seconds=self.steps_ended - self.pass_ended,
            entries=self.entries.values(),
        )
        message.start_time.FromNanoseconds(int(self.started_wall * 1e9))
        return message


class PhaseWork:
    """The items and copies that one phase of a cycle sends to the workers."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}
        self._installs: dict[str, list[tuple[AdapterLog, int, AdapterInstall]]] = {}
        self._expected: dict[str, list[str]] = {}

    def add(self, log: AdapterLog, operation: Operation | None, item: Item) -> None:
        """Send an item to the worker of the adapter's copy."""
        self._entries.setdefault(log.worker_id, []).append(Entry(log, log.copy.generation, operation, item))

    def install(self, log: AdapterLog, install: AdapterInstall) -> None:
        """Send a copy of the adapter to the worker where it was just placed."""
        self._installs.setdefault(log.worker_id, []).append((log, log.copy.generation, install))

    def expect(self, log: AdapterLog) -> None:
        """Add a hint for the worker: the next phase is likely to have this adapter."""
        self._expected.setdefault(log.worker_id, []).append(log.adapter_id)

    def worker_ids(self) -> list[str]:
        """Return the workers that get copies or items."""
        return list(dict.fromkeys((*self._installs, *self._entries)))

    def entries(self, worker_id: str) -> list[Entry]:
        """Return the items for a worker whose copies are still current."""
        return [entry for entry in self._entries.get(worker_id, ()) if entry.is_current]

    def installs(self, worker_id: str) -> tuple[AdapterInstall, ...]:
        """Return the copies for a worker that are still current."""
        found = self._installs.get(worker_id, ())
        return tuple(install for log, generation, install in found if log.copy.generation == generation)

    def expected(self, worker_id: str) -> tuple[str, ...]:
        """Return the adapters that the worker may load ahead."""
        return tuple(self._expected.get(worker_id, ()))


def flights(entries: Iterable[Entry]) -> tuple[Flight, ...]:
    """Return the operations of these items as records for the fleet."""
    return tuple(
        Flight(entry.operation.name, entry.log.adapter_id, entry.operation.seq, entry.log.tenant_id)
        for entry in entries
        if entry.operation is not None
    )

"""A cycle under way: what it has done so far, and what one of its phases sends to the workers. Data, no decisions."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.operation import Operation
from coordinator.storage.cycles import CycleCommit
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import AdapterInstall, Batch, Item

Entry = tuple[AdapterQueue, Operation | None, Item]
"""An item on its way to its adapter's worker; no operation: the item is ours (a snapshot)."""


@dataclass(slots=True)
class Running:
    """The cycle that is under way."""

    cycle_id: int
    started_wall: float
    started: float
    pass_ended: float = 0.0
    step_ended: float = 0.0
    finished: list[Operation] = field(default_factory=list)
    entries: dict[str, pool_pb2.CycleEntry] = field(default_factory=dict)
    commit: CycleCommit = field(default_factory=CycleCommit)
    published: list[tuple[str, Operation]] = field(default_factory=list)
    """Saves whose weights a worker holds since."""

    def entry(self, adapter: AdapterQueue) -> pool_pb2.CycleEntry:
        """The adapter's part in the cycle; `tenant` holds the tenant's id until it is shown to somebody."""
        if adapter.adapter_id not in self.entries:
            self.entries[adapter.adapter_id] = pool_pb2.CycleEntry(
                adapter_id=adapter.adapter_id, tenant=adapter.tenant_id, worker_id=adapter.worker_id
            )
        return self.entries[adapter.adapter_id]


class Work:
    """What one phase of a cycle sends to its workers."""

    def __init__(self) -> None:
        self.items: dict[str, list[Entry]] = {}
        self.installs: dict[str, list[AdapterInstall]] = {}
        self.expected: dict[str, list[str]] = {}

    def add(self, adapter: AdapterQueue, operation: Operation | None, item: Item) -> None:
        """An item for the adapter's worker."""
        self.items.setdefault(adapter.worker_id, []).append((adapter, operation, item))

    def expect(self, adapter: AdapterQueue) -> None:
        """The adapter is not in this phase, but the next is likely to have it: a hint for its worker."""
        self.expected.setdefault(adapter.worker_id, []).append(adapter.adapter_id)

    def batches(
        self,
        epoch: int,
        cycle_id: int,
        take_removals: Callable[[str], tuple[str, ...]],
        decode_share: Callable[[str, Collection[str]], float],
    ) -> dict[str, Batch]:
        """One batch per worker. `decode_share` is given the worker and the tenants of its batch."""
        return {
            worker_id: Batch(
                epoch=epoch,
                cycle_id=cycle_id,
                installs=tuple(self.installs.get(worker_id, ())),
                removals=take_removals(worker_id),
                items=tuple(item for _, _, item in self.items.get(worker_id, ())),
                decode_share=decode_share(worker_id, {a.tenant_id for a, _, _ in self.items.get(worker_id, ())}),
                expected=tuple(self.expected.get(worker_id, ())),
            )
            for worker_id in self.installs | self.items
        }

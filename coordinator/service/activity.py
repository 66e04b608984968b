"""What tenants do at the moment: their queue with what it waits for, their running adapters, their tokens a second.

Computed when it is asked for, in a walk over the operations in flight; a long walk is made in slices, and serves all
callers of a second. Main invariant: of other tenants a member sees one row for all, with what follows from the totals
of the pool and from its cycles.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.observe.throughput import by_tenant
from coordinator.operations.operation import Kind, Operation
from coordinator.runtime.core import Core
from coordinator.service.access import UseCases
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import pool_pb2 as pb
from tinkerpool.v1.history_pb2 import WAIT_REASON_ORDER, WaitReason

RUNNING_SHOWN_MAX = 100
"""Running adapters in one response."""
SLICE_OPERATIONS = 256
"""Operations that are read at a time, in one or two milliseconds: other calls run between two slices."""
KEPT_S = 1.0
"""Seconds for which the queues are kept, if there was more than one slice."""


@dataclass(slots=True)
class Queue:
    """The operations of one tenant without a committed outcome."""

    oldest: float
    """When the oldest of them was accepted, in service time."""
    num_queued: int = 0
    num_running: int = 0
    running: dict[str, tuple[str, Kind]] = field(default_factory=dict)
    """Adapter to the name and kind of the first of its running operations."""
    waiting: Counter[WaitReason.ValueType] = field(default_factory=Counter)


Queues = Mapping[str, Queue]
"""Of the tenants that have such operations, by id."""


class ActivityUseCases(UseCases):
    """The part of the pool's status that is about tenants."""

    def __init__(self, core: Core, authenticator: Authenticator) -> None:
        super().__init__(core, authenticator)
        self._queues: Queues = {}
        self._queues_end = 0.0
        """Service time until which they are kept."""
        self._reading = asyncio.Lock()

    async def _current_queues(self) -> Queues:
        """Return the queues of now, or those of the last second where they have more operations than a slice."""
        async with self._reading:
            if self._core.time.monotonic() >= self._queues_end:
                operations = list(self._core.in_flight.all())
                self._queues = await self._read_queues(operations)
                kept_s = KEPT_S if len(operations) > SLICE_OPERATIONS else 0.0
                self._queues_end = self._core.time.monotonic() + kept_s
            return self._queues

    async def _read_queues(self, operations: Sequence[Operation]) -> Queues:
        queues, first_seqs = dict[str, Queue](), dict[str, int]()
        async for part in _slices(operations):
            for operation in part:
                if not operation.is_final:
                    first = first_seqs.setdefault(operation.target_id, operation.seq)
                    first_seqs[operation.target_id] = min(first, operation.seq)
        async for part in _slices(operations):
            for operation in part:
                self._count(operation, queues, first_seqs)
        return queues

    def _count(self, operation: Operation, queues: dict[str, Queue], first_seqs: Mapping[str, int]) -> None:
        """Count an operation in its tenant's queue. `first_seqs`: adapter to its first undecided operation."""
        arrived = operation.timeline.arrived
        arrived = self._core.started_at if arrived is None else arrived
        queue = queues.setdefault(operation.tenant_id, Queue(arrived))
        queue.oldest = min(queue.oldest, arrived)
        if operation.is_final or self._is_running(operation):
            queue.num_running += 1
            if operation.target_id in self._core.registry.logs:
                queue.running.setdefault(operation.target_id, (operation.name, operation.kind))
            return
        queue.num_queued += 1
        if operation.kind is not Kind.SAMPLE and operation.seq > first_seqs.get(operation.target_id, operation.seq):
            queue.waiting[WAIT_REASON_ORDER] += 1
        elif (clock := self._wait_clock(operation)) is not None:
            queue.waiting[clock.reason] += 1

    def _tenants(self, principal: Principal, queues: Queues) -> list[pb.TenantActivity]:
        """Return the rows of the tenants that the caller may see, by name; a member's last one is of all others."""
        throughput, now = self._core.throughput, self._core.time.monotonic()
        trained, sampled = by_tenant(throughput.trained()), by_tenant(throughput.sampled())
        shown, others = [], pb.TenantActivity()
        for tenant_id in queues.keys() | trained.keys() | sampled.keys():
            queue = queues.get(tenant_id, Queue(now))
            if not (principal.is_admin or tenant_id == principal.tenant_id):
                others.num_queued += queue.num_queued
                others.num_running += queue.num_running
                others.trained_tokens_per_second += trained.get(tenant_id, 0.0)
                continue
            row = pb.TenantActivity(
                tenant=self._tenant_name(tenant_id),
                num_queued=queue.num_queued,
                num_running=queue.num_running,
                num_running_adapters=len(queue.running),
                oldest_seconds=now - queue.oldest,
                trained_tokens_per_second=trained.get(tenant_id, 0.0),
                sampled_tokens_per_second=sampled.get(tenant_id, 0.0),
            )
            for reason, number in queue.waiting.most_common():
                row.waiting.add(reason=reason, num_operations=number)
            shown.append(row)
        shown.sort(key=lambda each: each.tenant)
        return [*shown, others] if others != pb.TenantActivity() else shown

    def _running_adapters(self, principal: Principal, queues: Queues) -> list[pb.RunningAdapter]:
        """Return the first running adapters that the caller may see, by tenant and id."""
        shown = [
            pb.RunningAdapter(
                adapter_id=adapter_id, tenant=tenant, worker_id=log.home, operation=operation, kind=kind.wire
            )
            for tenant_id, queue in queues.items()
            if queue.running and (principal.is_admin or tenant_id == principal.tenant_id)
            for tenant in [self._tenant_name(tenant_id)]
            for adapter_id, (operation, kind) in queue.running.items()
            if (log := self._core.registry.get(adapter_id)) is not None
        ]
        return sorted(shown, key=lambda each: (each.tenant, each.adapter_id))[:RUNNING_SHOWN_MAX]

    def _tenant_name(self, tenant_id: str) -> str:
        row = self._core.store.tenants.get(tenant_id)
        return row.name if row is not None else ""


async def _slices(operations: Sequence[Operation]) -> AsyncGenerator[Sequence[Operation], None]:
    for start in range(0, len(operations), SLICE_OPERATIONS):
        if start:
            await asyncio.sleep(0)
        yield operations[start : start + SLICE_OPERATIONS]

"""What tenants do at the moment: their queue with what it waits for, their running adapters, their tokens a second.

Computed when it is asked for, in a walk over the operations in flight. Main invariant: of other tenants a member sees
one row for all, with what follows from the totals of the pool and from its cycles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.observe.throughput import by_tenant
from coordinator.operations.operation import Kind, Operation
from coordinator.service.access import UseCases
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import pool_pb2 as pb
from tinkerpool.v1.history_pb2 import WAIT_REASON_ORDER, WaitReason

RUNNING_SHOWN_MAX = 100
"""Running adapters in one response."""


@dataclass(slots=True)
class Queue:
    """The operations of one tenant without a committed outcome."""

    oldest: float
    """When the oldest of them was accepted, in service time."""
    num_queued: int = 0
    num_running: int = 0
    running: dict[str, Operation] = field(default_factory=dict)
    """Adapter to the first of its running operations."""
    waiting: Counter[WaitReason.ValueType] = field(default_factory=Counter)


Queues = Mapping[str, Queue]
"""Of the tenants that have such operations, by id."""


class ActivityUseCases(UseCases):
    """The part of the pool's status that is about tenants."""

    def _queues(self) -> Queues:
        in_flight, queues, first_seqs = self._core.in_flight.all(), dict[str, Queue](), dict[str, int]()
        for operation in in_flight:
            if not operation.is_final:
                first = first_seqs.setdefault(operation.target_id, operation.seq)
                first_seqs[operation.target_id] = min(first, operation.seq)
        for operation in in_flight:
            arrived = operation.timeline.arrived
            arrived = self._core.started_at if arrived is None else arrived
            queue = queues.setdefault(operation.tenant_id, Queue(arrived))
            queue.oldest = min(queue.oldest, arrived)
            if operation.is_final or self._is_running(operation):
                queue.num_running += 1
                if operation.target_id in self._core.registry.logs:
                    queue.running.setdefault(operation.target_id, operation)
                continue
            queue.num_queued += 1
            if operation.kind is not Kind.SAMPLE and operation.seq > first_seqs.get(operation.target_id, operation.seq):
                queue.waiting[WAIT_REASON_ORDER] += 1
            elif (clock := self._wait_clock(operation)) is not None:
                queue.waiting[clock.reason] += 1
        return queues

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
                adapter_id=adapter_id,
                tenant=self._tenant_name(tenant_id),
                worker_id=self._core.registry.logs[adapter_id].home,
                operation=operation.name,
                kind=operation.kind.wire,
            )
            for tenant_id, queue in queues.items()
            if principal.is_admin or tenant_id == principal.tenant_id
            for adapter_id, operation in queue.running.items()
        ]
        return sorted(shown, key=lambda each: (each.tenant, each.adapter_id))[:RUNNING_SHOWN_MAX]

    def _tenant_name(self, tenant_id: str) -> str:
        row = self._core.store.tenants.get(tenant_id)
        return row.name if row is not None else ""

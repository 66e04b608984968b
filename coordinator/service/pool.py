"""The state of the pool: workers, cycles, usage. Administrators see all tenants; others see them as counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from coordinator.base.config import VERSION
from coordinator.base.errors import unavailable
from coordinator.service.access import UseCases, streamed
from coordinator.tenants.principals import Principal
from tinkerpool.v1 import pool_pb2 as pb
from tinkerpool.v1.probation_pb2 import Probation


class PoolUseCases(UseCases):
    """PoolService."""

    async def get_pool_status(self, principal: Principal, request: pb.GetPoolStatusRequest) -> pb.GetPoolStatusResponse:
        """Return the workers, the numbers of operations, and the last cycles.

        A member sees of a worker how many of its own adapters live there, and not where it runs.
        """
        core = self._core
        num_running = sum(self._is_running(operation) for operation in core.in_flight.all())
        recent = core.journal.recent
        num_cycles = min(request.num_cycles or 20, len(recent)) if request.num_cycles >= 0 else 0
        cycles = list(recent)[len(recent) - num_cycles :]
        return pb.GetPoolStatusResponse(
            workers=[
                pb.Worker(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    base_model=worker.model.name,
                    pid=worker.pid if principal.is_admin else 0,
                    node=worker.node if principal.is_admin else "",
                    num_slots=worker.num_slots,
                    num_adapters=core.registry.num_on(
                        worker.worker_id, None if principal.is_admin else principal.tenant_id
                    ),
                    is_live=core.fleet.is_live(worker.worker_id),
                    device=worker.device,
                )
                for worker in core.pool.workers()
            ],
            num_queued=len(core.in_flight) - num_running,
            num_running=num_running,
            num_samples=core.samples.num_samples,
            cycles=[self._shown(principal, cycle) for cycle in cycles],
            version=VERSION,
            epoch=core.epoch,
            num_tenants=core.in_flight.num_tenants,
            uptime_seconds=core.time.monotonic() - core.started_at,
            probations=self._probations(principal),
            problem=core.store.database.problem(),
        )

    @streamed
    async def watch_cycles(
        self, principal: Principal, request: pb.WatchCyclesRequest
    ) -> AsyncGenerator[pb.WatchCyclesResponse, None]:
        """Yield every cycle that commits from now on."""
        with self._core.journal.watch() as queue:
            while (cycle := await queue.get()) is not None:
                yield pb.WatchCyclesResponse(cycle=self._shown(principal, cycle))
            raise unavailable("SHUTTING_DOWN", "the pool is shutting down")

    async def get_usage(self, principal: Principal, request: pb.GetUsageRequest) -> pb.GetUsageResponse:
        """Return the metered usage by tenant and kind of operation."""
        rows = self._core.store.usage.of(None if principal.is_admin else principal.tenant_id)
        return pb.GetUsageResponse(
            rows=[
                pb.UsageRow(
                    tenant=row.tenant_name,
                    kind=row.kind,
                    num_operations=row.num_operations,
                    num_tokens=row.num_tokens,
                    engine_seconds=row.engine_s,
                    file_bytes=row.file_bytes,
                    file_seconds=row.file_s,
                )
                for row in rows
            ]
        )

    def _shown(self, principal: Principal, cycle: pb.Cycle) -> pb.Cycle:
        """Return a cycle as the caller may see it. (In memory, an entry holds its tenant's id.)

        Of other tenants a member sees their number, by one empty entry each, and in the first of these their operations
        and tokens in all: not which adapters, workers and steps were theirs, nor what one of them did.
        """
        shown, others = pb.Cycle(), pb.CycleEntry()
        shown.CopyFrom(cycle)
        del shown.entries[:]
        other_ids = set()
        for entry in cycle.entries:
            if principal.is_admin or entry.tenant == principal.tenant_id:
                shown.entries.append(entry)
                shown.entries[-1].tenant = self._tenant_name(entry.tenant)
            else:
                other_ids.add(entry.tenant)
                others.num_operations += entry.num_operations
                others.num_tokens += entry.num_tokens
        if other_ids:
            shown.entries.append(others)
            shown.entries.extend(pb.CycleEntry() for _ in range(len(other_ids) - 1))
        return shown

    def _probations(self, principal: Principal) -> list[Probation]:
        """Return the probations that the caller may see, by the tenants' names."""
        found = {tenant_id: self._core.probation.standing(tenant_id) for tenant_id in self._core.probation.tenants()}
        shown = [
            Probation(
                tenant=self._tenant_name(tenant_id),
                num_kills=standing.num_kills,
                operation=standing.operation,
                remaining_seconds=standing.remaining_s,
                backoff_seconds=standing.backoff_s,
            )
            for tenant_id, standing in found.items()
            if standing is not None and (principal.is_admin or tenant_id == principal.tenant_id)
        ]
        return sorted(shown, key=lambda each: each.tenant)

    def _tenant_name(self, tenant_id: str) -> str:
        row = self._core.store.tenants.get(tenant_id)
        return row.name if row is not None else ""

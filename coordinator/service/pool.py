"""The state of the pool: workers, cycles, usage. Administrators see all tenants; others see them as counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from coordinator.base.errors import Code, ServiceError
from coordinator.base.version import VERSION
from coordinator.service.auth import Principal
from coordinator.service.base import UseCases
from tinkerpool.v1 import pool_pb2 as pb


class PoolUseCases(UseCases):
    """PoolService."""

    async def get_pool_status(self, principal: Principal, request: pb.GetPoolStatusRequest) -> pb.GetPoolStatusResponse:
        """Return the workers, the numbers of operations, and the last cycles."""
        core = self._core
        live = {worker.worker_id for loop in core.loops.values() for worker in loop.workers()}
        num_running = sum(1 for operation in core.table.live() if operation.is_running)
        num_cycles = min(request.num_cycles or 20, len(core.cycles)) if request.num_cycles >= 0 else 0
        cycles = list(core.cycles)[len(core.cycles) - num_cycles :]
        return pb.GetPoolStatusResponse(
            workers=[
                pb.Worker(
                    worker_id=worker.worker_id,
                    incarnation=worker.incarnation,
                    base_model=worker.model.name,
                    pid=worker.pid,
                    node=worker.node,
                    num_slots=worker.num_slots,
                    num_adapters=sum(1 for a in core.adapters.values() if a.worker_id == worker.worker_id),
                    is_live=worker.worker_id in live,
                    device=worker.device,
                )
                for worker in core.pool.workers()
            ],
            num_queued=len(core.table) - num_running,
            num_running=num_running,
            num_samples=core.sampling.num_requests,
            cycles=[self._shown(principal, cycle) for cycle in cycles],
            version=VERSION,
            epoch=core.epoch,
            uptime_seconds=core.time.monotonic() - core.started_at,
        )

    async def watch_cycles(
        self, principal: Principal, request: pb.WatchCyclesRequest
    ) -> AsyncIterator[pb.WatchCyclesResponse]:
        """Every cycle from now on."""
        queue: asyncio.Queue[pb.Cycle | None] = asyncio.Queue()
        self._core.cycle_watchers.add(queue)
        try:
            while not self._core.admission.is_stopping and (cycle := await queue.get()) is not None:
                yield pb.WatchCyclesResponse(cycle=self._shown(principal, cycle))
            raise ServiceError(Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down", retry_delay_s=1.0)
        finally:
            self._core.cycle_watchers.discard(queue)

    async def get_usage(self, principal: Principal, request: pb.GetUsageRequest) -> pb.GetUsageResponse:
        """Return the metered usage by tenant and kind of operation."""
        rows = self._core.store.tenants.usage(None if principal.is_admin else principal.tenant_id)
        return pb.GetUsageResponse(
            rows=[
                pb.UsageRow(
                    tenant=row.tenant_name,
                    kind=row.kind,
                    num_operations=row.num_operations,
                    num_tokens=row.num_tokens,
                    engine_seconds=row.engine_s,
                )
                for row in rows
            ]
        )

    def _shown(self, principal: Principal, cycle: pb.Cycle) -> pb.Cycle:
        """Return a cycle with the names that the caller may see. (In memory, an entry holds its tenant's id.)"""
        shown = pb.Cycle()
        shown.CopyFrom(cycle)
        for entry in shown.entries:
            if principal.is_admin or entry.tenant == principal.tenant_id:
                entry.tenant = self._tenant_name(entry.tenant)
            else:
                entry.tenant = entry.adapter_id = ""
        return shown

    def _tenant_name(self, tenant_id: str) -> str:
        row = self._core.store.tenants.get(tenant_id)
        return row.name if row is not None else ""

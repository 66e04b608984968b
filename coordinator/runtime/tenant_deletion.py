"""Deletes tenants with everything that they have: what they run, their states, and at last their rows.

A tenant is marked first, durably, and refused from then on; so the rest may take its time, also over restarts. The
order: sessions with their samplers, checkpoints (so that no weights need a file any more), adapters, results and rows,
the tenant itself with its keys and usage. What fails is tried again with the next sweep. Does not depend on requests.

Main invariant: a tenant's row is deleted last. The database refuses it while anything refers to it.
"""

from __future__ import annotations

import logging

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.base.time import Time
from coordinator.checkpoints.states import States
from coordinator.operations.epoch import Registers
from coordinator.runtime.deletion import Deletions
from coordinator.runtime.housekeeping import Housekeeping
from coordinator.sampling.scheduler import SampleScheduler
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import TenantRow
from coordinator.storage.sqlite import StorageError
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb

logger = logging.getLogger(__name__)


class TenantDeletions:
    """The deletions of marked tenants."""

    def __init__(
        self,
        config: CoordinatorConfig,
        time: Time,
        store: Store,
        registers: Registers,
        states: States,
        deletions: Deletions,
        housekeeping: Housekeeping,
        samples: SampleScheduler,
    ) -> None:
        self._config = config
        self._time = time
        self._store = store
        self._registry = registers.registry
        self._sessions = registers.sessions
        self._in_flight = registers.in_flight
        self._states = states
        self._deletions = deletions
        self._housekeeping = housekeeping
        self._samples = samples

    async def run(self) -> None:
        """Continue the deletions, every `sweep_interval_s`."""
        while True:
            await self._time.sleep(self._config.sweep_interval_s)
            for row in self._store.tenants.marked():
                try:
                    await self._continue(row)
                except (StorageError, ServiceError) as error:
                    logger.warning("tenant %s cannot be deleted yet: %s; trying again later", row.name, error)

    async def _continue(self, row: TenantRow) -> None:
        """Delete what can be deleted now. Raises StorageError and ServiceError; the next sweep goes on then."""
        for session_id in self._sessions.ids_of(row.tenant_id):
            await self._housekeeping.end_session(session_id)
        self._samples.end_tenant(row.tenant_id)  # also of sessions that had ended before a crash
        for checkpoint in self._store.checkpoints.of_tenant(row.tenant_id):
            await self._states.delete_checkpoint(checkpoint)
        error = ops_pb.OperationError(code=Code.CANCELLED, reason="ADAPTER_DELETED", message="the tenant was deleted")
        for log in [log for log in self._registry.logs.values() if log.tenant_id == row.tenant_id]:
            await self._deletions.delete(log, error)
        if self._in_flight.num_of_tenant(row.tenant_id):
            return  # samples that run: they end at their next token
        while await self._store.tenants.delete_some(row.tenant_id):
            pass
        if await self._store.tenants.delete(
            row.tenant_id, Act(at=self._time.wall(), act="tenant.gone", subject=row.name)
        ):
            logger.info("tenant %s is deleted", row.name)

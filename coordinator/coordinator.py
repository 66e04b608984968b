"""One coordinator: the core, the keys and the use cases, ready for doors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from coordinator.base.config import CoordinatorConfig
from coordinator.base.time import Time
from coordinator.limits.ceiling import Limit
from coordinator.runtime.core import Core
from coordinator.runtime.data_dir import Seams
from coordinator.service import Service
from coordinator.storage.rows import START
from coordinator.tenants.keys import Authenticator
from coordinator.tenants.principals import Role
from workers.contract.protocols import Pool

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces

DEFAULT_TENANT = "default"
FAILED = "the pool has failed, and its process ends: its log has the reason"
"""What callers without a key are told of a fatal error."""


class Coordinator:
    """Start it, put doors before `service` and `authenticator`, await `failed`, stop it."""

    def __init__(
        self, config: CoordinatorConfig, pool: Pool, time: Time | None = None, seams: Seams | None = None
    ) -> None:
        """See `Core`."""
        self.core = Core(config, pool, time, seams)
        self.responses, self.decode_turns = self.core.responses, self.core.decode_turns
        self.authenticator: Authenticator
        self.service: Service
        self.limits: dict[str, Limit]
        self.traces: Traces | None

    async def start(self) -> None:
        """Recover and begin cycles. Raises DataDirError, or the error that keeps the pool from starting.

        Call `stop` after a start that was cancelled: it decides whether workers are kept.
        """
        try:
            await self.core.start()
        except Exception:  # whatever it is, it is raised again
            await self.core.stop()
            raise
        self.authenticator = Authenticator(self.core.store, self.core.accounts, self.core.time.wall)
        self.service = Service(self.core, self.authenticator)
        self.limits, self.traces = self.core.quotas.listed, self.core.traces
        self.core.tasks.spawn(self.authenticator.keep(self.core.time))

    async def stop(self, *, is_final: bool = False) -> None:
        """Finish the running cycles, snapshot, end the pool; see `Core.stop`."""
        await self.core.stop(is_final=is_final)

    async def failed(self) -> None:
        """Raise the first fatal error, as soon as it is reported: the coordinator must stop then."""
        await self.core.failure.wait()

    def health(self) -> bool:
        """Return whether new work is taken and makes progress."""
        return self.core.is_healthy()

    @property
    def has_failed(self) -> bool:
        """Whether a fatal error was reported: the process must end."""
        return self.core.failure.is_reported

    def unready_reason(self) -> str:
        """Return why `health` is False, in a sentence; empty if it is True.

        Callers without a key read it: it has no name of a base model, a worker or a tenant, and no path.
        """
        if self.health():
            return ""
        if self.has_failed:
            return FAILED
        loops = self.core.loops.values()
        if problem := self.core.store.database.problem():
            return problem
        if not all(loop.planning.has_live_workers() for loop in loops):
            return "a base model has no live worker: operations wait until one has started"
        if not all(loop.is_healthy for loop in loops):
            return "the cycle of a base model is overdue: operations wait until its workers reply or are replaced"
        return "the pool is shutting down"

    async def first_admin_key(self) -> str | None:
        """Create an administrator's key for this machine in a new data directory and return it.

        Return None if there are keys already.
        """
        return None if self.core.store.api_keys.listing(1, START).keys else await self.new_admin_key()

    async def new_admin_key(self) -> str:
        """Create an administrator's key for this machine and return it: of a tenant that may call."""
        names = itertools.chain([DEFAULT_TENANT], (f"operator-{number}" for number in itertools.count(1)))
        key, _ = await self.authenticator.create_key(
            next(filter(self._may_call, names)), role=Role.ADMIN, is_local=True
        )
        return key

    def _may_call(self, tenant: str) -> bool:
        """Return whether a tenant's keys are of use; also for a tenant that does not exist yet."""
        row = self.core.store.tenants.named(tenant)
        return row is None or not self.core.accounts.is_held(row.tenant_id)

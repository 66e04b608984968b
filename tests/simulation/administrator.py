"""What an administrator does to tenants in some histories: suspends and resumes clients, and deletes a tenant at work.

`Administrator` outlives coordinators, as a client does; `Standings` compares calls and batches with what it did. The
deleted tenant works until then; nothing of it may be left. Raises ContractViolation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.base.errors import ServiceError
from coordinator.coordinator import Coordinator
from coordinator.tenants.principals import Role
from tests.simulation.client import Behaviour, Client
from tests.simulation.script import draw_script
from tests.simulation.standing import ContractViolation, Standings, State
from tests.simulation.world import World
from tinkerpool.v1 import admin_pb2

SUSPENSIONS_MAX = 3
POLL_S = 0.2
CAREFUL = Behaviour(window=1, drop=0.2, repeat=0.0, other=0.0, think_s=0.01)


@dataclass(slots=True)
class _Suspension:
    """A suspension of a client, and how far it is."""

    client: Client
    after_s: float
    seconds: float
    """How long it lasts, from the response on."""
    is_acknowledged: bool = False


class Administrator:
    """The administrator of a history, and the tenant that it deletes; without anything to do there is none."""

    def __init__(self, world: World, clients: Sequence[Client], standings: Standings) -> None:
        self._world = world
        self._standings = standings
        self._random = random = world.random("administrator")
        self._client = Client(world, "root", [], CAREFUL, standings, Role.ADMIN)
        num_suspensions = random.randrange(1, SUSPENSIONS_MAX + 1) if random.random() < 0.3 else 0
        self._suspensions = [
            _Suspension(
                client=random.choice(clients),
                after_s=random.choice((0.02, 0.2)) * random.expovariate(1),
                # The longest is beyond the times after which gaps and idle sessions end.
                seconds=random.choice((0.0, 0.05, 0.5, 0.5, 5.0, 5.0, 650.0)),
            )
            for _ in range(num_suspensions)
        ]
        self._num_resumed = 0
        self._doomed = Client(
            world, "doomed", draw_script(world.random("script doomed"), random.randrange(3, 14)), CAREFUL, standings
        )
        self._state = "" if random.random() < 0.7 else "works"
        """Of the tenant that is deleted: it works, is marked, is gone; empty: there is none."""
        self._after_s = random.choice((0.02, 0.2, 1.0)) * random.expovariate(1)
        self._coordinator: Coordinator

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self._num_resumed == len(self._suspensions) and self._state in ("", "gone")

    async def run(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Continue until all is done."""
        if self.is_done:
            return
        self._coordinator = coordinator
        await self._client.connect(coordinator)
        await asyncio.gather(self._suspend_and_resume(), self._delete(is_last=is_last))

    async def _suspend_and_resume(self) -> None:
        for each in self._suspensions[self._num_resumed :]:
            name = each.client.name
            await each.client.until_known()
            if not each.is_acknowledged:
                await asyncio.sleep(each.after_s)
                self._standings.changing(name)
                await self._client.call("suspend_tenant", admin_pb2.SuspendTenantRequest(tenant=name, reason="unpaid"))
                self._standings.changed(name, State.SUSPENDED)
                each.is_acknowledged = True
                self._world.work["suspensions"] += 1
            await asyncio.sleep(each.seconds)
            self._standings.changing(name)
            await self._client.call("resume_tenant", admin_pb2.ResumeTenantRequest(tenant=name))
            self._standings.changed(name, State.ACTIVE)
            self._num_resumed += 1

    async def _delete(self, *, is_last: bool) -> None:
        if self._state == "works":
            await self._doomed.connect(self._coordinator)
            work = asyncio.get_running_loop().create_task(self._doomed.run(self._coordinator, is_last=is_last))
            alive = asyncio.get_running_loop().create_task(self._doomed.keep_alive(self._coordinator))
            await asyncio.sleep(self._after_s)
            await self._mark()
            for task in (work, alive):
                task.cancel()
            for ended in await asyncio.gather(work, alive, return_exceptions=True):
                if ended is not None and not isinstance(ended, asyncio.CancelledError):
                    raise ended
        if self._state == "marked":
            await self._until_gone()

    async def _mark(self) -> None:
        """Have the tenant deleted; after a crash it may be gone already."""
        name, store = self._doomed.name, self._coordinator.core.store
        self._standings.changing(name)
        if store.tenants.named(name) is not None:
            await self._client.call("delete_tenant", admin_pb2.DeleteTenantRequest(tenant=name), done="NOT_FOUND")
        self._standings.changed(name, State.DELETED)
        self._state = "marked"

    async def _until_gone(self) -> None:
        """Wait until nothing of the tenant is left, and its name is free."""
        store, tenant_id = self._coordinator.core.store, self._doomed.principal.tenant_id
        while store.tenants.get(tenant_id) is not None:
            with contextlib.suppress(ServiceError), self._doomed.calling():
                raise AssertionError("`calling` checks that the tenant may call")
            await asyncio.sleep(POLL_S)
        for table in (
            row["name"] for row in store.database.read("SELECT name FROM sqlite_master WHERE type = 'table'")
        ):
            columns = [row["name"] for row in store.database.read(f"PRAGMA table_info({table})")]
            if "tenant_id" not in columns:
                continue
            [found] = store.database.read(f"SELECT COUNT(*) FROM {table} WHERE tenant_id = ?", (tenant_id,))
            if found[0]:
                raise ContractViolation(f"{found[0]} rows of a deleted tenant are left in {table}")
        gone = [entry for entry in store.audit.newest(1000, subject=self._doomed.name) if entry.act == "tenant.gone"]
        if len(gone) != 1:
            raise ContractViolation(f"the deletion of a tenant is {len(gone)} times in the audit log")
        if store.tenants.named(self._doomed.name) is None:  # no call before a crash had its effect
            request = admin_pb2.CreateTenantRequest(tenant=self._doomed.name)
            await self._client.call("create_tenant", request, done="TENANT_EXISTS")
        new = store.tenants.named(self._doomed.name)
        if new is None or new.tenant_id == tenant_id:
            raise ContractViolation("the name of a deleted tenant is not free")
        self._state = "gone"
        self._world.work["tenants deleted"] += 1

"""Short sessions of a tenant beside the scripts: each is created, used, ended, and called too late.

A life is a plain object that outlives coordinators, as a client does. Its calls are repeated until their responses
arrive. Raises ContractViolation if a row disappears too early or stays, if a late call gets another answer than the
contract's, or if a deletion is refused on a full disk whose reserve the coordinator holds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coordinator.base.errors import Code, ServiceError
from coordinator.coordinator import Coordinator
from tests.simulation.client import Client
from tests.simulation.standing import ContractViolation
from tests.simulation.world import World
from tinkerpool.v1 import adapters_pb2, checkpoints_pb2, sampling_pb2, sessions_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb

LIVES_MAX = 5
POLL_S = 0.2
FULL_WAIT_S = 3.0


@dataclass(slots=True)
class Life:
    """One session, and how far its life is."""

    number: int
    has_adapter: bool
    has_sampler: bool
    has_checkpoint: bool
    waits_for_full_disk: bool
    """Whether it tries to delete its checkpoint and its adapter while the disk is full."""
    session_id: str = ""
    adapter_id: str = ""
    saving: str = ""
    """The operation that saves its checkpoint."""
    path: str = ""
    num_done: int = 0
    """Steps of its life that are over."""
    deleted: frozenset[str] = frozenset()
    """Deletions that were sent."""
    ended: float = math.inf
    """A virtual time at which the session had not ended."""


class ShortSessions:
    """The lives of one tenant, one after the other."""

    def __init__(self, world: World, client: Client) -> None:
        """`client` has the tenant's key."""
        self._world = world
        self._client = client
        self._random = random = world.random(f"short sessions of {client.name}")
        self.lives = [
            Life(
                number=number,
                has_adapter=(has_adapter := random.random() < 0.6),
                has_sampler=random.random() < 0.5,
                has_checkpoint=has_adapter and random.random() < 0.5,
                waits_for_full_disk=random.random() < 0.5,
            )
            for number in range(random.randrange(LIVES_MAX + 1))
        ]
        self._coordinator: Coordinator

    async def run(self, coordinator: Coordinator, *, is_last: bool) -> None:
        """Continue all lives. In the last epoch, end only when nothing of them is left that need not be."""
        self._coordinator = coordinator
        await self._client.until_known()
        for life in self.lives:
            steps = (self._create, self._make_adapter, self._make_sampler, self._save, self._end, self._delete)
            for number, step in enumerate(steps):
                if life.num_done <= number:
                    await step(life)
                    life.num_done = number + 1
                    await asyncio.sleep(self._random.choice((0.0, 0.01, 0.3)))
            await self._call_late(life)
        for life in self.lives:
            while is_last and not life.saving and not await self._call_late(life):  # noqa: ASYNC110 (no event for it)
                await asyncio.sleep(POLL_S)

    # ---- steps of a life

    async def _create(self, life: Life) -> None:
        request = sessions_pb2.CreateSessionRequest(request_id=f"short {life.number}")
        response = await self._client.call("create_session", request)
        life.session_id = response.session.session_id

    async def _make_adapter(self, life: Life) -> None:
        if life.has_adapter:
            request = adapters_pb2.CreateAdapterRequest(
                session_id=life.session_id, base_model="toy", rank=8, index=0, seed=life.number
            )
            life.adapter_id = (await self._client.call("create_adapter", request)).adapter.adapter_id

    async def _make_sampler(self, life: Life) -> None:
        if life.has_sampler:
            request = sampling_pb2.CreateSamplerRequest(session_id=life.session_id, base_model="toy", index=0)
            await self._client.call("create_sampler", request)

    async def _save(self, life: Life) -> None:
        if not life.has_checkpoint:
            return
        request = checkpoints_pb2.SaveStateRequest(adapter_id=life.adapter_id, seq=1, name="short")
        life.saving = (await self._client.call("save_state", request)).operation.name
        saved = ops_pb.Operation()
        while saved.state not in (ops_pb.OPERATION_STATE_SUCCEEDED, ops_pb.OPERATION_STATE_FAILED):
            await asyncio.sleep(self._random.uniform(0, POLL_S))
            saved = (await self._client.call("get_operation", ops_pb.GetOperationRequest(name=life.saving))).operation
        life.path = saved.save_state.path

    async def _end(self, life: Life) -> None:
        def note() -> None:
            life.ended = min(life.ended, self._world.time())

        request = sessions_pb2.FinishSessionRequest(session_id=life.session_id)
        await self._wait_for_full_disk(life)
        await self._delete_one(life, "finish_session", request, note)

    async def _wait_for_full_disk(self, life: Life) -> None:
        waited_s = 0.0
        while life.waits_for_full_disk and waited_s < FULL_WAIT_S and not self._world.has_reserve_for_deletions:
            await asyncio.sleep(POLL_S / 10)
            waited_s += POLL_S / 10

    async def _delete(self, life: Life) -> None:
        await self._wait_for_full_disk(life)
        if life.path:
            await self._delete_one(
                life, "delete_checkpoint", checkpoints_pb2.DeleteCheckpointRequest(path=life.path), lambda: None
            )
        if life.adapter_id:
            await self._delete_one(
                life, "delete_adapter", adapters_pb2.DeleteAdapterRequest(adapter_id=life.adapter_id), lambda: None
            )

    async def _call_late(self, life: Life) -> bool:
        """Call an ended session; return whether its row is gone."""
        request = sessions_pb2.HeartbeatRequest(session_id=life.session_id)
        try:
            await self._client.until_admitted()
            with self._client.calling() as principal:
                await self._coordinator.service.heartbeat(principal, request)
        except ServiceError as error:
            if error.reason == "SESSION_ENDED":
                self._world.work["late calls of ended sessions"] += 1
                return False
            # A crash may lose service time, and it never runs faster than virtual time.
            is_early = self._world.time() - life.ended < self._coordinator.core.config.ended_retention_s
            if error.reason == "SESSION_UNKNOWN" and not is_early and not life.saving:
                self._world.work["late calls of sessions that are gone"] += 1
                return True
            raise ContractViolation(f"a late call of {life} was refused with {error.reason}") from error
        raise ContractViolation(f"a late call of {life} was accepted")

    # ---- calls

    async def _delete_one(self, life: Life, method: str, request: Any, note: Callable[[], None]) -> None:
        """Send a deletion until its response arrives. It must not be refused for lack of room."""
        while True:
            note()
            is_reserved, is_repeated = self._world.has_reserve_for_deletions, method in life.deleted
            life.deleted |= {method}
            try:
                with self._client.calling() as principal:
                    await getattr(self._coordinator.service, method)(principal, request)
            except ServiceError as error:
                if error.reason == "STORAGE" and is_reserved and self._world.has_reserve_for_deletions:
                    raise ContractViolation(f"{method} was refused on a full disk: {error.message}") from error
                if error.retry_delay_s is None and not (error.code is Code.NOT_FOUND and is_repeated):
                    raise ContractViolation(f"{method}: {error.code.name} {error.reason} {error.message}") from error
                if error.retry_delay_s is None:
                    return
                await asyncio.sleep(self._random.uniform(0, error.retry_delay_s))
                continue
            if is_reserved and self._world.has_reserve_for_deletions:
                self._world.work[f"{method} on a full disk"] += 1
            if self._random.random() < 0.8:
                return
            self._world.faults["response lost"] += 1

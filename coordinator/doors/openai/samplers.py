"""The samplers that the door uses: one for each set of weights, in one session of each tenant.

A sampler is identified by its request id and the session by its metadata. So both are found again after a restart of
the coordinator, and all requests for the same weights share a sampler. Requests keep the session alive; an unused
session expires like any other, with its samplers, and the next request creates a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass

from coordinator.base.errors import ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai.weights import Weights
from tinkerpool.v1 import sampling_pb2, sessions_pb2

METADATA = {"tinkerpool:door": "openai"}
"""Metadata of the door's own sessions."""
HEARTBEAT_S = 10.0
_PAGE_SIZE = 1000


@dataclass(frozen=True, slots=True)
class Sampler:
    """A sampler and its session."""

    session_id: str
    sampler_id: str


class Samplers:
    """The door's session of each tenant, cached; the service has them all."""

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}
        """Session id by tenant."""
        self._finding = asyncio.Lock()

    async def of(self, call: Call, weights: Weights) -> Sampler:
        """Return the tenant's sampler of these weights, created if needed. Raises ServiceError."""
        session_id = await self._session(call)
        try:
            return await _create(call, session_id, weights)
        except ServiceError as error:
            if error.reason != "SESSION_ENDED":
                raise
        # The cached session expired, or its tenant finished it.
        self._sessions.pop(call.principal.tenant_id, None)
        return await _create(call, await self._session(call), weights)

    async def _session(self, call: Call) -> str:
        tenant_id = call.principal.tenant_id
        async with self._finding:
            if tenant_id not in self._sessions:
                self._sessions[tenant_id] = await _live_session(call) or await _new_session(call)
            return self._sessions[tenant_id]


@contextlib.asynccontextmanager
async def kept_alive(call: Call, session_id: str) -> AsyncIterator[None]:
    """Send heartbeats for the session while the block runs."""
    beating = asyncio.create_task(_beat(call, session_id))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(call: Call, session_id: str) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        await call.service.heartbeat(call.principal, sessions_pb2.HeartbeatRequest(session_id=session_id))


async def _create(call: Call, session_id: str, weights: Weights) -> Sampler:
    request = sampling_pb2.CreateSamplerRequest(
        session_id=session_id,
        model_path=weights.name if weights.checkpoint is not None else "",
        base_model=weights.name if weights.checkpoint is None else "",
        request_id=weights.version,
    )
    created = await call.service.create_sampler(call.principal, request)
    return Sampler(session_id, created.sampler.sampler_id)


async def _live_session(call: Call) -> str:
    """Return the door's session that an earlier run of the coordinator created; empty if there is none."""
    token = ""
    while True:
        request = sessions_pb2.ListSessionsRequest(page_size=_PAGE_SIZE, page_token=token)
        page = await call.service.list_sessions(call.principal, request)
        for session in page.sessions:
            if METADATA.items() <= dict(session.user_metadata).items():
                return session.session_id
        token = page.next_page_token
        if not token:
            return ""


async def _new_session(call: Call) -> str:
    request = sessions_pb2.CreateSessionRequest(user_metadata=METADATA, request_id=uuid.uuid4().hex)
    return (await call.service.create_session(call.principal, request)).session.session_id

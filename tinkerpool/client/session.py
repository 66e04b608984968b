"""A session: one client process at the service. Created when first needed, kept alive by heartbeats, finished.

A session is finished by `close`, or when the last client that needs it is dropped: heartbeats do not hold a `Session`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
import weakref
from collections.abc import Mapping
from importlib.metadata import version

from tinkerpool.client.calls import methods
from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.encoding import string_map
from tinkerpool.client.calls.versions import mismatch
from tinkerpool.errors import (
    ApiError,
    ClientClosed,
    ConfigurationError,
    FailedPrecondition,
    NotFound,
    TinkerpoolError,
)
from tinkerpool.v1 import sessions_pb2

_log = logging.getLogger("tinkerpool")

HEARTBEAT_INTERVAL_S = 10.0
HEARTBEAT_TIMEOUT_S = 10.0
SILENCE_MAX_S = 120.0
"""A warning is logged after this long without a reply to a heartbeat, and after twice, four times, ... as long."""
FINISH_TIMEOUT_S = 2.0


class Session:
    """A session that may exist at the service. Its coroutines run on the background loop."""

    def __init__(self, connection: Connection, user_metadata: Mapping[str, str] | None) -> None:
        self.connection = connection
        self._user_metadata = string_map(user_metadata)
        self._request_id = uuid.uuid4().hex
        self._creation: asyncio.Task[_LiveSession] | None = None
        self._finish_if_dropped: weakref.finalize[[], Session] | None = None

    async def id(self) -> str:
        """Return the session's id; the first call creates it. Raises ApiError."""
        if self._creation is None or (self._creation.done() and self._creation.exception()):
            self._creation = asyncio.create_task(self._create())
        return (await asyncio.shield(self._creation)).session_id

    async def close(self) -> None:
        """Finish the session, unless the service does not reply soon. Idempotent."""
        if self._creation is not None and self._finish_if_dropped is not None and self._finish_if_dropped.detach():
            await self._creation.result().finish()

    async def _create(self) -> _LiveSession:
        request = sessions_pb2.CreateSessionRequest(user_metadata=self._user_metadata, request_id=self._request_id)
        response = await self.connection.call(methods.CREATE_SESSION, request)
        live = _LiveSession(self.connection, response.session.session_id)
        self._finish_if_dropped = weakref.finalize(self, live.start_finishing)
        self._finish_if_dropped.atexit = False
        return live


class _LiveSession:
    """A session that exists at the service, and its heartbeats."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.session_id = session_id
        self._connection = connection
        self._heartbeats = asyncio.create_task(self._keep_alive())

    async def finish(self) -> None:
        """End the heartbeats and the session, unless the service does not reply soon."""
        self._heartbeats.cancel()
        request = sessions_pb2.FinishSessionRequest(session_id=self.session_id)
        try:
            await self._connection.call_once(methods.FINISH_SESSION, request, timeout_s=FINISH_TIMEOUT_S)
        except TinkerpoolError as error:
            _log.info("the session could not be finished and will expire: %s", error)

    def start_finishing(self) -> None:
        """Start `finish`; for the garbage collector, which runs on any thread and must not wait."""
        with contextlib.suppress(ClientClosed):
            self._connection.start(self.finish())

    async def _check_version(self) -> None:
        request = sessions_pb2.GetCapabilitiesRequest()
        try:
            pool = await self._connection.call_once(methods.GET_CAPABILITIES, request, timeout_s=HEARTBEAT_TIMEOUT_S)
        except (ApiError, ConfigurationError) as error:
            _log.info("the pool's version is not known: %s", error)
        else:
            if said := mismatch(version("tinkerpool"), pool.version):
                _log.warning("%s", said)

    async def _keep_alive(self) -> None:
        await self._check_version()
        request = sessions_pb2.HeartbeatRequest(session_id=self.session_id)
        silence_s, patience_s = 0.0, SILENCE_MAX_S
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            try:
                await self._connection.call_once(methods.HEARTBEAT, request, timeout_s=HEARTBEAT_TIMEOUT_S)
            except (NotFound, FailedPrecondition) as error:
                _log.warning("session %s has ended, make a new ServiceClient: %s", self.session_id, error)
                return
            except (ApiError, ConfigurationError) as error:
                silence_s += HEARTBEAT_INTERVAL_S
                if silence_s >= patience_s:
                    patience_s *= 2
                    _log.warning("no reply to a heartbeat for %.0f s; the session may expire: %s", silence_s, error)
            else:
                silence_s, patience_s = 0.0, SILENCE_MAX_S

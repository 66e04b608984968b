"""Connections of the HTTP door: their number, and deadlines for a request that does not arrive or is not read.

Does not depend on paths or tenants: a connection exists before any API key is known.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger(__name__)


def connections_max(wanted: int) -> int:
    """Return `wanted`, or half of the files that the process may open: database, workers and gRPC need the others."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files_max == resource.RLIM_INFINITY else min(wanted, files_max // 2)


class Connection(H11Protocol):
    """A connection that is closed above the limit of connections, or when a request does not arrive in time."""

    def __init__(self, *args: Any, num_max: int, head_s: float, body_s: float, **options: Any) -> None:
        """Allow `num_max` connections at once, `head_s` seconds for a request's line and headers, and `body_s` seconds
        for the rest of a refused body and for the client to read a full buffer of a response.
        """
        super().__init__(*args, **options)
        self._num_max = num_max
        self._head_s = head_s
        self._body_s = body_s
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the connection above the limit; else set the deadline of the first request."""
        super().connection_made(transport)
        if len(self.connections) > self._num_max:
            _log.warning("%d HTTP connections are open, the maximum: another one is refused", self._num_max)
            transport.abort()
            return
        self._deadline = self.loop.call_later(self._head_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both deadlines."""
        self._cancel_deadline()
        self._cancel_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Keep a deadline while the data belongs to no running call: a head, or the body of a refused call."""
        super().data_received(data)
        call: Any = self.cycle  # None before the first
        if call is not None and not call.response_complete:
            self._cancel_deadline()
        elif self._deadline is None:
            seconds = self._head_s if call is None or not call.more_body else self._body_s
            self._deadline = self.loop.call_later(seconds, self._expire)

    def on_response_complete(self) -> None:
        """Set the deadline of the next head if a part of it arrived during the call."""
        super().on_response_complete()
        call: Any = self.cycle
        if call.response_complete and self._deadline is None and self.conn.trailing_data[0]:
            self._deadline = self.loop.call_later(self._head_s, self._expire)

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read its response."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._body_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel that deadline: the client reads again."""
        super().resume_writing()
        self._cancel_stall()

    def _cancel_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        self.transport.abort()

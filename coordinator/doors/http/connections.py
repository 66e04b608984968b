"""Connections of the HTTP door: how many there may be, and how long one may hold its place without asking anything.

Knows no paths and no tenants: a connection comes before any key.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_log = logging.getLogger(__name__)


def connections_max(wanted: int) -> int:
    """`wanted`, or half of the files that the process may open: the store, the workers and gRPC need some, too."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files_max == resource.RLIM_INFINITY else min(wanted, files_max // 2)


class Connection(H11Protocol):
    """A connection that is closed when it is one too many, or when what it has begun to ask does not come."""

    def __init__(self, *args: Any, num_max: int, head_s: float, body_s: float, **options: Any) -> None:
        """`num_max` connections at once; `head_s` for a request's line and headers, `body_s` for a refused body,
        and for a bufferful of an answer to be taken.
        """
        super().__init__(*args, **options)
        self._num_max = num_max
        self._head_s = head_s
        self._body_s = body_s
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close it if there are enough; else wait for its first request."""
        super().connection_made(transport)
        if len(self.connections) > self._num_max:
            _log.warning("%d HTTP connections are open, the most allowed: one more is refused", self._num_max)
            transport.abort()
            return
        self._deadline = self.loop.call_later(self._head_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._rest()
        self._flows()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """A deadline stands while what comes belongs to no call that runs: a head, or the body of a refused call."""
        super().data_received(data)
        call: Any = self.cycle  # None before the first
        if call is not None and not call.response_complete:
            self._rest()
        elif self._deadline is None:
            seconds = self._head_s if call is None or not call.more_body else self._body_s
            self._deadline = self.loop.call_later(seconds, self._give_up)

    def on_response_complete(self) -> None:
        """What has come of the next head while the call ran is waited for no longer than any other head."""
        super().on_response_complete()
        call: Any = self.cycle
        if call.response_complete and self._deadline is None and self.conn.trailing_data[0]:
            self._deadline = self.loop.call_later(self._head_s, self._give_up)

    def pause_writing(self) -> None:
        """Its client does not take what it has asked for: it is given `body_s` for a bufferful."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._body_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes it again."""
        super().resume_writing()
        self._flows()

    def _flows(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _rest(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        self.transport.abort()

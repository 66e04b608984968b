"""Connections: accepted by a loop of our own, counted from then on, and closed when they stall.

`Listener` accepts connections and limits their TLS handshakes; `Connection` limits heads, idle times and unread
responses, and cancels the call of a client that has left. Deadlines do not depend on paths or tenants: a connection
exists before any API key is known.

Main invariant: no connection is open without a place and a deadline, a running call or an idle time.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from coordinator.doors.http.places import Places
from coordinator.doors.tls import TlsFiles

WITH_KEY = "tinkerpool.has_valid_key"
"""Entry of a call's ASGI scope: its API key was valid."""
CLIENT = "tinkerpool.client"
"""Entry of the state of a call's ASGI scope: the `Client`."""
CERTIFICATE = "tinkerpool.certificate_sha256"
"""Entry of the state of a call's ASGI scope: the fingerprint of the client's certificate."""
ACCEPTS_MAX = 16
"""Most connections that are accepted in one callback: each takes up to 1.5 ms of processor time, and one is closed to
make room for it."""
ACCEPT_RETRY_S = 1.0
"""Pause after the process had no file descriptor for a connection. Without it the event loop would try all the time."""
BUSY_RETRY_S = 0.05
"""Pause while all places have running calls."""
BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
TLS_CLOSE_S = 5.0
"""Seconds that a client may take to end TLS."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Client:
    """The client of a connection: when it leaves, the call that serves it is cancelled."""

    def __init__(self, drop: Callable[[], None]) -> None:
        """`drop` closes the connection at once."""
        self._drop = drop
        self._call: asyncio.Task[Any] | None = None
        self._has_left = False

    async def cut(self) -> None:
        """Close the connection at once, within a response: the client sees that it is not whole. Ends the call."""
        self._drop()
        if not self._has_left:
            await asyncio.Event().wait()  # until `leave`, which the closed connection calls

    def leave(self) -> None:
        """Cancel the running call, whose response has no reader any more."""
        self._has_left = True
        if self._call is not None:
            self._call.cancel()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Cancel the block, which runs in a task of its own, when the client leaves; raise ClientDisconnect then."""
        task = self._call = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError:
            if not self._has_left or task.uncancel():
                raise  # another one cancels the call
            raise ClientDisconnect from None
        finally:
            self._call = None


@dataclass(frozen=True, slots=True)
class WhileConnected:
    """An ASGI application whose calls end when their clients leave."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call."""
        client: Client | None = scope.get("state", {}).get(CLIENT)
        if client is None:
            await self.app(scope, receive, send)
            return
        with suppress(ClientDisconnect), client.serving():
            await self.app(scope, receive, send)


class Connection(H11Protocol):
    """A connection that is closed when a request does not arrive, or a response is not read, in time."""

    def __init__(self, *args: Any, places: Places, head_s: float, body_s: float, **options: Any) -> None:
        """Allow `head_s` seconds for a request's line and headers, and `body_s` seconds for the rest of a refused body
        and for the client to read a full buffer of a response.
        """
        super().__init__(*args, **options)
        self._places = places
        self._head_s = head_s
        self._body_s = body_s
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._client = self.app_state[CLIENT] = Client(self.drop)
        self.opening: asyncio.Task[Any] | None = None
        """The TLS handshake; done for an open connection."""

    def drop(self) -> None:
        """Close the connection at once, also in its handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set the deadline of the first request."""
        super().connection_made(transport)
        if (tls := transport.get_extra_info("ssl_object")) is not None and (der := tls.getpeercert(binary_form=True)):
            self.app_state[CERTIFICATE] = hashlib.sha256(der).hexdigest()
        self._deadline = self.loop.call_later(self._head_s, self._expire)

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place, and cancel both deadlines and the call."""
        self._places.leave(self)
        self._cancel_deadline()
        self._cancel_stall()
        super().connection_lost(exc)
        self._client.leave()

    def data_received(self, data: bytes) -> None:
        """Keep a deadline while the data belongs to no running call: a head, or the body of a refused call."""
        super().data_received(data)
        if self._is_in_call():
            self._places.begin_call(self)
            self._cancel_deadline()
        elif self._deadline is None:
            call: Any = self.cycle
            seconds = self._head_s if call is None or not call.more_body else self._body_s
            self._deadline = self.loop.call_later(seconds, self._expire)

    def on_response_complete(self) -> None:
        """Set the deadline of the next head if a part of it arrived during the call."""
        had_key = bool(self.scope.get(WITH_KEY))
        super().on_response_complete()
        if self._is_in_call():
            return  # the next call had arrived before
        self._places.end_call(self, had_key=had_key)
        if self._deadline is None and self.conn.trailing_data[0]:
            self._deadline = self.loop.call_later(self._head_s, self._expire)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._places.count("closed, because they sent no HTTP")
        super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read its response."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._body_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel that deadline: the client reads again."""
        super().resume_writing()
        self._cancel_stall()

    def _is_in_call(self) -> bool:
        call: Any = self.cycle  # None before the first
        return call is not None and not call.response_complete

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


class Listener:
    """Accepts connections on a bound socket."""

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        places: Places,
        tls: TlsFiles | None,
        handshake_s: float,
    ) -> None:
        """`make`: returns a new connection's protocol; `handshake_s`: seconds that its TLS handshake may take."""
        self._listening = listening
        self._make = make
        self._places = places
        self._tls = tls
        self._handshake_s = handshake_s
        self._opening: set[asyncio.Task[Any]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._is_closed = False

    def open(self) -> None:
        """Begin to accept."""
        self._listening.settimeout(0)
        self._listening.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        """Accept no more connections, and end handshakes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        asyncio.get_running_loop().remove_reader(self._listening)
        if self._retry is not None:
            self._retry.cancel()
        for opening in self._opening:
            opening.cancel()

    async def wait_closed(self) -> None:
        """Wait until handshakes have ended."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _resume(self) -> None:
        self._retry = None
        asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            if self._places.are_busy():
                self._places.count("times all places had running calls; new connections wait in the kernel")
                self._pause(BUSY_RETRY_S)
                return
            try:
                accepted, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR:
                    raise
                self._places.count("times without a file descriptor for another one")
                self._places.drop_oldest()
                self._pause(ACCEPT_RETRY_S)
                return
            self._places.make_room()
            self._open(accepted)

    def _pause(self, seconds: float) -> None:
        """Accept nothing for a moment. The kernel keeps new connections meanwhile, so none is reset."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listening)
        self._retry = loop.call_later(seconds, self._resume)

    def _open(self, accepted: socket.socket) -> None:
        connection = self._make()
        self._places.take(connection)
        loop = asyncio.get_running_loop()
        limit_s = self._handshake_s if self._tls is not None else None
        connection.opening = loop.create_task(
            loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls.current().context if self._tls is not None else None,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=TLS_CLOSE_S if self._tls is not None else None,
            )
        )
        self._opening.add(connection.opening)

        def opened(task: asyncio.Task[Any]) -> None:
            self._opening.discard(task)
            if task.cancelled() or task.exception() is not None:  # no handshake, or none in time
                self._places.leave(connection)
                accepted.close()

        connection.opening.add_done_callback(opened)

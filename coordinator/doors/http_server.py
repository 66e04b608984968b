"""The HTTP server: binds a port, limits connections, serves `http_app` on the coordinator's event loop, stops.

The port is bound before anything slow starts, so that a port in use is reported at once; calls are served after
`start`. A call that waits for a result holds a coroutine, not a thread. Connections are accepted and bounded by
`http.connections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn

from coordinator.base.config import POLLS_DIVISOR, HttpConfig
from coordinator.base.time import SystemTime, Time
from coordinator.doors.door import Backend, DoorError, connections_max, listen_error
from coordinator.doors.http.bodies import Bodies
from coordinator.doors.http.calls import DoorContext, Gate, RunningCalls
from coordinator.doors.http.connections import Connection, Listener
from coordinator.doors.http.downloads import Downloads
from coordinator.doors.http.places import Places
from coordinator.doors.http.sign_ins import SignIns
from coordinator.doors.http.tokenizers import write_tokenizers
from coordinator.doors.http_app import make_app
from coordinator.doors.tls import TlsFiles
from coordinator.limits.polls import Polls

_DROP_S = 5.0
"""Seconds that cancelled calls may take to end."""
logger = logging.getLogger(__name__)


class HttpDoor:
    """One HTTP server. Call `bind`, `start`, optionally `refuse`, and `stop`, each once and in this order."""

    def __init__(self, config: HttpConfig, time: Time | None = None) -> None:
        """Without `time`, use the machine's clocks."""
        self._config = config
        self._time = time or SystemTime()
        self._gate = Gate()
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """The address for clients on this machine: the value of TINKER_BASE_URL."""
        return self._config.url(self.port)

    def bind(self) -> None:
        """Bind the port. Raises DoorError if it is in use or not available."""
        host, port = self._config.host, self._config.port
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            # asyncio sets TCP_NODELAY on sockets with a named protocol alone; without it, small responses take 40 ms.
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self._close_socket()
            raise listen_error(host, port, error, "--http-port") from error

    async def start(self, backend: Backend, tokenizers_dir: Path) -> None:
        """Serve. Tokenizers are written to `tokenizers_dir` for clients on this machine. Raises DoorError, OSError."""
        assert self._socket is not None, "bind first"
        config = self._config
        tokenizers: Mapping[str, Path] = {}
        if not config.is_remote:
            tokenizers = await write_tokenizers(backend.service, tokenizers_dir)

        num_max = connections_max(config.connections_max, 2)
        door = DoorContext(
            backend=backend,
            config=config,
            gate=self._gate,
            downloads=Downloads(self._time),
            sign_ins=SignIns(self._time, is_tls=config.is_tls),
            polls=Polls(max(1, num_max // POLLS_DIVISOR), backend.limits["streams_max"].maximum),
            running=RunningCalls(num_max),
            bodies=Bodies(config),
            tokenizers=tokenizers,
            time=self._time,
        )
        backend.limits.update(
            http_calls=door.running,
            http_downloads=door.downloads.running,
            http_polls=door.polls,
            http_received_bytes=door.bodies.received,
            http_decompressed_bytes=door.bodies.decompressed,
        )
        app = make_app(door)
        tls = TlsFiles(config) if config.is_tls else None
        self._server = _Server(_uvicorn_config(app, config), self._socket, Places(num_max), config.handshake_s, tls)
        self._serving = asyncio.create_task(self._server.serve(), name="http door")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise DoorError("the HTTP server ended during its start; the log of the coordinator has the reason")
            await asyncio.sleep(0.01)

    async def refuse(self) -> None:
        """Accept no new calls; running calls continue."""
        self._gate.close()
        if self._server is not None:
            self._server.should_exit = True

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for running calls, then abort them. Idempotent."""
        await self.refuse()
        if self._server is not None and self._serving is not None:
            done, _ = await asyncio.wait((self._serving,), timeout=grace_s)
            if not done:
                await self._server.drop_calls()
                self._serving.cancel()
                await asyncio.wait((self._serving,))
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to the process that it runs in, and accepting to a `Listener`."""

    def __init__(
        self,
        config: uvicorn.Config,
        listening: socket.socket,
        places: Places,
        handshake_s: float,
        tls: TlsFiles | None,
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._handshake_s = handshake_s
        self._listening = listening
        self._places = places

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        make: Callable[..., Connection] = self.config.http_protocol_class  # type: ignore[assignment]  # a factory

        def connection() -> Connection:
            return make(config=self.config, server_state=self.server_state, app_state={}, places=self._places)

        await self.lifespan.startup()
        listener = Listener(self._listening, connection, self._places, self._tls, self._handshake_s)
        listener.open()
        self.servers = [listener]  # type: ignore[list-item]  # a stop closes it, and waits for it
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def drop_calls(self) -> None:
        """Stop listening, and close the connections of running calls, which cancels these; wait for them to end."""
        for server in self.servers:
            server.close()
        if calls := list(self.server_state.tasks):
            logger.info("%d running calls over HTTP are cut by the stop", len(calls))
        for connection in self.server_state.connections:
            if connection.transport is not None:
                connection.transport.abort()
        if calls:
            await asyncio.wait(calls, timeout=_DROP_S)


def _uvicorn_config(app: object, config: HttpConfig) -> uvicorn.Config:
    connection = functools.partial(Connection, head_s=config.head_s, body_s=config.body_s)
    uvicorn_config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI application
        http=connection,  # type: ignore[arg-type]  # a factory of protocols
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",  # not a line for each malformed request: `Places` counts them
        access_log=False,
        server_header=False,
        timeout_keep_alive=config.idle_s,  # type: ignore[arg-type]  # a delay of the event loop
    )
    uvicorn_config.load()
    return uvicorn_config

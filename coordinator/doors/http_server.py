"""The HTTP server: binds, serves `app` in the coordinator's own event loop, stops. Knows no path and no tenant.

The port is bound before anything slow starts, so that a port in use is known at once; calls are served after `start`.
Whoever waits for a result costs a coroutine, not a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import uvicorn

from coordinator.base.config import HttpConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.calls import Surroundings
from coordinator.doors.http.connections import Connection, connections_max
from coordinator.doors.http.downloads import Downloads
from coordinator.doors.http.tokenizers import leave_tokenizers
from coordinator.doors.http_app import make_app
from coordinator.service import Service
from coordinator.service.auth import Principal

_KEEP_ALIVE_S = 75
"""Longer than the SDK keeps a connection that it does not use."""


_DROP_S = 5.0
"""How long connections that were dropped may take to end."""


class HttpDoorError(Exception):
    """The door cannot open; the text says why and what to change."""


class HttpDoor:
    """One HTTP server: `bind`, `start`, then `refuse` if something is to be done before `stop`; each once."""

    def __init__(self, config: HttpConfig, wall: Callable[[], float] = time.time) -> None:
        """`wall` is the time of day, in seconds."""
        self._config = config
        self._wall = wall
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_refusing = False

    @property
    def port(self) -> int:
        """The bound port."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where clients on this machine find it: what TINKER_BASE_URL is set to."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)  # noqa: S104  # compared
        host = f"[{host}]" if ":" in host else host
        return f"{'https' if self._config.is_tls else 'http'}://{host}:{self.port}"

    def bind(self) -> None:
        """Take the port. Raises HttpDoorError if it is in use or not to be had."""
        host, port = self._config.host, self._config.port
        try:
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
            )
            family, kind, protocol, _, address = found[0]
            # Only with the protocol named does asyncio send small answers at once; else each waits some 40 ms.
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self._close_socket()
            raise HttpDoorError(
                f"cannot listen on port {port} of {host} for HTTP: {(error.strerror or str(error)).lower()}; stop what "
                "uses it, or choose another port with --http-port (0 takes any free one)"
            ) from error

    async def start(
        self,
        service: Service,
        authenticate: Callable[[str], Principal],
        is_healthy: Callable[[], bool],
        tokenizers_dir: Path,
    ) -> None:
        """Serve. Tokenizers are left in `tokenizers_dir` for clients on this machine. Raises HttpDoorError, OSError."""
        assert self._socket is not None, "bind first"
        config = self._config
        tokenizers: Mapping[str, Path] = {}
        if not config.is_remote:
            tokenizers = await leave_tokenizers(service, tokenizers_dir)

        app = make_app(
            Surroundings(
                service=service,
                authenticate=authenticate,
                is_healthy=is_healthy,
                message_bytes_max=config.message_bytes_max,
                body_s=config.body_s,
                check_open=self._check_open,
                poll_s=config.poll_s,
                tokenizers=tokenizers,
                downloads=Downloads(self._wall),
                is_remote=config.is_remote,
                wall=self._wall,
            )
        )
        self._server = _Server(_uvicorn_config(app, config))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http door")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise HttpDoorError("the HTTP server ended while it started; its log says why")
            await asyncio.sleep(0.01)

    async def refuse(self) -> None:
        """Take no new calls; those that run go on."""
        self._is_refusing = True
        if self._server is not None:
            self._server.should_exit = True

    async def stop(self, grace_s: float) -> None:
        """End the calls that run when they are done, at the latest after `grace_s`. Idempotent."""
        await self.refuse()
        if self._server is not None and self._serving is not None:
            done, _ = await asyncio.wait((self._serving,), timeout=grace_s)
            if not done:
                self._server.drop_calls()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._serving, _DROP_S)
        self._close_socket()

    def _check_open(self) -> None:
        if self._is_refusing:
            raise ServiceError(
                Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down: try again", retry_delay_s=1.0
            )

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """A server whose process has other owners: signals are theirs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def drop_calls(self) -> None:
        """End what still runs: its clients see a closed connection, and nothing goes on behind their backs."""
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()
        for connection in self.server_state.connections:
            if connection.transport is not None:
                connection.transport.abort()


def _uvicorn_config(app: object, config: HttpConfig) -> uvicorn.Config:
    connection = functools.partial(
        Connection, num_max=connections_max(config.connections_max), head_s=config.head_s, body_s=config.body_s
    )
    uvicorn_config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # any ASGI application
        http=connection,  # type: ignore[arg-type]  # whatever makes a protocol
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        ssl_ca_certs=str(config.tls_client_ca) if config.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
    )
    try:
        uvicorn_config.load()
    except (OSError, ssl.SSLError) as error:
        raise HttpDoorError(
            f"are {config.tls_cert} and {config.tls_key} a certificate and its key, in PEM? {error}"
        ) from error
    return uvicorn_config

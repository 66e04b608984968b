"""The gRPC server: binds a port, serves calls, reports health, stops. Does not depend on RPCs or tenants.

The port is bound before anything slow starts, so that a port in use is reported at once; calls are served after
`start`.
"""

from __future__ import annotations

import asyncio
import logging

import grpc

from coordinator.base.config import GrpcConfig
from coordinator.doors.door import Backend, DoorError, check_free, connections_max
from coordinator.doors.grpc.calls import Calls
from coordinator.doors.grpc.intake import Intake
from coordinator.doors.grpc.public import PublicCalls
from coordinator.doors.rpcs import SERVICES
from coordinator.doors.tls import Tls, TlsFiles

_log = logging.getLogger(__name__)
HEALTH_INTERVAL_S = 1.0
"""Seconds between two updates of the health service."""
PENDING_MAX = 16_384
"""Calls that have arrived and not begun, of all connections: as many as 64 full ones have. Each holds 11 kB."""
RESPONSE_BYTES_MAX = 64 << 20
"""Largest response: results may be larger than requests."""
_STOPPING_S = 86400.0
"""Grace of running calls while the coordinator stops: unlimited, for the coordinator itself ends them."""
_CLOSING_S = 2.0
"""Seconds for closing connections without calls. A peer that does not read the replies to its pings takes gRPC 20 s."""


class GrpcDoor:
    """One gRPC server. Call `bind`, `start`, optionally `refuse`, and `stop`, each once and in this order."""

    def __init__(self, config: GrpcConfig) -> None:
        self._config = config
        self._server: grpc.aio.Server
        self._public = PublicCalls([service.full_name for service in SERVICES])
        self._health_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        """The bound port."""
        return self._port

    def bind(self) -> None:
        """Bind the port, on the running loop. Raises DoorError if it is in use or not available."""
        config = self._config
        self._server = grpc.aio.server(options=_options(config))
        check_free(config.host, config.port, "--port")
        address = f"[{config.host}]:{config.port}" if ":" in config.host else f"{config.host}:{config.port}"
        try:
            if config.is_tls:
                self._port = self._server.add_secure_port(address, _credentials(TlsFiles(config)))
            else:
                self._port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            hint = f"; are {config.tls_cert} and {config.tls_key} a certificate and its key, in PEM?"
            raise DoorError(f"cannot listen on {address}{hint if config.is_tls else f': {error}'}") from error

    async def start(self, backend: Backend) -> None:
        """Serve the RPCs and, updated every second, the health of the backend."""
        intake = Intake(self._config)
        backend.limits.update(grpc_received_bytes=intake.budget, grpc_readers=intake.readers)
        calls = Calls(backend, intake, self._config.host)
        self._server.add_generic_rpc_handlers((calls, self._public))  # asked in this order
        self._public.set_health(is_serving=backend.health())
        await self._server.start()
        self._health_task = asyncio.create_task(self._watch_health(backend), name="grpc health")

    async def refuse(self) -> None:
        """Report NOT_SERVING and accept no new calls; running calls continue."""
        if self._health_task is None or self._closing is not None:
            return
        self._health_task.cancel()
        self._public.close()
        self._closing = asyncio.create_task(self._server.stop(_STOPPING_S), name="grpc closing")
        await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` seconds for running calls, then cancel them. Idempotent.

        Returns `_CLOSING_S` after that also if connections are still open: they end with the process.
        """
        await self.refuse()
        if self._closing is None:
            return
        stopping = asyncio.create_task(self._server.stop(grace_s), name="grpc stopping")
        closed, still_open = await asyncio.wait([stopping, self._closing], timeout=grace_s + _CLOSING_S)
        for each in closed:
            each.result()
        if still_open:
            _log.warning("gRPC has not closed its connections within %g s; they end with the process", _CLOSING_S)

    async def _watch_health(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            self._public.set_health(is_serving=backend.health())


def _credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that follow the files: grpc asks for them before each handshake."""

    def configuration(tls: Tls) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(tls.key, tls.certificate)], tls.authorities)

    used = files.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if (tls := files.current()) is used:
            return None
        used = tls
        return configuration(tls)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used),
        fetch,  # type: ignore[arg-type]  # None: the configuration has not changed
        require_client_authentication=used.authorities is not None,
    )


def _options(config: GrpcConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),  # on by default: two servers would silently share one port
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.max_send_message_length", RESPONSE_BYTES_MAX),
        ("grpc.max_concurrent_streams", config.streams_max),
        ("grpc.server.max_pending_requests", PENDING_MAX),  # above it, grpc cancels calls of anybody at random
        ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX + PENDING_MAX // 4),
        # A stream that is not read holds at most this; with probes of the bandwidth, the window grows to 8 MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 64 << 10),
        ("grpc.http2.max_frame_size", 4 << 20),  # without the probes it stays at 16 KiB: slower for large requests
        ("grpc.max_allowed_incoming_connections", connections_max(config.connections_max, 4)),
        ("grpc.server_handshake_timeout_ms", 10_000),  # also of connections that send nothing
        ("grpc.max_metadata_size", 8 << 10),  # a key and the headers of a client take under 1 KiB
        ("grpc.absolute_max_metadata_size", 16 << 10),
        # No bound: above one, grpc adds an error for each ping to a list that it copies each time, for seconds.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", round(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # of the server's own pings
        ("grpc.max_connection_idle_ms", round(config.idle_s_max * 1000)),
        ("grpc.max_connection_age_ms", round(config.connection_age_s_max * 1000)),
        ("grpc.max_connection_age_grace_ms", round(config.connection_grace_s * 1000)),
    ]

"""`/metrics` in Prometheus's formats, on a port of its own.

A door without keys: it shows numbers only, and listens on this machine unless the operator says otherwise. Collects on
the event loop, where everything that it reads changes. While it serves, it measures how late the loop is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector, make_asgi_app
from prometheus_client.registry import Collector

from coordinator.base.config import MetricsConfig
from coordinator.doors.door import DoorError, listen_error
from coordinator.observe.metrics import EVENT_LOOP_LAG_SECONDS, REGISTRY

LAG_INTERVAL_S = 0.25


class MetricsDoor:
    """One server of metrics. Call `bind`, `start` and `stop`, each once and in this order."""

    def __init__(self, config: MetricsConfig) -> None:
        self.config = config
        self._socket: socket.socket | None = None
        self._server: _Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def port(self) -> int:
        """The bound port."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where the metrics are, for programs on this machine."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self.port}/metrics"

    def bind(self) -> None:
        """Bind the port. Raises DoorError if it is in use or not available."""
        host, port = self.config.host, self.config.port
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise listen_error(host, port, error, "--metrics-port") from error

    async def start(self, gauges: Collector) -> None:
        """Serve the counters of this process and these gauges. Raises DoorError."""
        assert self._socket is not None, "bind first"
        registry = CollectorRegistry()
        for each in (REGISTRY, gauges, ProcessCollector(registry=None)):
            registry.register(each)
        config = uvicorn.Config(
            make_asgi_app(registry),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=64,
        )
        self._server = _Server(config)
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="metrics door")
        self._tasks = [serving, asyncio.create_task(_measure_lag(), name="event loop lag")]
        while not self._server.started:
            if serving.done():
                raise DoorError("the server of metrics ended during its start; the log has the reason")
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Stop. Idempotent."""
        if self._server is not None:
            self._server.should_exit = True
        for task in self._tasks[1:]:
            task.cancel()
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=1.0)
            for task in pending:
                task.cancel()
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _measure_lag() -> None:
    while True:
        due = time.monotonic() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        EVENT_LOOP_LAG_SECONDS.observe(max(0.0, time.monotonic() - due))

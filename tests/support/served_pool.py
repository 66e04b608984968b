"""A coordinator behind both real doors, on a thread of its own, for tests that use it as programs do.

Its engines are toys or those of the shipped model. A test may stop it and start it again under its clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tinkerpool
from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig
from coordinator.coordinator import Coordinator
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from tests.support.loop_thread import LoopThread
from tests.support.toy_pool import ToyPool, running_pool
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

SHIPPED_MODEL = Path(__file__).parents[2] / "workers" / "models" / "kjv-2m"
SHIPPED = {"kjv-2m": SHIPPED_MODEL}


class ServedPool(LoopThread):
    """Every start has the same ports and the same data directory."""

    def __init__(
        self, data_dir: Path, running: Callable[[], AbstractAsyncContextManager[ToyPool]], **http: Any
    ) -> None:
        """`running`: starts a coordinator, and stops it. `http`: settings of the HTTP door."""
        super().__init__()
        self._data_dir = data_dir
        self._running = running
        self._http = http
        self._parts = AsyncExitStack()
        self._keys: dict[str, str] = {}
        self._port = 0
        self._http_port = 0
        self.pool: ToyPool

    @property
    def coordinator(self) -> Coordinator:
        """The coordinator that was started last."""
        return self.pool.coordinator

    @property
    def url(self) -> str:
        """The URL of the gRPC door."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def http_url(self) -> str:
        """The URL of the HTTP door, for the Tinker SDK."""
        return f"http://127.0.0.1:{self._http_port}"

    def key(self, tenant: str = "alice") -> str:
        """Return a tenant's API key, created at first use."""
        if tenant not in self._keys:
            self._keys[tenant], _ = self.run(self.coordinator.authenticator.create_key(tenant))
        return self._keys[tenant]

    def client(self, tenant: str) -> tinkerpool.ServiceClient:
        """Return a client with a tenant's key."""
        return tinkerpool.ServiceClient(base_url=self.url, api_key=self.key(tenant))

    def revoke(self, tenant: str) -> None:
        """Revoke a tenant's API key."""
        self.run(self.coordinator.authenticator.revoke_key(self._keys.pop(tenant).split("_")[1]))

    def release(self) -> None:
        """End a `pool.hold()`."""
        self.run(self.pool.release())

    def start(self) -> None:
        """Start, or start again."""
        self.run(self._start())

    def stop(self) -> None:
        """Stop as the server does: take no new calls, end what waits in the coordinator, then close."""
        self.run(self._parts.aclose())

    async def _start(self) -> None:
        self._parts = AsyncExitStack()
        door = GrpcDoor(GrpcConfig(port=self._port))
        door.bind()
        self._parts.push_async_callback(door.stop, 0)
        self.pool = await self._parts.enter_async_context(self._running())
        await door.start(self.coordinator)
        self._parts.push_async_callback(door.refuse)
        self._port = door.port
        http_door = HttpDoor(HttpConfig(port=self._http_port, **self._http))
        http_door.bind()
        await http_door.start(self.coordinator, self._data_dir / "tokenizers")
        self._parts.push_async_callback(http_door.stop, 0)
        self._http_port = http_door.port


@contextmanager
def restartable_pool(
    data_dir: Path, poll_s: float = 30.0, message_bytes_max: int = 16 << 20, **options: Any
) -> Iterator[ServedPool]:
    """Serve toy engines until the block ends. `options`: those of `running_pool`."""
    running = partial(running_pool, data_dir, **options)
    with _served(ServedPool(data_dir, running, poll_s=poll_s, message_bytes_max=message_bytes_max)) as pool:
        yield pool


@contextmanager
def shipped_pool(
    data_dir: Path, models: Mapping[str, Path] = SHIPPED, *, num_slots: int = 4, host_bytes_max: int = 0
) -> Iterator[ServedPool]:
    """Serve real models, each on one thread, until the block ends. `models`: directories by name."""
    served = tuple(PoolModel(name=name, path=str(path)) for name, path in models.items())
    config = PoolConfig(kind="local", models=served, num_threads=1, num_slots=num_slots, host_bytes_max=host_bytes_max)
    with _served(ServedPool(data_dir, partial(_running_models, data_dir, config))) as pool:
        yield pool


@contextmanager
def _served(pool: ServedPool) -> Iterator[ServedPool]:
    pool.start()
    try:
        yield pool
    finally:
        pool.stop()
        pool.close()


@asynccontextmanager
async def _running_models(data_dir: Path, config: PoolConfig) -> AsyncIterator[ToyPool]:
    coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir), make_pool(config))
    await coordinator.start()
    try:
        yield ToyPool(coordinator, engines={})
    finally:
        await coordinator.stop()

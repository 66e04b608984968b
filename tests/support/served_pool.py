"""A pool of the shipped model behind both real doors, on a thread of its own, for tests that use it as programs do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinkerpool
from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig
from coordinator.coordinator import Coordinator
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from workers.contract.settings import PoolConfig, PoolModel
from workers.pool.factory import make_pool

SHIPPED_MODEL = Path(__file__).parents[2] / "workers" / "models" / "kjv-2m"
SHIPPED = {"kjv-2m": SHIPPED_MODEL}


@dataclass(slots=True)
class ServedPool:
    """A running pool: the addresses of its doors, and its coordinator."""

    url: str
    http_url: str
    coordinator: Coordinator
    _loop: asyncio.AbstractEventLoop

    def key(self, tenant: str) -> str:
        """Return a new key of a tenant."""
        creating = self.coordinator.authenticator.create_key(tenant)
        return asyncio.run_coroutine_threadsafe(creating, self._loop).result(60)[0]

    def client(self, tenant: str) -> tinkerpool.ServiceClient:
        """Return a client with a new key of a tenant."""
        return tinkerpool.ServiceClient(base_url=self.url, api_key=self.key(tenant))


@contextmanager
def shipped_pool(
    data_dir: Path, models: Mapping[str, Path] = SHIPPED, *, num_slots: int = 4, host_bytes_max: int = 0
) -> Iterator[ServedPool]:
    """Start pool, coordinator and doors; stop them when the block ends. `models`: directories by name."""
    served = tuple(PoolModel(name=name, path=str(path)) for name, path in models.items())
    config = PoolConfig(kind="local", models=served, num_slots=num_slots, host_bytes_max=host_bytes_max)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any, timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    async def start() -> tuple[Coordinator, GrpcDoor, HttpDoor]:
        coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir), make_pool(config))
        door = GrpcDoor(GrpcConfig(port=0))
        door.bind()
        await coordinator.start()
        await door.start(coordinator)
        http_door = HttpDoor(HttpConfig(port=0))
        http_door.bind()
        await http_door.start(coordinator, data_dir / "tokenizers")
        return coordinator, door, http_door

    async def stop() -> None:
        await door.refuse()
        await http_door.refuse()
        await coordinator.stop()
        await door.stop(1.0)
        await http_door.stop(1.0)

    coordinator, door, http_door = call(start())
    try:
        yield ServedPool(f"http://127.0.0.1:{door.port}", http_door.url, coordinator, loop)
    finally:
        call(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()

"""A whole pool behind both real doors, on a thread of its own: for tests that use it as a program would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinkerpool
from coordinator.base.config import CoordinatorConfig, GrpcConfig, HttpConfig
from coordinator.coordinator import Coordinator
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from workers.contract.protocols import Pool

SHIPPED_MODEL = Path(__file__).parents[2] / "workers" / "models" / "kjv-2m"


@dataclass(slots=True)
class ServedPool:
    """Its address, its administrator's key, and the coordinator inside."""

    url: str
    http_url: str
    admin_key: str
    coordinator: Coordinator
    _loop: asyncio.AbstractEventLoop

    def key(self, tenant: str) -> str:
        """A new key of a tenant."""
        creating = self.coordinator.authenticator.create_key(tenant)
        return asyncio.run_coroutine_threadsafe(creating, self._loop).result(10)[0]

    def client(self, tenant: str) -> tinkerpool.ServiceClient:
        """A client with a key of its own."""
        return tinkerpool.ServiceClient(base_url=self.url, api_key=self.key(tenant))


@contextmanager
def served_pool(data_dir: Path, make_pool: Callable[[], Pool], **config: Any) -> Iterator[ServedPool]:
    """Start pool, coordinator and doors; stop them when the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(coroutine: Any, timeout_s: float = 120.0) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)

    async def start() -> tuple[Coordinator, GrpcDoor, HttpDoor, str]:
        coordinator = Coordinator(CoordinatorConfig(data_dir=data_dir, **config), make_pool())
        door = GrpcDoor(GrpcConfig(port=0))
        door.bind()
        await coordinator.start()
        await door.start(coordinator)
        http_door = HttpDoor(HttpConfig(port=0))
        http_door.bind()
        await http_door.start(coordinator, data_dir / "tokenizers")
        return coordinator, door, http_door, await coordinator.first_admin_key() or ""

    async def stop() -> None:
        await door.refuse()
        await http_door.refuse()
        await coordinator.stop()
        await door.stop(1.0)
        await http_door.stop(1.0)

    coordinator, door, http_door, admin_key = call(start())
    try:
        yield ServedPool(f"http://127.0.0.1:{door.port}", http_door.url, admin_key, coordinator, loop)
    finally:
        call(stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()

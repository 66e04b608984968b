"""A coordinator over toy engines behind both real doors, that a test stops and starts again under its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from coordinator.base.config import GrpcConfig, HttpConfig
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from tests.support.toy_pool import ToyPool, running_pool

T = TypeVar("T")


class RestartablePool:
    """Runs on a thread of its own. Every start has the same ports and the same data directory."""

    def __init__(self, data_dir: Path, poll_s: float = 30.0, message_bytes_max: int = 16 << 20, **options: Any) -> None:
        self._data_dir = data_dir
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._parts = AsyncExitStack()
        self._keys: dict[str, str] = {}
        self._http: dict[str, Any] = {"poll_s": poll_s, "message_bytes_max": message_bytes_max}
        self._port = 0
        self._http_port = 0
        self.pool: ToyPool

    @property
    def thread(self) -> threading.Thread:
        """The thread of its event loop."""
        return self._thread

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
            self._keys[tenant], _ = self.run(self.pool.coordinator.authenticator.create_key(tenant))
        return self._keys[tenant]

    def revoke(self, tenant: str) -> None:
        """Revoke a tenant's API key."""
        self.run(self.pool.coordinator.authenticator.revoke_key(self._keys.pop(tenant).split("_")[1]))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the pool's event loop; return the result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def release(self) -> None:
        """End a `pool.hold()`."""
        self.run(self.pool.release())

    def start(self) -> None:
        """Start, or start again."""
        self.run(self._start())

    def stop(self) -> None:
        """Stop serving, then stop the coordinator."""
        self.run(self._parts.aclose())

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _start(self) -> None:
        self._parts = AsyncExitStack()
        self.pool = await self._parts.enter_async_context(running_pool(self._data_dir, **self._options))
        coordinator = self.pool.coordinator
        door = GrpcDoor(GrpcConfig(port=self._port))
        door.bind()
        await door.start(coordinator)
        self._parts.push_async_callback(door.stop, 0)
        self._port = door.port
        http_door = HttpDoor(HttpConfig(port=self._http_port, **self._http))
        http_door.bind()
        await http_door.start(coordinator, self._data_dir / "tokenizers")
        self._parts.push_async_callback(http_door.stop, 0)
        self._http_port = http_door.port


@contextmanager
def restartable_pool(data_dir: Path, **options: Any) -> Iterator[RestartablePool]:
    """Start a pool; stop it when the block ends. `options`: those of `running_pool`, and settings of the HTTP door."""
    pool = RestartablePool(data_dir, **options)
    pool.start()
    try:
        yield pool
    finally:
        pool.stop()
        pool.close()

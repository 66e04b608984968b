"""A gRPC door with a fake service on its own thread, for tests of synchronous programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.base.config import GrpcConfig
from coordinator.doors.grpc.server import GrpcDoor
from tests.support.doors.fake_service import FakeBackend


@contextmanager
def open_door(service: object, config: GrpcConfig = GrpcConfig(port=0)) -> Iterator[str]:  # noqa: B008  # frozen
    """Serve until the block ends; yield the URL."""
    door: GrpcDoor
    loop = asyncio.new_event_loop()
    opened = threading.Event()
    url = ""

    async def start() -> None:
        nonlocal door, url
        door = GrpcDoor(config)
        door.bind()
        await door.start(FakeBackend(service))
        url = f"{'https' if config.tls_cert else 'http'}://127.0.0.1:{door.port}"

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        opened.set()
        loop.run_forever()
        loop.run_until_complete(door.stop(0))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert opened.wait(60)
    yield url
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    assert not thread.is_alive()

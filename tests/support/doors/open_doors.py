"""Doors in front of a fake service or of a pool, on free ports, that are open until a block ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from coordinator.base.config import GrpcConfig, HttpConfig
from coordinator.doors.door import Backend
from coordinator.doors.grpc.server import GrpcDoor
from coordinator.doors.http_server import HttpDoor
from tests.support.doors.fake_service import FakeBackend
from tests.support.loop_thread import LoopThread


@asynccontextmanager
async def grpc_door(backend: FakeBackend, **config: Any) -> AsyncIterator[GrpcDoor]:
    """Open a gRPC door. `config`: as for `GrpcConfig`."""
    door = GrpcDoor(GrpcConfig(**({"port": 0} | config)))
    door.bind()
    await door.start(backend)
    try:
        yield door
    finally:
        await door.stop(0.1)


@asynccontextmanager
async def http_door(
    backend: Backend, data_dir: Path = Path("nowhere"), time: Any = None, **config: Any
) -> AsyncIterator[HttpDoor]:
    """Open an HTTP door to other machines. `config`: as for `HttpConfig`; `time`: as for the door."""
    settings = {"port": 0, "is_remote": True, "allow_plaintext": True} | config
    door = HttpDoor(HttpConfig(**settings), *[time] * (time is not None))
    door.bind()
    await door.start(backend, data_dir)
    try:
        yield door
    finally:
        await door.stop(0)  # running calls are of no interest any more


@contextmanager
def open_door(service: object, **config: Any) -> Iterator[str]:
    """Open a gRPC door on a thread of its own, for tests of synchronous programs; yield its URL."""
    with LoopThread() as thread, thread.entered(grpc_door(FakeBackend(service), **config)) as door:
        yield f"{'https' if 'tls_cert' in config else 'http'}://127.0.0.1:{door.port}"

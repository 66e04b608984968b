"""Attacks by calls that need no key: health checks, and calls with keys that do not exist."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scripts.attack.attack import BODY_BYTES, NO_KEY, Attack, Target
from scripts.attack.calls import connect, counted, status_of
from scripts.attack.frames import Connection
from scripts.attack.pool import AttackedPool, stopped
from tinkerpool.v1 import sessions_pb2, sessions_pb2_grpc

NUM_CLIENTS = 16
WATCH, CHECK = "/grpc.health.v1.Health/Watch", "/grpc.health.v1.Health/Check"
NUM_WATCHERS = 300
"""More than the pool takes, at any scale."""
OTHER_ADDRESS = "127.0.0.2"
"""The watchers' own: the pool's other clients connect from 127.0.0.1."""
WATCH_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 25.0
HEALTH_POLL_S = 0.25


async def health_watch(target: Target) -> AsyncGenerator[None, None]:
    """Watch the health and never open the window for the reply."""
    yield
    connection = await Connection.open(target.grpc, window=0)
    await connection.call(WATCH, b"")
    target.tally["watching"] += 1
    await asyncio.sleep(1)
    yield
    await connection.close()


async def health_watchers(target: Target) -> AsyncGenerator[None, None]:
    """Watch the health 300 times from one address, half of the times without reading the replies."""
    yield
    connections = [
        await Connection.open(target.grpc, window=window, source=OTHER_ADDRESS) for window in (0, 1 << 16) * 5
    ]
    for connection in connections:
        for _ in range(NUM_WATCHERS // len(connections)):
            await connection.call(WATCH, b"")
            target.tally["watches begun"] += 1
    await asyncio.sleep(1)
    target.tally["ended by the pool"] = sum(each.num_ended for each in connections)
    yield
    for connection in connections:
        await connection.close()


def watch_from_another_address(pool: AttackedPool) -> str:
    """Watch the health from an address that has no watcher yet; tell what the pool replied."""
    with pool.new_channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = next(health.Watch(health_pb2.HealthCheckRequest(), timeout=WATCH_TIMEOUT_S))
        except grpc.RpcError as error:
            return f"Watch from another address: {error.code().name}"
    return f"Watch from another address said {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


def health_of_a_stopped_worker(pool: AttackedPool) -> str:
    """Stop the only worker for some time; tell how long the pool went on reporting that it is healthy."""
    workers = pool.worker_pids()
    if not workers:
        return ""
    begin = time.monotonic()
    with stopped(workers[0]), pool.new_channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < begin + HEALTH_TIMEOUT_S:
            try:
                reply = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError as error:
                return f"Check: {error.code().name}"
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                return f"Check said NOT_SERVING {time.monotonic() - begin:.0f} s after the only worker stopped"
            time.sleep(HEALTH_POLL_S)
    return f"Check said SERVING for {HEALTH_TIMEOUT_S:.0f} s with the only worker stopped"


async def health_unfinished(target: Target) -> AsyncGenerator[None, None]:
    """Send 20 requests of the largest size to Health/Check, each without its last byte."""
    yield
    connection = await Connection.open(target.grpc)
    sizes = await asyncio.gather(*(connection.send_most(CHECK, BODY_BYTES) for _ in range(target.many(20))))
    target.tally["MB taken"] = round(sum(sizes) / 1e6)
    target.tally["streams ended by the pool"] = connection.num_ended
    yield
    await connection.close()


async def unknown_keys_grpc(target: Target) -> AsyncGenerator[None, None]:
    """Call over gRPC with keys of the right form that do not exist."""
    yield
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(target.grpc, options=options) as channel:
        stub = sessions_pb2_grpc.SessionServiceStub(channel)

        async def client() -> None:
            while target.is_on():
                metadata = (("authorization", f"Bearer {unknown_key()}"),)
                await counted(target, stub.GetCapabilities(sessions_pb2.GetCapabilitiesRequest(), metadata=metadata))

        await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))


async def unknown_keys_http(target: Target) -> AsyncGenerator[None, None]:
    """Do the same over HTTP, on connections that are kept."""
    yield

    async def client() -> None:
        reader, writer = await connect(target.http)
        try:
            while target.is_on():
                head = f"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: x\r\nX-API-Key: {unknown_key()}\r\n\r\n"
                writer.write(head.encode())
                target.tally[f"HTTP {await status_of(reader)}"] += 1
                headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await reader.readexactly(int(headers.partition("content-length: ")[2].partition("\r")[0]))
        finally:
            writer.close()

    await asyncio.gather(*(counted(target, client()) for _ in range(NUM_CLIENTS)))


def unknown_key() -> str:
    """Return a key that has the right form and does not exist."""
    return f"tp_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"


ATTACKS = (
    Attack(
        name="health-watch",
        by=NO_KEY,
        text="one Health/Watch whose reader never opens its flow-control window; then the only worker is stopped",
        program=health_watch,
        observe=health_of_a_stopped_worker,
        is_held=True,
    ),
    Attack(
        name="health-watchers",
        by=NO_KEY,
        text="300 Health/Watch from one address, half of them unread; then a client of another address watches",
        program=health_watchers,
        observe=watch_from_another_address,
        is_held=True,
    ),
    Attack(
        name="health-unfinished",
        by=NO_KEY,
        text="20 requests of the largest size to Health/Check, each one byte short of its end",
        program=health_unfinished,
        is_held=True,
    ),
    Attack(
        name="unknown-keys-grpc",
        by=NO_KEY,
        text="calls over gRPC with unknown keys of the right form, 16 at a time without a pause",
        program=unknown_keys_grpc,
    ),
    Attack(
        name="unknown-keys-http",
        by=NO_KEY,
        text="the same over HTTP",
        program=unknown_keys_http,
    ),
)

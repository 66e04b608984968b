"""Attacks by one tenant with much metadata: lists of it, lists that are not awaited, and a disk that it fills."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.calls import Tenant, connect, counted, counted_all, status_of
from tinkerpool.v1 import sessions_pb2

if TYPE_CHECKING:
    from scripts.attack.pool import AttackedPool

METADATA = {"notes": "x" * 16_000}
"""Almost as much as a row may have."""
AT_ONCE = 8
DISK_BYTES, DISK_FREE_MIN, STORED_BYTES_MAX = 80_000_000, "24MiB", "16MiB"


async def sessions_listed(target: Target) -> AsyncGenerator[None, None]:
    """List 900 sessions with 16 kB of metadata each, eight lists at a time."""
    tenant = Tenant(target)
    await counted_all(target, (tenant.create_session(metadata=METADATA) for _ in range(target.many(900))))
    yield
    request = sessions_pb2.ListSessionsRequest(page_size=1000)

    async def listing() -> None:
        while target.is_on():
            await counted(target, tenant.sessions.ListSessions(request, metadata=tenant.metadata))

    await asyncio.gather(*(listing() for _ in range(AT_ONCE)))


async def models_listed(target: Target) -> AsyncGenerator[None, None]:
    """List the models of 1,000 checkpoints with 16 kB of metadata each, eight lists at a time."""
    await _save(target)
    yield

    async def listing() -> None:
        while target.is_on():
            await counted(target, _get(target, "/v1/models"))

    await asyncio.gather(*(listing() for _ in range(AT_ONCE)))


async def lists_abandoned(target: Target) -> AsyncGenerator[None, None]:
    """Send 300 requests for lists of 1,000 checkpoints over HTTP, and hang up after a second."""
    await _save(target)
    yield
    writers = []
    for _ in range(target.many(300)):
        with contextlib.suppress(OSError):
            _, writer = await connect(target.http)
            writer.write(_head(target, "/api/v1/checkpoints?limit=1000"))
            writers.append(writer)
    await asyncio.sleep(1.0)
    for writer in writers:
        writer.transport.abort()
    target.tally["requests"] = len(writers)


async def disk_filled(target: Target) -> AsyncGenerator[None, None]:
    """Create sessions with 16 kB of metadata without a pause, on a disk of 80 MB."""
    yield
    tenant = Tenant(target)
    while target.is_on():
        await counted(target, tenant.create_session(metadata=METADATA))
        if target.tally["FAILED_PRECONDITION"]:  # over its quota: ended sessions count on for a day
            await asyncio.sleep(0.01)


def kill_on_a_full_disk(pool: AttackedPool) -> str:
    """Fill the rest of the disk, kill the coordinator and start it again; return what it then serves."""
    pool.fill_disk()
    pool.kill()
    seconds = pool.start_again()
    return f"killed on the full disk, it served again after {seconds:.0f} s: {pool.status().problem}"


async def _save(target: Target) -> None:
    """Save 1,000 checkpoints with metadata."""
    tenant = Tenant(target)
    adapter = await tenant.adapter(rank=1)
    saves = (tenant.save(adapter, seq, f"c{seq}", metadata=METADATA) for seq in range(1, target.many(1000) + 1))
    await tenant.wait([(await save).name for save in saves])


async def _get(target: Target, path: str) -> int:
    reader, writer = await connect(target.http)
    try:
        writer.write(_head(target, path))
        status = await status_of(reader)
        await reader.read()
        return status
    finally:
        writer.close()


def _head(target: Target, path: str) -> bytes:
    lines: Iterable[str] = (
        f"GET {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {target.key}",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode()


ATTACKS = (
    Attack(
        name="sessions-listed",
        by=TENANT,
        text="lists of 900 sessions with 16 kB of metadata each, eight at a time",
        program=sessions_listed,
    ),
    Attack(
        name="models-listed",
        by=TENANT,
        text="`/v1/models` of 1,000 checkpoints with 16 kB of metadata each, eight at a time",
        program=models_listed,
    ),
    Attack(
        name="lists-abandoned",
        by=TENANT,
        text="300 lists of 1,000 such checkpoints over HTTP, whose client leaves after a second",
        program=lists_abandoned,
    ),
    Attack(
        name="disk-filled",
        by=TENANT,
        text="sessions with 16 kB of metadata without a pause, on a disk of 80 MB; then it is filled, and the "
        "coordinator killed and started again",
        program=disk_filled,
        disk_bytes=DISK_BYTES,
        serve_arguments=("--disk-free-min", DISK_FREE_MIN, "--tenant-limit", f"stored_bytes_max={STORED_BYTES_MAX}"),
        observe=kill_on_a_full_disk,
    ),
)

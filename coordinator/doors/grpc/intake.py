"""Decides which requests are received: reserves their bytes before they are read, fairly by tenant.

grpc reads a message of any length up to `message_bytes_max` once a read begins, and its length is not known before. So
a request is read with that many bytes reserved; then the reservation shrinks to the size of the request, and lasts
until the call ends. A stream that waits for its reservation holds at most 64 KiB. Small requests, such as heartbeats
and waits, have readers of their own, so that they do not wait behind a tenant's slow uploads.

Does not depend on RPCs. Main invariant: the bytes of requests that are being received, or are held by calls, never
exceed `receive_bytes_max`, and one tenant never holds more than a quarter of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from coordinator.base.config import GrpcConfig
from coordinator.base.errors import Code, ServiceError, unavailable
from coordinator.limits.budget import PARTS, Budget

SMALL_BYTES_MAX = 2 << 20
"""Largest request of a call without data for training or sampling. A wait for 10,000 operations has 1 MiB."""
SMALL_READERS = 2
"""Small requests that are read at a time, at most one of each tenant. Each takes a fraction of a millisecond."""
SMALL_S = 5.0
"""Seconds that a small request may take to arrive. It comes in the same packet as its headers, or soon after."""
UNCOUNTED_BYTES = 4096
"""Requests up to this size are not counted after they were read, so that a tenant with large uploads can still call."""
WAITING_MAX = 1024
"""Most calls that wait to be read; a quarter of them of one tenant. Each holds up to 64 KiB."""
RESERVED_READERS = SMALL_READERS + 1
"""Readers that large requests leave: those of small requests, and that of calls without a key."""

Read = Callable[[], Awaitable[bytes]]
"""Reads the request of a call."""


class Received:
    """The bytes of a request, until they are taken: the message that is made of them is as large."""

    def __init__(self, body: bytes) -> None:
        self.num_bytes = len(body)
        self._body = body

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        body, self._body = self._body, b""
        return body


class Intake:
    """Receives requests within the budget."""

    def __init__(self, config: GrpcConfig) -> None:
        self._message_bytes = config.message_bytes_max
        self._receive_s = config.receive_s
        total = config.receive_bytes_max
        self.budget = Budget(
            total - RESERVED_READERS * self._message_bytes, max(total // PARTS, self._message_bytes), WAITING_MAX
        )
        self.readers = Budget(SMALL_READERS, 1, WAITING_MAX, unit="readers")

    @asynccontextmanager
    async def received(self, tenant_id: str, read: Read, *, is_large: bool) -> AsyncIterator[Received]:
        """Read a request, and count its bytes until the block ends.

        Raises ServiceError CALLS_BUSY if there was no room in time, BODY_TOO_SLOW, or REQUEST_TOO_LARGE.
        """
        if is_large:
            await self.budget.take(tenant_id, self._message_bytes, self._receive_s)
            held = self._message_bytes
            try:
                received = Received(await _read_within(self._receive_s, read))
                self.budget.give(tenant_id, held - received.num_bytes)
                held = received.num_bytes
                yield received
            finally:
                self.budget.give(tenant_id, held)
            return
        received = Received(await self._read_small(tenant_id, read))
        if received.num_bytes <= UNCOUNTED_BYTES:
            yield received
            return
        await self.budget.take(tenant_id, received.num_bytes, self._receive_s)
        try:
            yield received
        finally:
            self.budget.give(tenant_id, received.num_bytes)

    async def _read_small(self, tenant_id: str, read: Read) -> bytes:
        await self.readers.take(tenant_id, 1, self._receive_s)
        try:
            body = await _read_within(SMALL_S, read)
        finally:
            self.readers.give(tenant_id, 1)
        if len(body) > SMALL_BYTES_MAX:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "REQUEST_TOO_LARGE",
                f"the request has {len(body)} bytes: this call takes at most {SMALL_BYTES_MAX}; send less at once",
            )
        return body


async def _read_within(seconds: float, read: Read) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await read()
    except TimeoutError:
        raise unavailable(
            "BODY_TOO_SLOW", f"the request did not arrive within {seconds:g} s: try again, or send less at once"
        ) from None

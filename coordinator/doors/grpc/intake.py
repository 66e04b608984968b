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
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from coordinator.base.config import GrpcConfig
from coordinator.base.errors import Code, ServiceError

SMALL_BYTES_MAX = 2 << 20
"""Largest request of a call without data for training or sampling. A wait for 10,000 operations has 1 MiB."""
SMALL_READERS = 2
"""Small requests that are read at a time, at most one of each tenant. Each takes a fraction of a millisecond."""
SMALL_S = 5.0
"""Seconds that a small request may take to arrive. It comes in the same packet as its headers, or soon after."""
UNCOUNTED_BYTES = 4096
"""Requests up to this size are not counted after they were read, so that a tenant with large uploads can still call."""
WAITING_MAX = 2048
"""Most calls that wait to be read; a quarter of them of one tenant. Each holds up to 64 KiB."""
PARTS = 4
"""One tenant may hold one part of everything."""
RESERVED_READERS = SMALL_READERS + 1
"""Readers that large requests leave: those of small requests, and that of calls without a key."""

Read = Callable[[], Awaitable[bytes]]
"""Reads the request of a call."""


class Intake:
    """Receives requests within the budget."""

    def __init__(self, config: GrpcConfig) -> None:
        self._message_bytes = config.message_bytes_max
        self._receive_s = config.receive_s
        total = config.receive_bytes_max
        self._bytes = Budget(
            total - RESERVED_READERS * self._message_bytes, max(total // PARTS, self._message_bytes), WAITING_MAX
        )
        self._readers = Budget(SMALL_READERS, 1, WAITING_MAX)

    @asynccontextmanager
    async def received(self, tenant_id: str, read: Read, *, is_large: bool) -> AsyncIterator[bytes]:
        """Read a request, and count its bytes until the block ends.

        Raises ServiceError CALLS_BUSY if there was no room in time, BODY_TOO_SLOW, or REQUEST_TOO_LARGE.
        """
        if is_large:
            await self._bytes.take(tenant_id, self._message_bytes, self._receive_s)
            held = self._message_bytes
            try:
                body = await _read_within(self._receive_s, read)
                self._bytes.give(tenant_id, held - len(body))
                held = len(body)
                yield body
            finally:
                self._bytes.give(tenant_id, held)
            return
        body = await self._read_small(tenant_id, read)
        if len(body) <= UNCOUNTED_BYTES:
            yield body
            return
        await self._bytes.take(tenant_id, len(body), self._receive_s)
        try:
            yield body
        finally:
            self._bytes.give(tenant_id, len(body))

    async def _read_small(self, tenant_id: str, read: Read) -> bytes:
        await self._readers.take(tenant_id, 1, self._receive_s)
        try:
            body = await _read_within(SMALL_S, read)
        finally:
            self._readers.give(tenant_id, 1)
        if len(body) > SMALL_BYTES_MAX:
            raise ServiceError(
                Code.INVALID_ARGUMENT,
                "REQUEST_TOO_LARGE",
                f"the request has {len(body)} bytes: this call takes at most {SMALL_BYTES_MAX}; send less at once",
            )
        return body


class Budget:
    """An amount that calls take and give back. A call waits if the rest or its tenant's part is too small.

    Tenants with waiting calls take turns; calls of one tenant are served in the order of their arrival.
    """

    def __init__(self, total: int, of_tenant_max: int, waiting_max: int) -> None:
        self._free = total
        self._of_tenant_max = of_tenant_max
        self._waiting_max = waiting_max
        self._taken: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()
        self._num_waiting = 0

    async def take(self, tenant_id: str, amount: int, timeout_s: float) -> None:
        """Take an amount. Raises ServiceError CALLS_BUSY after `timeout_s` seconds, or if too many calls wait."""
        if tenant_id not in self._waiting and self._fits(tenant_id, amount):
            self._grant(tenant_id, amount)
            return
        queue = self._waiting.get(tenant_id, ())
        if self._num_waiting >= self._waiting_max or len(queue) >= self._waiting_max // PARTS:
            raise _busy("too many calls wait to be read")
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant_id, deque()).append((granted, amount))
        self._num_waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await granted
        except BaseException as error:
            if granted.cancelled():
                self._serve()  # without this call, which may have been the first of its tenant
            else:
                self.give(tenant_id, amount)
            if isinstance(error, TimeoutError):
                raise _busy(f"the call was not read within {timeout_s:g} s, because others were") from None
            raise

    def give(self, tenant_id: str, amount: int) -> None:
        """Give an amount back, and serve waiting calls."""
        self._free += amount
        self._taken[tenant_id] -= amount
        if not self._taken[tenant_id]:
            del self._taken[tenant_id]
        if self._waiting:
            self._serve()

    def _fits(self, tenant_id: str, amount: int) -> bool:
        return amount <= self._free and self._taken[tenant_id] + amount <= self._of_tenant_max

    def _grant(self, tenant_id: str, amount: int) -> None:
        self._free -= amount
        self._taken[tenant_id] += amount

    def _serve(self) -> None:
        """Grant what fits, a call of each tenant in turn. Calls that have left are dropped."""
        is_progress = True
        while is_progress:
            is_progress = False
            for tenant_id, queue in list(self._waiting.items()):
                granted, amount = queue[0]
                has_left = granted.cancelled()
                if not has_left and not self._fits(tenant_id, amount):
                    continue
                is_progress = True
                queue.popleft()
                self._num_waiting -= 1
                if queue:
                    self._waiting.move_to_end(tenant_id)
                else:
                    del self._waiting[tenant_id]
                if not has_left:
                    self._grant(tenant_id, amount)
                    granted.set_result(None)


async def _read_within(seconds: float, read: Read) -> bytes:
    try:
        async with asyncio.timeout(seconds):
            return await read()
    except TimeoutError:
        raise ServiceError(
            Code.UNAVAILABLE,
            "BODY_TOO_SLOW",
            f"the request did not arrive within {seconds:g} s: try again, or send less at once",
            retry_delay_s=1.0,
        ) from None


def _busy(why: str) -> ServiceError:
    return ServiceError(Code.RESOURCE_EXHAUSTED, "CALLS_BUSY", f"{why}: try again", retry_delay_s=1.0)

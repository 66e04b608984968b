"""The memory of results that doors are making and sending: bounded, and shared by tenants in turn.

A client that does not read keeps its response in the pool's memory. So a result is read from the store only once there
is room for its bytes, and the room is given back when the response was read, or its connection is closed. Does not
depend on a protocol. Main invariant: results above `UNCOUNTED_BYTES` that are in memory, counted `COPIES` times, never
have more than `RESPONSE_BYTES_MAX` bytes, nor those of one tenant more than its part.
"""

from __future__ import annotations

from coordinator.limits.budget import Budget, Held

RESPONSE_BYTES_MAX = 48 << 20
"""Memory for results that are being made or sent."""
OF_TENANT_MAX = RESPONSE_BYTES_MAX // 3
"""One tenant's part. A result that is larger than this with its copies counts as this much."""
COPIES = 2
"""Times that a result is in memory while it is sent: its bytes, and those that the transport holds."""
UNCOUNTED_BYTES = 16 << 10
"""Results up to this size are not counted, so that a client with large unread results can still fetch the others."""
WAITING_MAX = 256
"""Most calls that wait for room; a quarter of them of one tenant. Each holds a name."""
ROOM_S = 20.0
"""Seconds for which a call waits for room; then it is refused, and its client fetches the result again."""


class Responses:
    """The room of all responses."""

    def __init__(self, bytes_max: int = RESPONSE_BYTES_MAX, of_tenant_max: int = OF_TENANT_MAX) -> None:
        self._of_tenant_max = of_tenant_max
        self.budget = Budget(bytes_max, of_tenant_max, WAITING_MAX, what="results that are being sent")

    def room(self, tenant_id: str) -> Room:
        """Return the room of one call, which takes nothing yet."""
        return Room(Held(self.budget, tenant_id), self._of_tenant_max)


class Room:
    """What the result of one call takes of the room, until `close` or the end of a `with` block."""

    def __init__(self, held: Held, bytes_max: int) -> None:
        self._held = held
        self._bytes_max = bytes_max

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def check(self) -> None:
        """Raise ServiceError CALLS_BUSY if so many calls wait that this one would be refused."""
        self._held.check()

    async def take(self, num_bytes: int) -> None:
        """Wait for room for a result, once. Raises ServiceError CALLS_BUSY after `ROOM_S` seconds."""
        if amount := self._amount(num_bytes):
            await self._held.take(amount, ROOM_S)

    def fit(self, num_bytes: int) -> None:
        """Take what the response that was made needs, or give back the rest. Raises ServiceError CALLS_BUSY."""
        amount = self._amount(num_bytes)
        self._held.grow(amount)
        self._held.shrink(amount)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._held.close()

    def _amount(self, num_bytes: int) -> int:
        return min(COPIES * num_bytes, self._bytes_max) if num_bytes > UNCOUNTED_BYTES else 0

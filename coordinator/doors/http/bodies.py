"""The body of an HTTP request: received and decompressed within budgets, which tenants share in turn.

A body is received after its bytes were taken from one budget, and decompressed after the decompressed ones were taken
from another. A call that holds bytes of the second never waits for the first, so calls cannot wait for each other in a
ring. Does not depend on protocols.

Main invariant: the bodies above `UNCOUNTED_BYTES` that are being received, or are held by calls, never have more than
`receive_bytes_max` bytes.
"""

from __future__ import annotations

import asyncio

import zstandard
from starlette.requests import Request

from coordinator.base.config import HttpConfig
from coordinator.base.errors import Code, ServiceError, invalid, unavailable
from coordinator.limits.budget import PARTS, Budget, Held

UNCOUNTED_BYTES = 16 << 10
"""Bodies up to this size are not counted, so that a tenant with large uploads can still call. Each connection has at
most one, and a buffer of that size anyway."""
WAITING_MAX = 1024
"""Most calls that wait for room for their bodies; a quarter of them of one tenant."""
ROOM_S = 20.0
"""Seconds for which a body waits for room; then its call is refused, and its client sends it again. The SDK ends a call
after 60 s."""
_PIECE_BYTES = 1 << 10
"""Compressed bytes that are decompressed at a time. They can expand 32,768 times before the limit is checked."""
_WINDOW_BYTES = 8 << 20
"""Smallest window of a compressed body that is accepted, for any limit."""
HEAD_BYTES = 64 << 10
"""Length of the head that is kept of a body that is too large: it names the model and the sequence number."""


class UnreadableBody(ServiceError):
    """A body that is refused permanently: too large or malformed. `head` is its beginning, decompressed."""

    def __init__(self, reason: str, message: str, head: bytes = b"") -> None:
        super().__init__(Code.INVALID_ARGUMENT, reason, message)
        self.head = head


class Bodies:
    """The budgets of all bodies: half of `receive_bytes_max` for received bytes, half for decompressed ones."""

    def __init__(self, config: HttpConfig) -> None:
        total = config.receive_bytes_max // 2
        part = max(total // PARTS, config.message_bytes_max)
        self._body_s = config.body_s
        self.received = Budget(total, part, WAITING_MAX)
        self.decompressed = Budget(total, part, WAITING_MAX)

    def of_call(self, tenant_id: str) -> HeldBody:
        """Return the body of a call, not received yet."""
        return HeldBody(Held(self.received, tenant_id), Held(self.decompressed, tenant_id), self._body_s)


class HeldBody:
    """What one call holds of the budgets, until the end of a `with` block."""

    def __init__(self, received: Held, decompressed: Held, body_s: float) -> None:
        """`body_s`: seconds that the body may take to arrive."""
        self._received = received
        self._decompressed = decompressed
        self._body_s = body_s

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *exception: object) -> None:
        self._received.close()
        self._decompressed.close()

    async def received(self, request: Request, limit: int) -> bytes:
        """Return the body, decompressed, of at most `limit` bytes.

        Raises UnreadableBody if it is larger or cannot be decompressed; ServiceError CALLS_BUSY, BODY_TOO_SLOW, or
        INVALID_ARGUMENT for an unknown encoding.
        """
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        await _take(self._received, _announced(request, limit))
        try:
            async with asyncio.timeout(self._body_s):
                body = await _stream(request, limit)
        except TimeoutError:
            raise unavailable(
                "BODY_TOO_SLOW",
                f"the request's body did not arrive within {self._body_s:g} s: try again, or send less at once",
            ) from None
        self._received.shrink(len(body))
        if encoding == "identity":
            if len(body) > limit:
                raise _too_large(limit, body)
            return body
        if encoding != "zstd":
            raise invalid(f"content-encoding {encoding[:40]!r} is not supported: send zstd, or leave the header out")
        num_bytes = _decompressed_bytes(body, limit)
        await _take(self._decompressed, num_bytes)
        body = await asyncio.to_thread(_decompressed, body, limit, num_bytes)
        self._received.close()
        self._decompressed.shrink(len(body))
        return body


def unreadable(message: str, head: bytes | bytearray) -> UnreadableBody:
    """Return the refusal of a malformed body."""
    return UnreadableBody("INVALID_ARGUMENT", message, bytes(head))


async def _take(held: Held, num_bytes: int) -> None:
    if num_bytes > UNCOUNTED_BYTES:
        await held.take(num_bytes, ROOM_S)


def _announced(request: Request, limit: int) -> int:
    """Return how many bytes the body can have at most as it is sent."""
    length = request.headers.get("content-length", "")
    return min(int(length), limit) if length.isascii() and length.isdecimal() and len(length) < 20 else limit


async def _stream(request: Request, limit: int) -> bytes:
    """Return the body as it is sent; of a body above `limit`, a head of more than `limit` bytes."""
    pieces = bytearray()
    async for piece in request.stream():
        pieces += piece
        if len(pieces) > limit:
            break
    return bytes(pieces)


def _decompressed_bytes(compressed: bytes, limit: int) -> int:
    """Return how many bytes a body can have at most when it is decompressed."""
    try:
        num_bytes = zstandard.frame_content_size(compressed)
    except zstandard.ZstdError:
        return 0  # `_decompressed` refuses it
    return min(num_bytes, limit) if num_bytes >= 0 else limit  # below 0: the frame does not say it


def _decompressed(compressed: bytes, limit: int, num_bytes: int) -> bytes:
    pieces = bytearray()
    reader = zstandard.ZstdDecompressor(max_window_size=max(limit, _WINDOW_BYTES)).decompressobj()
    try:
        is_too_large = len(compressed) > limit or zstandard.frame_content_size(compressed) > limit
        for start in range(0, len(compressed), _PIECE_BYTES):
            pieces += reader.decompress(compressed[start : start + _PIECE_BYTES])
            if len(pieces) > limit or (is_too_large and pieces):
                raise _too_large(limit, pieces)
            if len(pieces) > num_bytes:
                raise unreadable(
                    f"the request's body is not zstd: its frame has more than its {num_bytes} bytes",
                    pieces[:HEAD_BYTES],
                )
    except zstandard.ZstdError as error:
        raise unreadable(f"the request's body is not zstd: {error}", pieces) from None
    if not reader.eof or reader.unused_data:
        raise unreadable("the request's body is not zstd: the frame is incomplete, or bytes follow it", pieces)
    return bytes(pieces)


def _too_large(limit: int, head: bytes | bytearray) -> UnreadableBody:
    return UnreadableBody(
        "REQUEST_TOO_LARGE",
        f"the request's body has more than {limit} bytes: send fewer or shorter sequences at once",
        bytes(head[:HEAD_BYTES]),
    )

"""One HTTP call on its way in: who makes it and what it carries. Knows limits and encodings, not what is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.doors.http.downloads import Downloads
from coordinator.service import Service
from coordinator.service.auth import Principal

SMALL_BYTES_MAX = 1 << 20
"""Largest body of a call that carries no data to train or sample on."""
JSON_BYTES_MAX = 8 << 20
"""Largest body in JSON: everybody else waits while it is parsed, and in memory it is many times as large."""
INLINE_BYTES_MAX = 256 << 10
"""What is above is unpacked, read or rendered beside the event loop."""
_FAULTS_SHOWN = 5
_PIECE_BYTES = 1 << 10
"""Packed bytes at a time: they can become 32,768 times as many before these are counted."""
_WINDOW_BYTES = 8 << 20
"""How far back a packed body may refer, whatever the limit."""
_BEGUN_BYTES = 64 << 10
"""What is kept of a body that is too large: who sent it, and at which place, stands in front."""

Body = TypeVar("Body", bound=BaseModel)


class UnreadableBody(ServiceError):
    """A body that is refused for good: too large, or not what it says. `begun` is what was read of it, unpacked."""

    def __init__(self, reason: str, message: str, begun: bytes = b"") -> None:
        super().__init__(Code.INVALID_ARGUMENT, reason, message)
        self.begun = begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the handlers of a door share."""

    service: Service
    authenticate: Callable[[str], Principal]
    """From an API key, perhaps empty, to whose it is. Raises ServiceError UNAUTHENTICATED."""
    is_healthy: Callable[[], bool]
    """Whether cycles can make progress."""
    message_bytes_max: int
    """Largest body, also after it is unpacked."""
    body_s: float
    """How long a body may take to come, in seconds."""
    check_open: Callable[[], None]
    """Raises ServiceError UNAVAILABLE once the door takes nothing new."""
    poll_s: float
    """How long a question for a result is held."""
    tokenizers: Mapping[str, Path]
    """Base model to a directory with its tokenizer, for clients on this machine; empty if there may be others."""
    downloads: Downloads
    is_remote: bool
    """Whether clients may be on other machines."""
    wall: Callable[[], float]
    """The time of day, in seconds."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose key is good."""

    request: Request
    principal: Principal
    door: Surroundings

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.door.service

    @property
    def content_type(self) -> str:
        """What the body says it is."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def path(self, name: str) -> str:
        """A part of the URL's path."""
        value: str = self.request.path_params[name]
        return value

    def number(self, name: str, default: int) -> int:
        """A number of the URL's query, 0 or more. Raises ServiceError INVALID_ARGUMENT."""
        text = self.request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise invalid(f"{name} must be a number, 0 or more, not {text[:40]!r}")
        return int(text)

    async def json(self, model: type[Body], *, bytes_max: int = SMALL_BYTES_MAX) -> Body:
        """The body as JSON of that shape, of so many bytes at most.

        Raises UnreadableBody, naming the fields that are wrong, and what `body` raises.
        """
        body = await self.body(bytes_max=min(bytes_max, JSON_BYTES_MAX))
        if len(body) > INLINE_BYTES_MAX:
            return await asyncio.to_thread(read_json, model, body)
        return read_json(model, body)

    async def body(self, *, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """The body, unpacked, of so many bytes at most.

        Raises UnreadableBody if it is larger or cannot be unpacked, ServiceError BODY_TOO_SLOW, INVALID_ARGUMENT if its
        encoding is not known, or UNAVAILABLE if the door was closed meanwhile.
        """
        limit = min(bytes_max, self.door.message_bytes_max)
        try:
            async with asyncio.timeout(self.door.body_s):
                packed = await self._packed(limit)
        except TimeoutError:
            raise _too_slow(self.door.body_s) from None
        self.door.check_open()
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            if len(packed) > limit:
                raise _too_large(limit, packed)
            return packed
        if encoding != "zstd":
            raise invalid(f"content-encoding {encoding[:40]!r} is not known: send zstd, or leave it out")
        return await asyncio.to_thread(_unpacked, packed, limit)

    async def _packed(self, limit: int) -> bytes:
        """The body as it comes; if it is above `limit`, its beginning, of more than `limit` bytes."""
        pieces = bytearray()
        async for piece in self.request.stream():
            pieces += piece
            if len(pieces) > limit:
                break
        return bytes(pieces)


def read_json(model: type[Body], body: bytes) -> Body:
    """JSON of that shape; no bytes are an empty object. Raises UnreadableBody, naming what is wrong."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        faults = [
            f"{'.'.join(str(part)[:80] for part in fault['loc']) or 'body'}: {fault['msg'][:200]}"
            for fault in errors[:_FAULTS_SHOWN]
        ]
        raise unreadable(f"the request's body is wrong: {'; '.join(faults)}", body) from None


def api_key(request: Request) -> str:
    """The key of a request; empty if there is none."""
    if key := request.headers.get("x-api-key", ""):
        return key.strip()
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def unreadable(message: str, begun: bytes | bytearray) -> UnreadableBody:
    """The refusal of a body that is not what it says."""
    return UnreadableBody("INVALID_ARGUMENT", message, bytes(begun))


def _unpacked(packed: bytes, limit: int) -> bytes:
    pieces = bytearray()
    reader = zstandard.ZstdDecompressor(max_window_size=max(limit, _WINDOW_BYTES)).decompressobj()
    try:
        is_too_large = len(packed) > limit or zstandard.frame_content_size(packed) > limit
        for start in range(0, len(packed), _PIECE_BYTES):
            pieces += reader.decompress(packed[start : start + _PIECE_BYTES])
            if len(pieces) > limit or (is_too_large and pieces):
                raise _too_large(limit, pieces)
    except zstandard.ZstdError as error:
        raise unreadable(f"the request's body is not zstd: {error}", pieces) from None
    if not reader.eof or reader.unused_data:
        raise unreadable("the request's body is not zstd: it is no whole frame, or has something behind it", pieces)
    return bytes(pieces)


def _too_large(limit: int, begun: bytes | bytearray) -> UnreadableBody:
    return UnreadableBody(
        "REQUEST_TOO_LARGE",
        f"the request's body is above {limit} bytes: send fewer or shorter sequences at once",
        bytes(begun[:_BEGUN_BYTES]),
    )


def _too_slow(body_s: float) -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE,
        "BODY_TOO_SLOW",
        f"the request's body did not come within {body_s:g} s: try again, or send less at once",
        retry_delay_s=1.0,
    )

"""An HTTP call: its caller and its body. Applies limits and encodings; does not depend on the protocol of the body."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import zstandard
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from coordinator.base.config import JSON_ITEMS_MAX, JSON_OBJECTS_MAX, JSON_STRINGS_MAX, HttpConfig
from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.base.time import Time
from coordinator.doors.door import Backend
from coordinator.doors.http.downloads import Downloads
from coordinator.doors.http.places import Polls
from coordinator.service import Service
from coordinator.tenants.keys import Principal

SMALL_BYTES_MAX = 1 << 20
"""Largest body of a call without data for training or sampling."""
JSON_BYTES_MAX = 8 << 20
"""Largest body in JSON: parsing holds the interpreter's lock, and the parsed body is many times as large."""
INLINE_BYTES_MAX = 256 << 10
"""Larger bodies are decompressed, parsed and encoded on a thread."""
_FAULTS_SHOWN = 5
_PIECE_BYTES = 1 << 10
"""Compressed bytes that are decompressed at a time. They can expand 32,768 times before the limit is checked."""
_WINDOW_BYTES = 8 << 20
"""Smallest window of a compressed body that is accepted, for any limit."""
HEAD_BYTES = 64 << 10
"""Length of the head that is kept of a body that is too large: it names the model and the sequence number."""

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list. Validation stops at the first wrong item: reasons for a million wrong items would take gigabytes."""
Named = Annotated[dict[str, Item], Field(fail_fast=True)]
"""A dictionary, with the same limit."""


class UnreadableBody(ServiceError):
    """A body that is refused permanently: too large or malformed. `head` is its beginning, decompressed."""

    def __init__(self, reason: str, message: str, head: bytes = b"") -> None:
        super().__init__(Code.INVALID_ARGUMENT, reason, message)
        self.head = head


class Gate:
    """Whether the door accepts new calls."""

    def __init__(self) -> None:
        self._is_closed = False

    def close(self) -> None:
        """Accept no new calls from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise ServiceError UNAVAILABLE once the gate is closed."""
        if self._is_closed:
            raise ServiceError(
                Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down: try again", retry_delay_s=1.0
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorContext:
    """The parts and settings that all handlers of the HTTP door share."""

    backend: Backend
    config: HttpConfig
    gate: Gate
    downloads: Downloads
    polls: Polls
    tokenizers: Mapping[str, Path]
    """Base model to the directory of its tokenizer, for clients on this machine; empty if clients may be remote."""
    time: Time

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.backend.service


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an authenticated principal."""

    request: Request
    principal: Principal
    door: DoorContext

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.door.service

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case; empty if the call has none."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def path(self, name: str) -> str:
        """Return a parameter of the URL's path."""
        value: str = self.request.path_params[name]
        return value

    def number(self, name: str, default: int) -> int:
        """Return a number from the URL's query, 0 or more. Raises ServiceError INVALID_ARGUMENT."""
        text = self.request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise invalid(f"{name} must be a number, 0 or more, not {text[:40]!r}")
        return int(text)

    async def json(self, model: type[Body], *, bytes_max: int = SMALL_BYTES_MAX) -> Body:
        """Return the body, JSON of at most `bytes_max` bytes, parsed as `model`.

        Raises UnreadableBody, which names the wrong fields, and the errors of `body`.
        """
        body = await self.body(bytes_max=min(bytes_max, JSON_BYTES_MAX))
        if len(body) > INLINE_BYTES_MAX:
            return await asyncio.to_thread(read_json, model, body)
        return read_json(model, body)

    async def body(self, *, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """Return the body, decompressed, of at most `bytes_max` bytes.

        Raises UnreadableBody if it is larger or cannot be decompressed; ServiceError BODY_TOO_SLOW, INVALID_ARGUMENT
        for an unknown encoding, or UNAVAILABLE if the door has closed in the meantime.
        """
        limit = min(bytes_max, self.door.config.message_bytes_max)
        try:
            async with asyncio.timeout(self.door.config.body_s):
                compressed = await self._received(limit)
        except TimeoutError:
            raise _too_slow(self.door.config.body_s) from None
        self.door.gate.check_open()
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            if len(compressed) > limit:
                raise _too_large(limit, compressed)
            return compressed
        if encoding != "zstd":
            raise invalid(f"content-encoding {encoding[:40]!r} is not supported: send zstd, or leave the header out")
        return await asyncio.to_thread(_decompressed, compressed, limit)

    async def _received(self, limit: int) -> bytes:
        """Return the body as it was sent; of a body above `limit`, a head of more than `limit` bytes."""
        pieces = bytearray()
        async for piece in self.request.stream():
            pieces += piece
            if len(pieces) > limit:
                break
        return bytes(pieces)


def check_elements(body: bytes) -> None:
    """Raise UnreadableBody if a JSON body has too many elements: its parser would make an object of each.

    Punctuation inside strings counts as well, so that a scan at the speed of memory suffices.
    """
    if len(body) <= JSON_OBJECTS_MAX:
        return
    counts = {
        f"{JSON_OBJECTS_MAX} objects and lists": (body.count(b"{") + body.count(b"[")) / JSON_OBJECTS_MAX,
        f"{JSON_STRINGS_MAX} strings": body.count(b'"') / 2 / JSON_STRINGS_MAX,
        f"{JSON_ITEMS_MAX} items": body.count(b",") / JSON_ITEMS_MAX,
    }
    if (worst := max(counts, key=lambda what: counts[what])) and counts[worst] > 1:
        raise UnreadableBody(
            "REQUEST_TOO_LARGE",
            f"the request's body has more than {worst}: send fewer or shorter sequences at once",
            body[:HEAD_BYTES],
        )


def read_json(model: type[Body], body: bytes) -> Body:
    """Parse JSON as `model`; an empty body is an empty object. Raises UnreadableBody, which names the wrong fields."""
    check_elements(body)
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
    """Return the API key of a request; empty if it has none."""
    if key := request.headers.get("x-api-key", ""):
        return key.strip()
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def unreadable(message: str, head: bytes | bytearray) -> UnreadableBody:
    """Return the refusal of a malformed body."""
    return UnreadableBody("INVALID_ARGUMENT", message, bytes(head))


def _decompressed(compressed: bytes, limit: int) -> bytes:
    pieces = bytearray()
    reader = zstandard.ZstdDecompressor(max_window_size=max(limit, _WINDOW_BYTES)).decompressobj()
    try:
        is_too_large = len(compressed) > limit or zstandard.frame_content_size(compressed) > limit
        for start in range(0, len(compressed), _PIECE_BYTES):
            pieces += reader.decompress(compressed[start : start + _PIECE_BYTES])
            if len(pieces) > limit or (is_too_large and pieces):
                raise _too_large(limit, pieces)
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


def _too_slow(body_s: float) -> ServiceError:
    return ServiceError(
        Code.UNAVAILABLE,
        "BODY_TOO_SLOW",
        f"the request's body did not arrive within {body_s:g} s: try again, or send less at once",
        retry_delay_s=1.0,
    )

"""One HTTP call on its way in: who makes it and what it carries. Knows limits and encodings, not what is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from coordinator.auth import Principal
from coordinator.errors import Code, ServiceError, invalid
from coordinator.http_gateway.downloads import Downloads
from coordinator.service import Service

_PIECE_BYTES = 1 << 20
_WINDOW_BYTES = 8 << 20
"""How far back a packed body may refer, whatever the limit."""

Body = TypeVar("Body", bound=BaseModel)


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
    poll_s: float
    """How long a question for a result is held."""
    tokenizers: Mapping[str, Path]
    """Base model to a directory with its tokenizer, for clients on this machine; empty if there may be others."""
    downloads: Downloads
    is_remote: bool
    """Whether clients may be on other machines."""


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

    async def json(self, model: type[Body]) -> Body:
        """The body as JSON of that shape. Raises ServiceError INVALID_ARGUMENT, naming the fields that are wrong."""
        body = await self.body()
        try:
            return model.model_validate_json(body or b"{}")
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, fault['loc'])) or 'body'}: {fault['msg']}" for fault in error.errors()]
            raise invalid(f"the request's body is wrong: {'; '.join(faults[:5])}") from None

    async def body(self) -> bytes:
        """The body, unpacked. Raises ServiceError REQUEST_TOO_LARGE, or INVALID_ARGUMENT if it cannot be unpacked."""
        limit = self.door.message_bytes_max
        pieces = bytearray()
        async for piece in self.request.stream():
            pieces += piece
            if len(pieces) > limit:
                raise _too_large(limit)
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding == "identity":
            return bytes(pieces)
        if encoding != "zstd":
            raise invalid(f"content-encoding {encoding[:40]!r} is not known: send zstd, or leave it out")
        return _unpacked(bytes(pieces), limit)


def api_key(request: Request) -> str:
    """The key of a request; empty if there is none."""
    if key := request.headers.get("x-api-key", ""):
        return key.strip()
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _unpacked(packed: bytes, limit: int) -> bytes:
    pieces = bytearray()
    try:
        if zstandard.frame_content_size(packed) > limit:
            raise _too_large(limit)
        with zstandard.ZstdDecompressor(max_window_size=max(limit, _WINDOW_BYTES)).stream_reader(packed) as reader:
            while piece := reader.read(_PIECE_BYTES):
                pieces += piece
                if len(pieces) > limit:
                    raise _too_large(limit)
    except zstandard.ZstdError as error:
        raise invalid(f"the request's body is not zstd: {error}") from None
    return bytes(pieces)


def _too_large(limit: int) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "REQUEST_TOO_LARGE",
        f"the request's body is above {limit} bytes: send fewer or shorter sequences at once",
    )

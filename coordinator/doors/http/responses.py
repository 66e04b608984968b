"""Responses of both HTTP protocols: statuses of refusals, large JSON bodies, server-sent events, listings.

Does not depend on paths or protocols. Main invariant: a large body is encoded without blocking other calls. A thread
alone is not enough for that: the interpreter's fast encoder holds the interpreter's lock until it is done.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.door import ERROR_ID
from coordinator.doors.http.request_ids import REQUEST_ID
from tinkerpool.errors import http_status

T = TypeVar("T")

RETRY_S_MAX = 60.0
"""Longest delay before a retry. The SDKs do not accept a longer one."""
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def status_of(error: ServiceError) -> int:
    """Return the HTTP status of a refusal."""
    if error.retry_delay_s is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE if error.code is Code.UNAVAILABLE else HTTPStatus.TOO_MANY_REQUESTS
    return http_status(error.code, error.reason, is_ceiling=error.quota is not None)


def headers_of(error: ServiceError, num_retries: int = 0) -> dict[str, str]:
    """Return the headers of a refusal: the id of an internal error; the delay before a retry, where that makes sense.

    The delay doubles with each retry that the client has made, up to `RETRY_S_MAX`: some calls of the Tinker SDK are
    given up after 10 retries, which last five minutes so. A longer delay of a rate is also sent as `RETRY_S_MAX`: the
    SDKs ignore what is longer, and would give up sooner. The message has the whole delay.
    """
    if error.retry_delay_s is None:
        return {REQUEST_ID: error_id} if (error_id := error.metadata.get(ERROR_ID)) else {}
    delay_s = min(error.retry_delay_s * 2 ** min(num_retries, 10), RETRY_S_MAX)
    return {"retry-after": str(math.ceil(delay_s)), "retry-after-ms": str(round(delay_s * 1000))}


def num_retries(request: Request) -> int:
    """Return how often the client says that it has repeated a call; 0 if it does not say it."""
    text = request.headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 4 else 0


def encode_json(content: Any) -> bytes:
    """Return JSON, encoded value by value, so that other threads run in between."""
    return "".join(ENCODER.iterencode(content)).encode()


class PiecewiseJson(JSONResponse):
    """A response whose body is encoded value by value."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode_json(content)


class ReadResponse(Response):
    """A response that ends when most of its body was read."""

    def __init__(self, response: Response) -> None:
        """Send `response`."""
        self.status_code = response.status_code
        self.background = None
        self.body = response.body
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. The server waits before the end of the body until the client has read most of it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": bytes(self.body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Streamed(Response):
    """A response whose body is made while it is sent."""

    def __init__(
        self, pieces: AsyncGenerator[bytes], media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send `pieces`; close them at the end, or when the call is cancelled."""
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces. The server waits before the next one until the client has read most of those before."""
        async with contextlib.aclosing(self._pieces):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def event_stream(events: AsyncGenerator[bytes]) -> Response:
    """Return a response of server-sent events."""
    return Streamed(events, "text/event-stream", {"cache-control": "no-cache", "x-accel-buffering": "no"})


async def json_list(name: str, slices: AsyncGenerator[list[Any]], others: Mapping[str, Any]) -> Response:
    """Return a response with an object that has the `others`, and a list of this name, made in slices.

    Raises what the first slice raises; after it an error could only cut the connection.
    """
    first = await anext(slices, None)

    async def pieces() -> AsyncGenerator[bytes]:
        yield f"{ENCODER.encode(others)[:-1]},{ENCODER.encode(name)}:[".encode()
        async with contextlib.aclosing(slices):
            items, separator = first, ""
            while items is not None:
                if items:
                    yield (separator + ENCODER.encode(items)[1:-1]).encode()
                    separator = ","
                items = await anext(slices, None)
        yield b"]}"

    return Streamed(pieces(), "application/json")

"""Responses of both HTTP protocols: statuses of refusals, large JSON bodies, server-sent events, early disconnects.

Does not depend on paths or protocols. Main invariant: a large body is encoded without blocking other calls. A thread
alone is not enough for that: the interpreter's fast encoder holds the interpreter's lock until it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Awaitable
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.door import ERROR_ID
from coordinator.doors.http.request_ids import REQUEST_ID

T = TypeVar("T")

_STATUS = {
    Code.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    Code.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.DATA_LOSS: HTTPStatus.UNPROCESSABLE_ENTITY,
}
_REASON_STATUS = {
    "SESSION_ENDED": HTTPStatus.FORBIDDEN,
    "SESSION_GONE": HTTPStatus.GONE,
    "PROMISE_GONE": HTTPStatus.GONE,
    "REQUEST_TOO_LARGE": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "RESULT_TOO_LARGE": HTTPStatus.NOT_ACCEPTABLE,
    "SESSION_UNKNOWN": HTTPStatus.FORBIDDEN,
}
RETRY_S_MAX = 60.0
"""Longest delay before a retry. The SDKs do not accept a longer one."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def status_of(error: ServiceError) -> int:
    """Return the HTTP status of a refusal.

    OpenAI's client retries 408, 409, 429 and everything from 500 on a few times, and the Tinker SDK for minutes. So
    these statuses are for refusals of calls that may succeed later; a permanent refusal gets another 4xx.
    """
    if error.retry_delay_s is not None:
        return HTTPStatus.SERVICE_UNAVAILABLE if error.code is Code.UNAVAILABLE else HTTPStatus.TOO_MANY_REQUESTS
    if error.quota is not None:
        return HTTPStatus.FORBIDDEN
    return _REASON_STATUS.get(error.reason) or _STATUS.get(error.code, HTTPStatus.BAD_REQUEST)


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
    return "".join(_ENCODER.iterencode(content)).encode()


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


async def cancel_on_disconnect(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnect.

    The request's body must have been read to its end.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """Server-sent events: a response whose body is made while it is sent."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        """Send `events`; close them at the end, or when the client disconnects."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until their end or until the client disconnects."""
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect):
                await cancel_on_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

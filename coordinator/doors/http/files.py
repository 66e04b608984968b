"""Files as responses: the whole, or one range of bytes, so that a download can be resumed and checked.

Does not depend on what a file is. Starlette's `FileResponse` reads a path; its parser of ranges is private, and refuses
a malformed `Range` instead of leaving it out (RFC 9110, 14.2). Main invariant: a response that ends has all its bytes;
any error after its beginning cuts the connection.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, ExitStack, aclosing
from dataclasses import dataclass
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.doors.door import to_refusal
from coordinator.doors.http.connections import CLIENT, Client

_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})\s*", re.ASCII | re.IGNORECASE)
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class File:
    """A file to be sent."""

    name: str
    """Under which a client saves it: ASCII without quotation marks."""
    num_bytes: int | None
    """None: not known before its end, so that it has no ranges."""
    version: str
    """Two files of the same one have the same bytes."""
    read: Callable[[int, int], AsyncGenerator[bytes]]
    """Yields the bytes from one place up to another. Raises ServiceError."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its whole."""
        headers = {
            "cache-control": "private, no-store",
            "content-disposition": f'attachment; filename="{self.name}"',
            "content-type": "application/octet-stream",
        }
        if self.num_bytes is not None:
            headers |= {"accept-ranges": "bytes", "content-length": str(self.num_bytes), "etag": self.etag}
        return headers

    @property
    def etag(self) -> str:
        """The strong validator of RFC 9110."""
        return f'"{self.version}"'


def asked_range(request: Request, file: File) -> range | None:
    """Return the one range of bytes that a request asks for, empty if it begins behind the end; None: the whole.

    Several ranges, a malformed one, one of another unit, and one of another version are answered with the whole.
    """
    found = _RANGE.fullmatch(request.headers.get("range", ""))
    is_of_version = request.headers.get("if-range", file.etag) == file.etag
    if request.method != "GET" or file.num_bytes is None or found is None or not is_of_version:
        return None
    first, last = found.groups()
    if not first:
        return range(max(0, file.num_bytes - int(last)), file.num_bytes) if last else None
    if not last:
        return range(int(first), file.num_bytes)
    return range(int(first), min(int(last) + 1, file.num_bytes)) if int(first) <= int(last) else None


def head_response(file: File) -> Response:
    """Return the response to HEAD."""
    response = Response(headers=file.headers)
    if file.num_bytes is None:
        del response.headers["content-length"]
    return response


class FileResponse(Response):
    """A file, or a range of it, whose first piece was read."""

    def __init__(
        self,
        file: File,
        asked: range | None,
        first: bytes,
        pieces: AsyncGenerator[bytes],
        while_valid: AbstractContextManager[None],
        held: ExitStack,
    ) -> None:
        """Send `first`, then `pieces`, within `while_valid`; then close `pieces` and `held`."""
        super().__init__(headers=file.headers)
        if asked is not None:
            self.status_code = HTTPStatus.PARTIAL_CONTENT
            self.headers["content-range"] = f"bytes {asked.start}-{asked.stop - 1}/{file.num_bytes}"
            self.headers["content-length"] = str(len(asked))
        elif file.num_bytes is None:
            del self.headers["content-length"]
        self._first, self._pieces, self._while_valid, self._held = first, pieces, while_valid, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces. The server waits before the next one until the client has read most of those before."""
        with self._held:
            try:
                async with aclosing(self._pieces):
                    with self._while_valid:
                        await self._send(send)
            except Exception as error:  # noqa: BLE001  # after the beginning no status can be sent
                path = scope["path"]
                logger.info("the response to GET %s was cut: %s", path, to_refusal(error, f"GET {path}").message)
                client: Client = scope["state"][CLIENT]
                await client.cut()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""Gives each HTTP response a name, the header `x-request-id`. Does not depend on protocols.

A client may send the name itself, if it is short and plain. A response that has the header already keeps it: the name
of an internal error is the id under which the log has it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_HEADER = REQUEST_ID.encode()
_PLAIN = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """An ASGI application whose responses have names."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = given if _PLAIN.fullmatch(given) else secrets.token_hex(8).encode()

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if not any(name == _HEADER for name, _ in headers):
                    headers.append((_HEADER, request_id))
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_named)

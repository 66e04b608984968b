"""JSON bodies that may be large, made without blocking other calls. Does not depend on paths or protocols.

A thread alone is not enough: the interpreter's fast encoder holds the interpreter's lock until it is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.doors.http.calls import INLINE_BYTES_MAX

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode_json(content: Any) -> bytes:
    """Return JSON, encoded value by value, so that other threads run in between."""
    return "".join(_ENCODER.iterencode(content)).encode()


class PiecewiseJson(JSONResponse):
    """A response whose body is encoded value by value."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode_json(content)


async def make_response(num_bytes: int, make: Callable[[], Response]) -> Response:
    """Return the response that `make` makes from `num_bytes` of data: on a thread if that is much."""
    if num_bytes <= INLINE_BYTES_MAX:
        return make()
    return await asyncio.to_thread(make)

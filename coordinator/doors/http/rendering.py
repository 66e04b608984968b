"""Answers that may be large, made so that nobody else waits for them. Knows no paths and nothing of what is told.

A thread alone would not do: the interpreter's fast encoder lets no other thread run until it is done.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from coordinator.doors.http.calls import INLINE_BYTES_MAX

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def written(content: Any) -> bytes:
    """JSON, written value by value, so that other threads have their turns in between."""
    return "".join(_ENCODER.iterencode(content)).encode()


class PiecewiseJson(JSONResponse):
    """An answer that is written so."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return written(content)


async def rendered(num_bytes: int, make: Callable[[], Response]) -> Response:
    """What `make` makes of so many bytes: beside the event loop if they are many."""
    if num_bytes <= INLINE_BYTES_MAX:
        return make()
    return await asyncio.to_thread(make)

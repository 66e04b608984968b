"""Calls of Ray's actors, which end with the Ray or the incarnation that they are for. Knows nothing of workers."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from workers.pool.ray_host import RayHost


class Ended(Exception):
    """The incarnation, or its Ray, has ended; the text says why."""


async def reply(reference: Any, *, unless: asyncio.Future[str]) -> Any:
    """Wait for a call's reply. Raises RayError if the call fails, and Ended as soon as `unless` is done."""
    replied = asyncio.wrap_future(reference.future())
    del reference  # a traceback would keep it alive
    try:
        await asyncio.wait((replied, unless), return_when=asyncio.FIRST_COMPLETED)
        if unless.done():
            raise Ended(unless.result())
        return replied.result()
    finally:
        if not replied.cancel():
            replied.exception()  # retrieved, so that asyncio does not report it


def kill(handle: Any, host: RayHost) -> None:
    """Have Ray end an actor."""
    if host.ended.done():
        return  # Ray has ended, and all its actors with it
    with suppress(RayError, ValueError):  # the actor or Ray has died already
        ray.kill(handle, no_restart=True)


def reason(error: BaseException) -> str:
    """Return the cause of a failed call, without a traceback and without Ray's advice."""
    if isinstance(error, RayTaskError):
        return str(error.cause)
    lines = [line for line in str(error).splitlines() if line and not line.startswith(("\t", " "))]
    return " ".join(lines).partition(" Some common causes")[0]

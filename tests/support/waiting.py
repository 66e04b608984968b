"""Waits for conditions of which no event tells: in threads, in other processes, and inside of a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Seconds after which a condition counts as never met. Long, because the machine may be busy."""
POLL_S = 0.005
"""Seconds between two looks at a condition."""


def wait_until(is_so: Callable[[], object], timeout_s: float = WAIT_S) -> float:
    """Block until a condition holds; return how many seconds that took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - began


async def until(is_so: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Let the event loop run until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110  # this is the place for conditions without an event
            await asyncio.sleep(POLL_S)

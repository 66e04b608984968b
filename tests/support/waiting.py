"""Waits for conditions that have no event: in threads, in other processes, and inside a pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Seconds after which a wait fails. Long, because the machine may be busy."""
POLL_S = 0.005
"""Seconds between two checks of a condition."""


def wait_until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> float:
    """Block until a condition holds; return how many seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(POLL_S)
    return time.monotonic() - began


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Let the event loop run until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # these conditions have no event
            await asyncio.sleep(POLL_S)

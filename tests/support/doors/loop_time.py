"""Measures callbacks of an event loop by the processor time of its thread, which other processes do not change."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class LoopTime:
    """What the callbacks in a block took."""

    longest_s: float = 0.0
    longest: str = ""
    """The callback that took `longest_s` seconds."""


@contextmanager
def loop_time() -> Iterator[LoopTime]:
    """Measure the callbacks of the running loop until the block ends.

    Patches asyncio, which has no seam for it: every callback runs in `Handle._run`. No garbage is collected meanwhile:
    a collection would walk over what all tests have left, and count for whichever callback it fell into.
    """
    measured, run = LoopTime(), asyncio.Handle._run

    def measured_run(self: asyncio.Handle) -> None:
        began = time.thread_time()
        run(self)
        if (took := time.thread_time() - began) > measured.longest_s:
            measured.longest_s, measured.longest = took, repr(self)

    asyncio.Handle._run = measured_run  # type: ignore[method-assign]
    gc.disable()
    try:
        yield measured
    finally:
        gc.enable()
        asyncio.Handle._run = run  # type: ignore[method-assign]

"""Time as the coordinator sees it, and the decision when a cycle starts.

The core reads time only through `Time`, so that a simulation can own it. `CycleClock` knows who is ready and who was in
the last cycle; it knows neither what they asked for nor who runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")
SLICE_S = 1.0
"""A wait is cut into slices of this length, so that a pause of the whole process counts as one of them."""


class Time(Protocol):
    """The only source of time."""

    def monotonic(self) -> float:
        """Seconds of service time; steps of the wall clock do not touch it."""

    def wall(self) -> float:
        """Seconds since 1970, for people to read; nothing is decided by it."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What the work gives, if it is done in time. Raises TimeoutError.

    Time in which this process itself did not run (it was stopped, or the machine slept) does not count.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if seconds <= 0:
                raise TimeoutError
            slice_s, began = min(SLICE_S, seconds), loop.time()
            await asyncio.wait((task,), timeout=slice_s)
            seconds -= min(slice_s, loop.time() - began)
        return task.result()
    finally:
        task.cancel()


class SystemTime:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """See `Time`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `Time`."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """See `Time`."""
        await asyncio.sleep(seconds)


class CycleClock:
    """Event-driven: a cycle starts as soon as the workers are free and something is ready.

    A lone tenant never waits. With several, the start lingers, at most `linger_s`, for tenants of the last cycle that
    have nothing ready yet, and only while the ready work leaves room in the budget.
    """

    def __init__(self, time_source: Time, linger_s: float) -> None:
        self._time = time_source
        self._linger_s = linger_s
        self._wake = asyncio.Event()
        self._last_tenants: frozenset[str] = frozenset()

    def notify(self) -> None:
        """Something about what is ready has changed."""
        self._wake.set()

    def finished(self, tenants: frozenset[str]) -> None:
        """A cycle with these tenants has committed: they are expected back."""
        self._last_tenants = tenants

    async def next_cycle(
        self, is_ready: Callable[[], bool], ready_tenants: Callable[[], frozenset[str]], is_full: Callable[[], bool]
    ) -> None:
        """Return when the next cycle shall start."""
        while not is_ready():
            self._wake.clear()
            await self._wake.wait()
        deadline = self._time.monotonic() + self._linger_s
        while len(self._last_tenants) > 1 and not is_full() and self._last_tenants - ready_tenants():
            remaining = deadline - self._time.monotonic()
            if remaining <= 0:
                break
            self._wake.clear()
            await self._first_of(self._wake.wait(), self._time.sleep(remaining))

    @staticmethod
    async def _first_of(*waits: object) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

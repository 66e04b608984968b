"""Time and signals: clocks, waits with a deadline, and wake-ups without data.

Does not depend on any other module. Main invariants: all code reads clocks through `Time`, so that a
simulation can own it; a notification is never lost.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


SLICE_S = 1.0
"""Waits are cut into slices of this length: a pause of the whole process counts as at most one slice."""


class Time(Protocol):
    """The only source of time."""

    def monotonic(self) -> float:
        """Return seconds of service time; steps of the wall clock do not affect it."""

    def wall(self) -> float:
        """Return seconds since 1970, for people to read. No decision depends on it but the expiry of API keys."""

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""


def day_of(wall: float) -> int:
    """Return the calendar day of a moment of the wall clock, in UTC, as a number that grows: 20261126."""
    moment = time.gmtime(wall)
    return day_number(moment.tm_year, moment.tm_mon, moment.tm_mday)


def day_number(year: int, month: int, day: int) -> int:
    """Return a day of the calendar as a number that grows: 20261126."""
    return (year * 100 + month) * 100 + day


def month_after(month: int) -> int:
    """Return the calendar month after one, see `month_of`."""
    return month + 1 if month % 100 < 12 else (month // 100 + 1) * 100 + 1


def month_of(day: int) -> int:
    """Return the calendar month of a day, as a number that grows: 202611."""
    return day // 100


def backoff_s(first_s: float, longest_s: float, num_doublings: int) -> float:
    """Return a pause in seconds: `first_s`, doubled so often, at most `longest_s`."""
    return min(longest_s, first_s * 2.0 ** min(num_doublings, 64))


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of the work if it ends in time. Raises TimeoutError.

    Time in which this process did not run (it was stopped, or the machine slept) does not count.
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


async def first_of(*waits: Awaitable[object]) -> None:
    """Return when the first of these waits ends; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
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


class Signal:
    """A wake-up without data: a producer signals that its state has changed, and receivers read that state.

    A receiver clears its own event before it reads, so that no notification is lost; several count as one.
    """

    def __init__(self) -> None:
        self._receivers: list[asyncio.Event] = []

    def subscribe(self, receiver: asyncio.Event) -> None:
        """Set this event at each notification from now on."""
        self._receivers.append(receiver)

    def notify(self) -> None:
        """Wake every receiver."""
        for receiver in self._receivers:
            receiver.set()


class Alarms:
    """Notifies a signal when times come at which its state changes though nothing else happens."""

    def __init__(self, signal: Signal, now: Callable[[], float]) -> None:
        self._signal = signal
        self._now = now
        self._times: list[float] = []
        """A heap."""
        self._is_set = asyncio.Event()

    def set(self, at: float) -> None:
        """Notify the signal at this time, by the clock `now`."""
        heapq.heappush(self._times, at)
        self._is_set.set()

    async def run(self, clock: Time) -> None:
        """Notify the signal at all times that are set; run until cancelled."""
        while True:
            self._is_set.clear()
            if not self._times:
                await self._is_set.wait()
                continue
            if (wait_s := self._times[0] - self._now()) > 0:
                await first_of(clock.sleep(wait_s), self._is_set.wait())
                continue
            while self._times and self._times[0] <= self._now():
                heapq.heappop(self._times)
            self._signal.notify()

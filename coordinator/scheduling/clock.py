"""Time as the coordinator sees it, and the decision when a cycle starts.

The core reads time only through `Time`, so that a simulation can own it. `CycleClock` knows who is ready, who was in
earlier cycles and what a cycle costs; it knows neither what they asked for nor who runs it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from coordinator.base.time import Time
from coordinator.scheduling.cost_model import CycleCosts

UNMEASURED_S = 0.004
"""The longest linger while the costs of a cycle are not known, and for a tenant whose returns are not."""
LOOK_S = 0.001
"""How often it is looked at, while lingering, whether the budget is full: not at each of a thousand arrivals."""
RETURNS_KEPT, RETURNS_MIN = 5, 3
"""Returns of a tenant that are remembered, and from how many on the slowest is taken for an exception."""
LATE = 2.0
"""How many times its usual absence a tenant is waited for, where that still pays."""
GUESSES_MAX = 8
"""How often a cycle lingers while the fixed cost of one is not known."""
GIVEN_UP_S = 1.0
"""An absence after which a tenant is not thought of any more."""
TENANTS_KEPT = 4096
"""Tenants whose returns are remembered."""


class CycleClock:
    """Event-driven: a cycle starts as soon as the workers are free and something is ready.

    The start may linger for tenants of earlier cycles who usually come back soon, because whoever misses a cycle costs
    another one. So it lingers at most for what a cycle costs whatever it carries, which is no more than waiting saves;
    at most `linger_s`; only for those whom past returns say to expect within that; and only while what is ready leaves
    room in the budget. Where nobody else is expected, nobody waits: a lone tenant never does.
    """

    def __init__(self, time_source: Time, linger_s: float, costs: CycleCosts) -> None:
        self._time = time_source
        self._linger_s = linger_s
        self._costs = costs
        self._wake = asyncio.Event()
        self._last_tenants: frozenset[str] = frozenset()
        self._away: dict[str, float] = {}
        """Tenants who have nothing ready, and when their last cycle ended; the longest away come first."""
        self._returns: dict[str, deque[float]] = {}
        """How long tenants were away, the last times, in seconds."""
        self._expected: set[str] = set()
        """Whom the start lingers for."""
        self._num_guesses = 0
        """How often it has lingered in a row without knowing what that saves."""

    def notify(self) -> None:
        """Something about what is ready has changed."""
        self._wake.set()

    def arrived(self, tenant: str) -> None:
        """The tenant has asked for something."""
        left = self._away.pop(tenant, None)
        if left is not None:
            self._note_return(tenant, self._time.monotonic() - left)
        self._expected.discard(tenant)
        if not self._expected:
            self._wake.set()

    def finished(self, tenants: frozenset[str]) -> None:
        """A cycle with these tenants has committed."""
        self._last_tenants = tenants
        now = self._time.monotonic()
        for tenant in sorted(tenants):
            self._away.pop(tenant, None)
            self._away[tenant] = now

    async def next_cycle(
        self, is_ready: Callable[[], bool], ready_tenants: Callable[[], frozenset[str]], is_full: Callable[[], bool]
    ) -> None:
        """Return when the next cycle shall start."""
        free_at = self._time.monotonic()
        while not is_ready():
            self._wake.clear()
            await self._wake.wait()
        ready = ready_tenants()
        for tenant in ready:
            # It had asked for more before its cycle ended; or a snapshot was settled, or its turn has come.
            self._away.pop(tenant, None)
        until = self._choose(free_at, len(ready)) if self._away else 0.0
        while self._expected and not is_full():
            remaining = until - self._time.monotonic()
            if remaining <= 0:
                break
            self._wake.clear()
            await self._first_of(self._wake.wait(), self._time.sleep(min(remaining, LOOK_S)))
        self._expected.clear()

    def _choose(self, free_at: float, num_ready: int) -> float:
        """Decide whom to linger for, and until when.

        Whoever is not waited for has a cycle of its own in every round, and while that runs the others come back: it
        costs what is fixed, but then the workers, free since `free_at`, are idle for nobody. Waiting for a part of the
        tenants saves that part of a cycle, so that much it may cost.
        """
        now = self._time.monotonic()
        self._give_up(now)
        absent = sorted(self._absences(now), key=lambda each: each[1] + each[2])
        best_s, chosen, until, fixed_s = 0.0, 0, now, self._fixed_s()
        for number, (_, left, absence_s) in enumerate(absent, 1):
            back_at = max(now, left + absence_s)
            saved_s = fixed_s * (num_ready + number) / (num_ready + len(absent))
            if back_at <= now + self._linger_s and saved_s - (back_at - free_at) > best_s:
                best_s, chosen = saved_s - (back_at - free_at), number
                until = min(now + self._linger_s, free_at + saved_s)
        self._num_guesses += bool(chosen)
        self._expected = {tenant for tenant, _, _ in absent[:chosen]}
        return min(until, max((left + LATE * absence_s for _, left, absence_s in absent[:chosen]), default=now))

    def _fixed_s(self) -> float:
        """What every cycle costs whatever it carries.

        As long as nobody knows, a few times the most that it can be, because only larger cycles than there have been
        will show it; then nothing.
        """
        if self._costs.line is not None:
            self._num_guesses = 0
        elif self._num_guesses >= GUESSES_MAX:
            return 0.0
        return self._costs.fixed_s or 0.0

    def _absences(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Tenants who are away, since when, and for how long they usually are; not those who are late."""
        for tenant, left in self._away.items():
            if (returns := self._returns.get(tenant)) is not None:
                absence_s = sorted(returns)[-2 if len(returns) >= RETURNS_MIN else -1]
            elif tenant in self._last_tenants and len(self._last_tenants) > 1:
                absence_s = now - left + UNMEASURED_S
            else:
                continue
            if now < left + LATE * absence_s:
                yield tenant, left, absence_s

    def _give_up(self, now: float) -> None:
        for tenant, left in list(self._away.items()):
            if now - left < GIVEN_UP_S:
                break
            del self._away[tenant]
            self._note_return(tenant, now - left)

    def _note_return(self, tenant: str, seconds: float) -> None:
        returns = self._returns.pop(tenant, None) or deque(maxlen=RETURNS_KEPT)
        returns.append(seconds)
        self._returns[tenant] = returns
        if len(self._returns) > TENANTS_KEPT:
            del self._returns[next(iter(self._returns))]

    @staticmethod
    async def _first_of(*waits: object) -> None:
        tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

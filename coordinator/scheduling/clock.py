"""When a cycle starts.

Depends on time, on which tenants are ready, on when tenants of earlier cycles returned, and on the cost of a cycle; not
on their operations or on workers. Main invariant: a lone tenant never waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from coordinator.base.time import Time, first_of
from coordinator.operations.registry import Arrivals
from coordinator.scheduling.cost_model import CycleCosts

UNMEASURED_S = 0.004
"""The longest linger while the costs of a cycle are unknown, and for a tenant whose returns are."""
LOOK_S = 0.001
"""While lingering, the interval at which the budget is checked: not at each of a thousand arrivals."""
RETURNS_KEPT, RETURNS_MIN = 5, 3
"""Returns of a tenant that are kept, and the number from which the slowest one is ignored as an exception."""
LATE = 2.0
"""A tenant is awaited for at most this many times its usual absence."""
GUESSES_MAX = 8
"""How many cycles in a row may linger while the fixed cost of one is unknown."""
ABSENCE_S_MAX = 1.0
"""A tenant that was absent for this long is not expected to return any more."""
TENANTS_KEPT = 4096
"""Tenants whose returns are kept."""


class ReadyWork(Protocol):
    """The ready work of one base model, as the clock reads it before a cycle."""

    def is_ready(self) -> bool:
        """Return whether a cycle would run or decide an operation."""

    def tenants(self) -> frozenset[str]:
        """Return the tenants that are ready."""

    def is_full(self) -> bool:
        """Return whether the ready work fills the budget."""


class CycleClock:
    """Event-driven: a cycle starts as soon as the workers are free and something is ready.

    The start may linger for tenants of earlier cycles that usually return soon, because a tenant that misses the cycle
    costs another one. It lingers at most for the fixed cost of a cycle, because waiting saves no more than that. It
    lingers at most for `linger_s`, only for tenants whose past returns were faster than that, and only while the budget
    has room. If no other tenant is expected it does not linger: a lone tenant never waits.
    """

    def __init__(self, time: Time, linger_s: float, costs: CycleCosts, arrivals: Arrivals) -> None:
        self.wake = asyncio.Event()
        """Set when ready work may have changed; subscribe it to the signals of its producers."""
        self._time = time
        self._linger_s = linger_s
        self._costs = costs
        self._arrivals = arrivals
        self._last_tenants: frozenset[str] = frozenset()
        self._away: dict[str, float] = {}
        """Tenants with nothing ready, and when their last cycle ended; the longest absent come first."""
        self._returns: dict[str, deque[float]] = {}
        """Tenant to its last absences, in seconds."""
        self._num_guesses = 0
        """How many cycles in a row lingered with the fixed cost unknown."""

    def finished(self, tenants: frozenset[str]) -> None:
        """Record that a cycle with these tenants has committed."""
        self._note_arrivals()
        self._last_tenants = tenants
        now = self._time.monotonic()
        for tenant in sorted(tenants):
            self._away.pop(tenant, None)
            self._away[tenant] = now

    async def next_cycle(self, work: ReadyWork) -> None:
        """Return when the next cycle is to start."""
        free_at = self._time.monotonic()
        while not work.is_ready():
            self.wake.clear()
            await self.wake.wait()
        self._note_arrivals()
        ready = work.tenants()
        for tenant in ready:
            # It was not absent: it submitted more before its cycle ended, or waited for a snapshot or a quarantine.
            self._away.pop(tenant, None)
        until = self._choose(free_at, len(ready)) if self._away else 0.0
        while self._arrivals.is_awaiting and not work.is_full():
            remaining = until - self._time.monotonic()
            if remaining <= 0:
                break
            self.wake.clear()
            await first_of(self.wake.wait(), self._time.sleep(min(remaining, LOOK_S)))
        self._arrivals.await_tenants(())

    def _note_arrivals(self) -> None:
        for tenant, at in self._arrivals.drain().items():
            left = self._away.pop(tenant, None)
            if left is not None and at >= left:
                self._note_return(tenant, at - left)

    def _choose(self, free_at: float, num_ready: int) -> float:
        """Choose the tenants to linger for; return until when.

        A tenant that is not awaited gets a cycle of its own in every round, which costs the fixed part of a cycle; for
        an awaited one the workers, free since `free_at`, are idle. Waiting for a part of the tenants saves that part of
        a cycle's fixed cost: this is the most that waiting may cost.
        """
        now = self._time.monotonic()
        self._forget_absent(now)
        absent = sorted(self._absences(now), key=lambda each: each[1] + each[2])
        best_s, chosen, until, fixed_s = 0.0, 0, now, self._fixed_s()
        for number, (_, left, absence_s) in enumerate(absent, 1):
            back_at = max(now, left + absence_s)
            saved_s = fixed_s * (num_ready + number) / (num_ready + len(absent))
            if back_at <= now + self._linger_s and saved_s - (back_at - free_at) > best_s:
                best_s, chosen = saved_s - (back_at - free_at), number
                until = min(now + self._linger_s, free_at + saved_s)
        self._num_guesses += bool(chosen)
        self._arrivals.await_tenants(tenant for tenant, _, _ in absent[:chosen])
        return min(until, max((left + LATE * absence_s for _, left, absence_s in absent[:chosen]), default=now))

    def _fixed_s(self) -> float:
        """Return the fixed cost of a cycle, in seconds.

        While it is unknown, return its upper bound for a few cycles, because only larger cycles than those measured
        show it; then zero.
        """
        if self._costs.line is not None:
            self._num_guesses = 0
        elif self._num_guesses >= GUESSES_MAX:
            return 0.0
        return self._costs.fixed_s or 0.0

    def _absences(self, now: float) -> Iterator[tuple[str, float, float]]:
        """Yield absent tenants, since when, and their usual absence in seconds; late ones are left out."""
        for tenant, left in self._away.items():
            if (returns := self._returns.get(tenant)) is not None:
                absence_s = sorted(returns)[-2 if len(returns) >= RETURNS_MIN else -1]
            elif tenant in self._last_tenants and len(self._last_tenants) > 1:
                absence_s = now - left + UNMEASURED_S
            else:
                continue
            if now < left + LATE * absence_s:
                yield tenant, left, absence_s

    def _forget_absent(self, now: float) -> None:
        for tenant, left in list(self._away.items()):
            if now - left < ABSENCE_S_MAX:
                break
            del self._away[tenant]
            self._note_return(tenant, now - left)

    def _note_return(self, tenant: str, seconds: float) -> None:
        returns = self._returns.pop(tenant, None) or deque(maxlen=RETURNS_KEPT)
        returns.append(seconds)
        self._returns[tenant] = returns
        if len(self._returns) > TENANTS_KEPT:
            del self._returns[next(iter(self._returns))]

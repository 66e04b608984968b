"""When tenants submitted operations since the cycle clock last read this. In memory.

Admission notes arrivals; the clock drains them. Main invariant: the signal is raised once no awaited tenant is missing,
so that a thousand arrivals do not wake a lingering clock a thousand times.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.base.signal import Signal
from coordinator.base.time import Time


class Arrivals:
    """The arrivals at one base model."""

    def __init__(self, time: Time, changed: Signal) -> None:
        self._time = time
        self._changed = changed
        self._at: dict[str, float] = {}
        """Tenant to its first arrival since the last `drain`."""
        self._awaited: set[str] = set()

    @property
    def is_awaiting(self) -> bool:
        """Whether an awaited tenant has not arrived."""
        return bool(self._awaited)

    def await_tenants(self, tenants: Iterable[str]) -> None:
        """Signal only once all of these have arrived; empty: signal each arrival."""
        self._awaited = set(tenants)

    def note(self, tenant_id: str) -> None:
        """Record that the tenant has submitted operations."""
        self._at.setdefault(tenant_id, self._time.monotonic())
        self._awaited.discard(tenant_id)
        if not self._awaited:
            self._changed.notify()

    def drain(self) -> dict[str, float]:
        """Return the first arrival of each tenant since the last call, in seconds of service time."""
        arrived, self._at = self._at, {}
        return arrived

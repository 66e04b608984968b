"""What each adapter took of a worker lately, so that new ones are placed where least is going on.

An adapter whose tenant awaits each of its steps has nothing ready between two of them, and its worker is busy
nevertheless. Has names only. Main invariant: it has no adapter that has not run for `ACTIVE_S`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

ACTIVE_S = 60.0
"""Seconds after its last pass for which an adapter counts."""
NEWEST_PART = 0.3
"""Weight of an adapter's last pass in its moving average."""


class RecentLoad:
    """A moving average of the tokens of each adapter's passes."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[float, float]] = {}
        """Adapter to the average, and when it last ran; the longest ago come first."""

    def add(self, tokens: Mapping[str, float], now: float) -> None:
        """Add a pass: adapter to what it costs, in tokens."""
        for adapter_id, number in tokens.items():
            before, _ = self._loads.pop(adapter_id, (number, now))
            self._loads[adapter_id] = before + NEWEST_PART * (number - before), now
        while self._loads:
            adapter_id, (_, at) = next(iter(self._loads.items()))
            if at >= now - ACTIVE_S:
                break
            del self._loads[adapter_id]

    def active(self, now: float) -> Iterator[tuple[str, float]]:
        """Yield the adapters that ran lately, and the average of each."""
        for adapter_id, (average, at) in self._loads.items():
            if at >= now - ACTIVE_S:
                yield adapter_id, average

"""What a run means: shares of tokens, growth of memory, waiting times. Pure; does not depend on pools or clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scripts.bench.common import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Committed tokens of tenants that had something queued all the time."""

    mean: float
    """Of a tenant with weight 1."""
    spread: float
    """The largest deviation of a tenant with weight 1 from that mean, as a part of it."""
    weighted: float
    """Tokens of the tenant with another weight, over the mean."""


def shares_of(tokens: Mapping[str, int], heavy: str) -> Shares:
    """Return the shares of equal tenants, and of the tenant `heavy`, which has another weight."""
    equal = [count for tenant, count in tokens.items() if tenant != heavy]
    mean = statistics.fmean(equal)
    spread = max(abs(count - mean) for count in equal) / mean if mean else float("inf")
    return Shares(mean=mean, spread=spread, weighted=tokens.get(heavy, 0) / mean if mean else 0.0)


@dataclass(slots=True)
class Memory:
    """Resident bytes of the coordinator over time."""

    idle_bytes: int
    """Before the clients came."""
    readings: list[int] = field(default_factory=list)
    """At equal intervals."""

    def third(self, number: int) -> int:
        """Return the most bytes in the first (0), second or last (2) third of the time."""
        size = len(self.readings) / 3
        return max(self.readings[round(number * size) : max(round((number + 1) * size), round(number * size) + 1)])

    @property
    def growth(self) -> float:
        """The last third's maximum over the first third's."""
        return self.third(2) / self.third(0)


def p99_s(latencies_s: Sequence[float]) -> float:
    """Return the 99th percentile; of fewer than 100 values about the longest."""
    return Timing(tuple(latencies_s)).quantile(0.99)

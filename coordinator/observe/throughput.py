"""Tokens a second that were trained and sampled lately, by tenant and worker.

In memory, in seconds of service time. Tokens count when they are committed, in the second in which that happens; a rate
is over the whole of the last seconds. Does not depend on what made the tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

WINDOW_S = 10
"""Whole seconds that a rate is over; the present one is the last of them, and has not ended."""


class Part(NamedTuple):
    """What tokens are counted by."""

    tenant_id: str
    worker_id: str


Rates: TypeAlias = Mapping[Part, float]
"""Tokens a second; only of parts that have some."""


@dataclass(slots=True)
class _Second:
    number: int
    trained: Counter[Part] = field(default_factory=Counter)
    sampled: Counter[Part] = field(default_factory=Counter)


class Throughput:
    """The tokens of all tenants in the last seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._started = monotonic()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S)

    def count_trained(self, tenant_id: str, worker_id: str, num_tokens: int) -> None:
        """Count tokens of a committed cycle."""
        if num_tokens:
            self._present().trained[Part(tenant_id, worker_id)] += num_tokens

    def count_sampled(self, tenant_id: str, worker_id: str, num_tokens: int) -> None:
        """Count the tokens that a finished sample has drawn."""
        if num_tokens:
            self._present().sampled[Part(tenant_id, worker_id)] += num_tokens

    def trained(self) -> Rates:
        """Return the trained tokens a second since the oldest second of the window began, or since the start."""
        return self._rates(each.trained for each in self._seconds if each.number >= self._oldest())

    def sampled(self) -> Rates:
        """Return the sampled tokens a second, likewise."""
        return self._rates(each.sampled for each in self._seconds if each.number >= self._oldest())

    def _oldest(self) -> int:
        return int(self._monotonic()) - WINDOW_S + 1

    def _rates(self, counts: Iterable[Counter[Part]]) -> Rates:
        """Return counts by second as rates. In the first second after the start they are tokens so far."""
        total: Counter[Part] = Counter()
        for each in counts:
            total.update(each)
        span_s = max(1.0, self._monotonic() - max(self._oldest(), self._started))
        return {part: num_tokens / span_s for part, num_tokens in total.items()}

    def _present(self) -> _Second:
        number = int(self._monotonic())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]


def by_tenant(rates: Rates) -> dict[str, float]:
    """Return the tokens a second of each tenant."""
    found: dict[str, float] = {}
    for part, rate in rates.items():
        found[part.tenant_id] = found.get(part.tenant_id, 0.0) + rate
    return found


def by_worker(rates: Rates, tenant_id: str | None) -> dict[str, float]:
    """Return the tokens a second on each worker: of one tenant, or of all (None)."""
    found: dict[str, float] = {}
    for part, rate in rates.items():
        if tenant_id in (None, part.tenant_id):
            found[part.worker_id] = found.get(part.worker_id, 0.0) + rate
    return found

"""The tokens that each tenant has used in this calendar month, UTC: what a budget counts.

The database counts them in the transaction of each outcome; this is read at the start and whenever the wall clock
shows another month, a later or an earlier one: a clock that runs ahead for a moment changes nothing for longer. An
outcome that becomes visible later counts from the same moment in which its operation's claim ends. The month is the
only decision here by the wall clock. Main invariant: after a restart the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.base.time import day_of, month_of
from coordinator.operations.in_flight import InFlightTable
from coordinator.storage.store import Store


class Spending:
    """The tokens of all tenants in this month."""

    def __init__(self, store: Store, in_flight: InFlightTable, wall: Callable[[], float]) -> None:
        self._store = store
        self._in_flight = in_flight
        self._wall = wall
        self._month = 0
        self._stored: Mapping[str, int] = {}
        """The tokens that were stored for the month when it was read."""
        self._before: Mapping[str, int] = {}
        """The tokens of outcomes that had been visible then: the stored ones include those of the month."""

    def tokens(self, tenant_id: str) -> int:
        """Return the tokens that a tenant has used in this month, without those of unfinished operations."""
        if (month := month_of(day_of(self._wall()))) != self._month:
            self._month = month
            self._stored, self._before = self._store.usage.of_month(month), self._in_flight.all_tokens()
        visible = self._in_flight.num_tokens_of(tenant_id) - self._before.get(tenant_id, 0)
        return self._stored.get(tenant_id, 0) + visible

"""The tokens that each tenant has used in this calendar month, UTC: what a budget counts.

The database counts them in the transaction of each outcome, for the day that the commit names. An outcome that becomes
visible later counts here for the same month, from the same moment in which its operation's claim ends. The month is
the only decision here by the wall clock: a clock that runs ahead for a moment changes nothing for longer. Main
invariant: after a restart the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from coordinator.base.time import day_of, month_after, month_of
from coordinator.operations.in_flight import InFlightTable
from coordinator.storage.store import Store


class Spending:
    """The tokens of all tenants in this month."""

    def __init__(self, store: Store, in_flight: InFlightTable, wall: Callable[[], float]) -> None:
        """Read what earlier epochs have stored; nothing of this epoch is committed yet."""
        self._store = store
        self._in_flight = in_flight
        self._wall = wall
        self._earlier: dict[int, Mapping[str, int]] = {}
        """Month to the tokens that were stored for it before this epoch."""
        self._read_two(self._month())

    def tokens(self, tenant_id: str) -> int:
        """Return the tokens that a tenant has used in this month, without those of unfinished operations."""
        month = self._month()
        self._read_two(month)
        return self._earlier[month].get(tenant_id, 0) + self._in_flight.tokens_of_month(month).get(tenant_id, 0)

    def _month(self) -> int:
        return month_of(day_of(self._wall()))

    def _read_two(self, month: int) -> None:
        """Read a month and the next one, if they are not known.

        A month is read before it begins: later the database may have outcomes of it that are not visible yet, which
        would count twice. Exceptions: the clock jumps into a month, or no call came in the month before.
        """
        for each in (month, month_after(month)):
            if each not in self._earlier:
                visible = self._in_flight.tokens_of_month(each)
                stored = self._store.usage.of_month(each).items()
                self._earlier[each] = {tenant_id: number - visible.get(tenant_id, 0) for tenant_id, number in stored}

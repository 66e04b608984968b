"""Places: which connections may stay open.

A place is taken when a connection is accepted, before its TLS handshake and its first request. When all are taken, idle
connections give way to new ones. Does not depend on sockets or on the protocol.

Main invariant: a connection with a running call keeps its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Protocol

_log = logging.getLogger(__name__)

REPORT_S = 60.0
"""Refused connections are logged in sum, once in this many seconds: a line for each would fill the disk."""


class Holder(Protocol):
    """A connection that holds a place."""

    def drop(self) -> None:
        """Close the connection at once."""


class Places:
    """The places for connections."""

    def __init__(self, num_max: int) -> None:
        self._num_max = num_max
        self._strangers: dict[Holder, None] = {}
        """Idle connections without a call that had a valid key, the oldest first."""
        self._friends: dict[Holder, None] = {}
        """Idle connections whose last call had a valid key, the oldest first."""
        self._busy: set[Holder] = set()
        """Connections with a running call."""
        self._report = Report(f"of at most {num_max} HTTP connections")

    def __len__(self) -> int:
        return len(self._strangers) + len(self._friends) + len(self._busy)

    def are_busy(self) -> bool:
        """Return whether all places are taken by running calls, so that no connection can give way."""
        return len(self._busy) >= self._num_max

    def make_room(self) -> None:
        """Drop the oldest idle connection if all places are taken.

        An attacker without a key holds only connections that are dropped before those of callers with a key.
        """
        assert not self.are_busy()
        if len(self) >= self._num_max:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the connection that has been idle longest, if there is one, to free its file descriptor."""
        idle = self._strangers or self._friends
        if idle:
            self._report.count("closed while idle, to make room")
            oldest = next(iter(idle))
            self.leave(oldest)
            oldest.drop()

    def take(self, holder: Holder) -> None:
        """Give a new connection a place."""
        self._strangers[holder] = None

    def begin_call(self, holder: Holder) -> None:
        """Note that a call runs on the connection. Does nothing for a connection that was dropped."""
        if self._discard(holder):
            self._busy.add(holder)

    def end_call(self, holder: Holder, *, had_key: bool) -> None:
        """Note that the connection is idle again. Does nothing for a connection that was dropped."""
        if self._discard(holder):
            (self._friends if had_key else self._strangers)[holder] = None

    def leave(self, holder: Holder) -> None:
        """Free the connection's place. Idempotent."""
        self._discard(holder)

    def count(self, event: str) -> None:
        """Count an event of connections for the log."""
        self._report.count(event)

    def _discard(self, holder: Holder) -> bool:
        if holder in self._busy:
            self._busy.discard(holder)
            return True
        for idle in (self._strangers, self._friends):
            if holder in idle:
                del idle[holder]
                return True
        return False


class Report:
    """Logs counts of events in sum: the first at once, those after it once in `REPORT_S` seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._counts: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, event: str) -> None:
        """Count an event."""
        self._counts[event] += 1
        if self._timer is None:
            self._write()

    def _write(self) -> None:
        self._timer = None
        if not self._counts:
            return
        counts = "; ".join(f"{number} {event}" for event, number in sorted(self._counts.items()))
        _log.warning("%s: %s", self._what, counts)
        self._counts.clear()
        self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._write)

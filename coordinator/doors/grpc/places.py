"""The places of calls that need no key: a peer with few takes one of the peer that has the most.

Does not depend on the protocol. Main invariant: at most `num_max` calls hold a place, and while all are taken, no peer
is refused one if another has at least two more than it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.base.errors import EndableBlock, Quota, ServiceError, busy

RETRY_S = 5.0
"""Seconds after which a refused call may be tried again."""


class Places:
    """The running calls of one method, by peer."""

    def __init__(self, method: str, num_max: int) -> None:
        self._method, self._num_max = method, num_max
        self._calls: defaultdict[str, dict[EndableBlock, None]] = defaultdict(dict)
        """Each peer's calls, the oldest first. A peer without calls has no entry."""

    @contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold a place for the current task until the block ends.

        Raises ServiceError CALLS_BUSY: at the start if there is no place, later if another peer takes this one. That
        cancels the block.
        """
        if sum(map(len, self._calls.values())) >= self._num_max:
            self._make_room(peer)
        call = EndableBlock()
        self._calls[peer][call] = None
        try:
            with call.running():
                yield
        finally:
            self._leave(peer, call)

    def _make_room(self, peer: str) -> None:
        """Displace the newest call of the peer that has the most. Raises ServiceError if that has not enough more."""
        most = max(self._calls, key=lambda each: len(self._calls[each]))
        if len(self._calls[most]) < len(self._calls.get(peer, ())) + 2:  # else the two would displace each other
            raise self._refusal("wait for one to end")
        call = next(reversed(self._calls[most]))
        self._leave(most, call)
        call.end(self._refusal("another address has taken this call's place: wait"))

    def _leave(self, peer: str, call: EndableBlock) -> None:
        if call in (calls := self._calls.get(peer, {})):
            del calls[call]
            if not calls:
                del self._calls[peer]

    def _refusal(self, mend: str) -> ServiceError:
        quota = Quota(f"open calls of {self._method} by all callers", self._num_max, self._num_max)
        return busy("CALLS_BUSY", quota, mend, delay_s=RETRY_S)

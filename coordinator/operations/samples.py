"""The samples of samplers: sequence numbers that the server assigns, and finished samples by client. In memory.

A client polls for its finished samples with a cursor; its samples have sequence numbers in a block of its own. A
client's list begins with the finished samples in the store that were not fetched, so a list may be dropped at any time:
its client then gets some samples twice. Main invariants: no two samples of a sampler get the same number, in any epoch;
cursors only grow, over all epochs, and a sample that finishes later is behind every earlier cursor.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb

CLIENT_SEQS = 10**9
"""Numbers in a client's block."""
CLIENTS_MAX = 4096
"""Lists that are kept; beyond that, the list polled least recently is dropped."""
UNREPORTED_MAX = 4096
"""Samples in one list; a list that grows longer, because it is not polled, is dropped."""
REPORTED_MAX = 1000
"""Samples in one response."""
_POSITION_BITS = 32
"""Low bits of a cursor: the position within an epoch. The epoch is in the bits above."""


class SampleNumbers:
    """The highest number of each sampler's samples; the first one is read from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, int] = {}

    def next(self, sampler_id: str) -> int:
        """Return a number that no sample of this sampler has had."""
        if sampler_id not in self._last:
            self._last[sampler_id] = self._store.operations.last_seq(sampler_id)
        self._last[sampler_id] += 1
        return self._last[sampler_id]

    def note(self, sampler_id: str, seq: int) -> None:
        """Record that a sample has this number."""
        self._last[sampler_id] = max(seq, self._last.get(sampler_id, 0))

    def forget(self, sampler_id: str) -> None:
        """Drop the numbering of a sampler whose session has ended."""
        self._last.pop(sampler_id, None)


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that has finished."""

    name: str
    is_failed: bool
    num_bytes: int
    """Size of its result."""


@dataclass(slots=True, eq=False)
class _List:
    unreported: deque[tuple[int, Finished]] = field(default_factory=deque)
    """Samples with their positions, ascending."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the list has grown or was dropped."""


class FinishedSamples:
    """The finished samples of all clients that poll."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: the coordinator's present epoch."""
        self._epoch = epoch
        self._positions = count(1)
        self._clients = count(1)
        self._lists: OrderedDict[tuple[str, int], _List] = OrderedDict()
        self._is_closed = False

    def new_client(self) -> int:
        """Return a number, not 0, that no other client of any sampler has, in this epoch or the hundreds before."""
        return 1 + ((self._epoch << 20) + next(self._clients)) % (CLIENT_SEQS - 1)

    def note(self, operation: ops_pb.Operation) -> None:
        """Add a finished operation, whose outcome has committed, to its client's list."""
        key = (operation.target_id, (operation.seq - 1) // CLIENT_SEQS)
        found = self._lists.get(key)
        if found is None:
            return
        is_failed = operation.state == ops_pb.OPERATION_STATE_FAILED
        self._add(found, Finished(operation.name, is_failed, operation.ByteSize()))
        found.changed.set()
        if len(found.unreported) > UNREPORTED_MAX:
            del self._lists[key]

    async def since(
        self, target_id: str, client: int, cursor: int, timeout_s: float, unfetched: Callable[[], Iterable[Finished]]
    ) -> tuple[list[Finished], int]:
        """Return the samples that finished since a cursor (0: any), oldest first, and the next cursor.

        Waits for the first one, at most for `timeout_s`. Samples up to the cursor are dropped from the list.
        `unfetched` reads the finished samples that were not fetched from the store. Raises ServiceError UNAVAILABLE
        when the coordinator stops.
        """
        position = cursor & ((1 << _POSITION_BITS) - 1) if cursor >> _POSITION_BITS == self._epoch else 0
        reported: list[tuple[int, Finished]] = []
        try:
            async with asyncio.timeout(timeout_s):
                while not reported:
                    found = self._list((target_id, client), unfetched)
                    while found.unreported and found.unreported[0][0] <= position:
                        found.unreported.popleft()
                    reported = list(islice(found.unreported, REPORTED_MAX))
                    if not reported:
                        found.changed.clear()
                        await found.changed.wait()
        except TimeoutError:
            pass
        last = reported[-1][0] if reported else position
        return [finished for _, finished in reported], (self._epoch << _POSITION_BITS) + last

    def close(self) -> None:
        """End every wait; polls after the next start return the remaining samples."""
        self._is_closed = True
        for found in self._lists.values():
            found.changed.set()

    def _list(self, key: tuple[str, int], unfetched: Callable[[], Iterable[Finished]]) -> _List:
        if self._is_closed:
            raise ServiceError(
                Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down: ask again", retry_delay_s=1.0
            )
        found = self._lists.get(key)
        if found is None:
            found = self._lists[key] = _List()
            for finished in unfetched():
                self._add(found, finished)
        self._lists.move_to_end(key)
        if len(self._lists) > CLIENTS_MAX:
            _, dropped = self._lists.popitem(last=False)
            dropped.changed.set()
        return found

    def _add(self, found: _List, finished: Finished) -> None:
        found.unreported.append((next(self._positions), finished))

"""Which samples of a sampler's client have finished, told to who asks again and again, with a cursor. In memory.

A client's samples have numbers in a block of its own. Its list begins with what the store has and nobody has fetched;
so one that is lost costs its client nothing but to hear again what it knows. Main invariant: cursors only grow, in all
lives, and what finishes later stands behind every cursor given before.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count, islice

from coordinator.base.errors import Code, ServiceError
from tinkerpool.v1 import operations_pb2 as ops_pb

CLIENT_SEQS = 10**9
"""Numbers in a client's block."""
CLIENTS_MAX = 4096
"""Lists that are kept; who has not asked for longest loses its."""
UNTOLD_MAX = 4096
"""Samples that a list keeps; one that nobody asks for is dropped."""
TOLD_MAX = 1000
"""Samples in one answer."""
_LIFE_BITS = 32
"""Of a cursor, for the place within a life of the coordinator; the life's epoch is above."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample that has finished."""

    name: str
    is_failed: bool
    num_bytes: int
    """Of its result."""


@dataclass(slots=True, eq=False)
class _List:
    untold: deque[tuple[int, Finished]] = field(default_factory=deque)
    """With their places, ascending."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once there is more, or the list is dropped."""


class FinishedSamples:
    """The lists of all clients that have asked."""

    def __init__(self, epoch: int) -> None:
        """`epoch`: this life of the coordinator's."""
        self._epoch = epoch
        self._places = count(1)
        self._clients = count(1)
        self._lists: OrderedDict[tuple[str, int], _List] = OrderedDict()
        self._is_closed = False

    def new_client(self) -> int:
        """A number that no other client has, of any sampler, in this life or the hundreds before; not 0."""
        return 1 + ((self._epoch << 20) + next(self._clients)) % (CLIENT_SEQS - 1)

    def note(self, operation: ops_pb.Operation) -> None:
        """Something has finished, and its outcome has committed."""
        key = (operation.target_id, (operation.seq - 1) // CLIENT_SEQS)
        found = self._lists.get(key)
        if found is None:
            return
        is_failed = operation.state == ops_pb.OPERATION_STATE_FAILED
        self._add(found, Finished(operation.name, is_failed, operation.ByteSize()))
        found.changed.set()
        if len(found.untold) > UNTOLD_MAX:
            del self._lists[key]

    async def since(
        self, target_id: str, client: int, cursor: int, timeout_s: float, unfetched: Callable[[], Iterable[Finished]]
    ) -> tuple[list[Finished], int]:
        """What has finished since a cursor (0: any), oldest first, and the cursor behind it.

        Waits for it, but no longer than `timeout_s`. What is at or before the cursor is forgotten. `unfetched` reads
        what has finished and was not fetched. Raises ServiceError UNAVAILABLE when the coordinator stops.
        """
        place = cursor & ((1 << _LIFE_BITS) - 1) if cursor >> _LIFE_BITS == self._epoch else 0
        told: list[tuple[int, Finished]] = []
        try:
            async with asyncio.timeout(timeout_s):
                while not told:
                    found = self._list((target_id, client), unfetched)
                    while found.untold and found.untold[0][0] <= place:
                        found.untold.popleft()
                    told = list(islice(found.untold, TOLD_MAX))
                    if not told:
                        found.changed.clear()
                        await found.changed.wait()
        except TimeoutError:
            pass
        return [finished for _, finished in told], (self._epoch << _LIFE_BITS) + (told[-1][0] if told else place)

    def close(self) -> None:
        """End every wait; who asks again after the next start hears the rest."""
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
        found.untold.append((next(self._places), finished))

"""Whom a worker's death may be due to, and who must not run beside whom until that is known. Pure; knows names only.

Whatever was on a worker when it died is suspect: adapters of its batch and samples that it was drawing. Suspects run by
halves, and nobody else meanwhile; they wait until every worker lives, so that they run where nobody else is. A half
whose worker dies again is halved again; who lives through is cleared. Only what ran alone and saw its worker die twice
is convicted. So processes that die for other reasons cost time, and no operation its life, unless they die during the
same one's run alone, and again during the next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection

DEATHS_ALONE_MAX = 2


class Suspects:
    """The suspects of one base model: adapters, and samples by the names of their operations."""

    def __init__(self, on_turn: Callable[[], None] = lambda: None) -> None:
        """`on_turn` is called when others may run than before."""
        self._groups: deque[set[str]] = deque()
        """The first one runs now. No name is in two."""
        self._deaths: Counter[str] = Counter()
        """By operation: how often a worker died of what ran alone."""
        self._on_turn = on_turn
        self._is_waiting = False

    def wait(self, *, is_waiting: bool) -> None:
        """Let suspects wait for a worker, and the others run meanwhile; or let them run."""
        self._is_waiting = is_waiting
        self._on_turn()

    @property
    def group(self) -> frozenset[str]:
        """Whose turn it is; empty: nobody is suspected."""
        return frozenset(self._groups[0]) if self._groups else frozenset()

    def may_run(self, name: str) -> bool:
        """Whether it is this one's turn."""
        if self._is_waiting:
            return not any(name in group for group in self._groups)
        return not self._groups or name in self._groups[0]

    def deaths(self, operation: str) -> int:
        """How often this operation ran alone and its worker died."""
        return self._deaths[operation]

    def died(self, names: Collection[str], operations: Collection[str]) -> str | None:
        """A worker died with these on it, running these operations. Returns the one that is convicted, if one is."""
        dead = sorted(names)
        was_alone = len(dead) == 1 and self.group == set(dead)
        for name in dead:
            self._take_out(name)
        if not was_alone:
            middle = (len(dead) + 1) // 2
            self._groups.extendleft(half for half in (set(dead[middle:]), set(dead[:middle])) if half)
            return None
        if len(operations) == 1:
            [operation] = operations
            self._deaths[operation] += 1
            if self._deaths[operation] >= DEATHS_ALONE_MAX:
                del self._deaths[operation]
                self._on_turn()
                return operation
        self._groups.appendleft(set(dead))
        return None

    def clear(self, name: str) -> None:
        """It has run, and its worker lives; or it is gone."""
        before = self.group
        self._take_out(name)
        for operation in [o for o in self._deaths if o == name or o.rpartition(":")[0] == name]:
            del self._deaths[operation]
        if self.group != before:
            self._on_turn()

    def _take_out(self, name: str) -> None:
        for group in self._groups:
            group.discard(name)
        self._groups = deque(group for group in self._groups if group)

"""Who is served next: things wait in lines, and the lines take turns.

Knows nothing of what waits.

Main invariants: within a line, first come first served. What does not fit is passed over at most `patience` times, and
then nothing is served before it: so nothing waits for ever, if only whatever is served ends, and nothing has enough
for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    item: T
    num_passed_over: int = 0


class Turns(Generic[T]):
    """Lines by name. An item stays at the head of its line, turn by turn, until it is removed."""

    def __init__(self, patience: int) -> None:
        """How often the head of a line may be passed over because it does not fit."""
        self._patience = patience
        self._lines: dict[str, deque[_Waiting[T]]] = {}
        """In the order of their turns: whoever was served goes to the end."""

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[T]:
        return (waiting.item for line in self._lines.values() for waiting in line)

    def add(self, line: str, item: T) -> None:
        """Queue an item."""
        self._lines.setdefault(line, deque()).append(_Waiting(item))

    def remove(self, line: str, item: T) -> None:
        """Take an item out of its line, wherever it stands; ignored if it is not there."""
        waiting = self._lines.get(line, deque())
        for place, other in enumerate(waiting):
            if other.item is item:
                del waiting[place]
                break
        if not waiting:
            self._lines.pop(line, None)

    def serve(self, try_: Callable[[T], bool], has_enough: Callable[[T], bool] = lambda _: False) -> T | None:
        """Offer a turn to the heads of the lines until one takes it (`try_` returns True), and return that one.

        A head that `has_enough` is offered none: it is not passed over, and nobody waits for it.
        """
        passed_over: list[_Waiting[T]] = []
        for name, line in self._lines.items():
            head = line[0]
            if has_enough(head.item):
                continue
            if try_(head.item):
                for other in passed_over:
                    other.num_passed_over += 1
                head.num_passed_over = 0
                self._lines[name] = self._lines.pop(name)
                return head.item
            if head.num_passed_over >= self._patience:
                return None
            passed_over.append(head)
        return None

    def clear(self) -> None:
        """Forget everything that waits."""
        self._lines.clear()

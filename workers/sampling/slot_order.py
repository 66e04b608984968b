"""The order in which waiting requests get sequence slots: scopes in turn, and first come, first served within a scope.

Does not depend on requests, sequences or memory: the caller says whether an item can be served now.

Main invariant: an item that cannot be served is passed over at most `patience` times; after that no other item is
served before it. So every item is served in the end, provided that served items end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[T]):
    item: T
    num_passed_over: int = 0


class SlotOrder(Generic[T]):
    """One queue per scope, served round robin. An item stays at the head of its queue until it is removed."""

    def __init__(self, patience: int) -> None:
        """Let the head of a queue be passed over at most `patience` times because it cannot be served."""
        self._patience = patience
        self._queues: dict[str, deque[_Waiting[T]]] = {}
        """By scope, in the order of service: a scope that was served goes to the end."""

    def __bool__(self) -> bool:
        return bool(self._queues)

    def add(self, scope: str, item: T) -> None:
        """Append an item to its scope's queue."""
        self._queues.setdefault(scope, deque()).append(_Waiting(item))

    def remove(self, scope: str, item: T) -> None:
        """Remove an item from any position of its queue; ignored if it is not there."""
        queue = self._queues.get(scope, deque())
        for position, waiting in enumerate(queue):
            if waiting.item is item:
                del queue[position]
                break
        if not queue:
            self._queues.pop(scope, None)

    def serve(self, try_serve: Callable[[T], bool], is_at_limit: Callable[[T], bool] = lambda _: False) -> T | None:
        """Offer service to the heads of the queues until `try_serve` returns True for one; return that item.

        A head that `is_at_limit` is skipped: it does not count as passed over, and no other item waits for it.
        """
        passed_over: list[_Waiting[T]] = []
        for scope, queue in self._queues.items():
            head = queue[0]
            if is_at_limit(head.item):
                continue
            if try_serve(head.item):
                for other in passed_over:
                    other.num_passed_over += 1
                head.num_passed_over = 0
                self._queues[scope] = self._queues.pop(scope)
                return head.item
            if head.num_passed_over >= self._patience:
                return None
            passed_over.append(head)
        return None

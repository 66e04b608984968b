"""The quarantine of everything that was in flight on lost workers: which of it may run until the poison is found.

Has names only; does not depend on adapter logs, workers or a clock. Main invariant: no name is in two groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping

from coordinator.base.time import Signal

SOLO_LOSSES_MAX = 2
"""Solo losses of an operation after which it is the poison."""


class Quarantine:
    """The quarantined adapters and samples of one base model; a sample goes by its operation's name.

    Quarantined groups run by bisection: one half at a time, without any other adapter or sample, and only while every
    worker is live, so that a half runs on a worker that holds nothing else. A half whose worker is lost again is halved
    again; one that survives is released. An operation is the poison only if it ran solo and its worker was lost, twice.
    So a worker that is lost for another reason costs time, and fails no operation, unless it is lost during the same
    operation's solo run twice.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        """Another set of adapters and samples may run than before."""
        self._groups: deque[set[str]] = deque()
        """The first one may run. No name is in two."""
        self._tenants: dict[str, str] = {}
        """The tenants of quarantined adapters and samples."""
        self._solo_losses: Counter[str] = Counter()
        """Solo losses by operation."""
        self._is_paused = False

    def pause(self, *, is_paused: bool) -> None:
        """Hold quarantined groups back while a worker is missing, and run all others meanwhile; or end that pause."""
        self._is_paused = is_paused
        self.changed.notify()

    @property
    def group(self) -> frozenset[str]:
        """The group that may run; empty: nothing is quarantined."""
        return frozenset(self._groups[0]) if self._groups else frozenset()

    def may_run(self, name: str) -> bool:
        """Return whether this adapter or sample may run now."""
        if self._is_paused:
            return not any(name in group for group in self._groups)
        return not self._groups or name in self._groups[0]

    def num_solo_losses(self, operation: str) -> int:
        """Return how often this operation ran solo and its worker was lost."""
        return self._solo_losses[operation]

    def count_solo_loss(self, operation: str) -> bool:
        """Count that an operation ran solo and its worker was lost; return whether it is the poison."""
        self._solo_losses[operation] += 1
        if self._solo_losses[operation] < SOLO_LOSSES_MAX:
            return False
        del self._solo_losses[operation]
        return True

    def record_loss(
        self, names: Collection[str], operations: Collection[str], tenants: Mapping[str, str] | None = None
    ) -> str | None:
        """Record the loss of a worker that had these adapters and samples in flight, running these operations.

        `tenants`: those of the adapters and samples. Returns the operation that is the poison, if that is decided by
        this loss.
        """
        lost = sorted(names)
        was_solo = len(lost) == 1 and self.group == set(lost)
        for name in lost:
            self._take_out(name)
        self._tenants.update(tenants or {})
        if not was_solo:
            middle = (len(lost) + 1) // 2
            self._groups.extendleft(half for half in (set(lost[middle:]), set(lost[:middle])) if half)
            return None
        if len(operations) == 1:
            [operation] = operations
            if self.count_solo_loss(operation):
                self._tenants.pop(lost[0], None)
                self.changed.notify()
                return operation
        self._groups.appendleft(set(lost))
        return None

    def release(self, name: str) -> None:
        """Release an adapter or sample that ran and whose worker survived, or that was deleted or has finished."""
        before = self.group
        self._take_out(name)
        self._tenants.pop(name, None)
        for operation in [o for o in self._solo_losses if o == name or o.rpartition(":")[0] == name]:
            del self._solo_losses[operation]
        if self.group != before:
            self.changed.notify()

    def release_tenant(self, tenant_id: str) -> None:
        """Release the adapters and samples of a tenant that is on probation now."""
        for name in [name for name, owner in self._tenants.items() if owner == tenant_id]:
            self.release(name)

    def _take_out(self, name: str) -> None:
        for group in self._groups:
            group.discard(name)
        self._groups = deque(group for group in self._groups if group)

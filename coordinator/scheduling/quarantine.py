"""The quarantine of everything that was in flight on lost workers: which of it may run until the poison is found.

Has names only; does not depend on adapter logs, workers or a clock. Main invariant: no name is in two groups.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from coordinator.base.time import Signal

SOLO_LOSSES_MAX = 2
"""Solo losses of an operation after which it is the poison."""


@dataclass(slots=True)
class _Group:
    """Adapters and samples that run together, and nothing else with them."""

    names: set[str]
    is_suspected: bool = True
    """Whether one of them may be a poison; else they were in flight when a worker fell silent for the first time."""
    has_killed: bool = False
    """They ran in a group before, or were in flight at a silence, and their worker was lost: it was the second one."""


class Quarantine:
    """The quarantined adapters and samples of one base model; a sample goes by its operation's name.

    Suspected groups run by bisection: one half at a time, without any other adapter or sample, so that a half runs on a
    worker that holds nothing else. A half whose worker is lost again is halved again; one that survives is released. An
    operation is the poison only if it ran solo and its worker was lost, twice. So a worker that is lost for another
    reason costs time, and fails no operation, unless it is lost during the same operation's solo run twice. A run is
    solo only if nothing else was in flight there when the worker was lost, also nothing that is not suspected: what
    others began while all groups had to wait may still run when one goes on, and so may a snapshot.

    A worker that is silent may be cut off, or stopped by a poison. What was in flight at a first silence is suspected
    only if its next worker falls silent or is lost too before it has finished. Adapters form a group until then, which
    is not halved. Samples run with others: they may take long, and others would wait for them.

    A group that has lost a second worker waits while it could take the last one (`pause`). A group of which nothing can
    run waits too: each of its adapters needs a worker that is late or missing, or a file (`note_waiting`), and each of
    its samples the memory of a worker that is not there now (`note_unplaced`). All others run meanwhile. After each
    loss all groups wait until the other workers have been asked whether they live (`begin_check`): of two workers that
    are lost at once, the group of the first one would otherwise run on the second one, and count as what killed it.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        """Another set of adapters and samples may run than before."""
        self._groups: deque[_Group] = deque()
        """The first one that does not wait may run. No name is in two."""
        self._silenced: set[str] = set()
        """What was in flight when a worker fell silent, and has not finished since."""
        self._waiting: Collection[str] = frozenset()
        self._unplaced: Collection[str] = frozenset()
        """Adapters and samples that cannot run now."""
        self._tenants: dict[str, str] = {}
        """The tenants of quarantined adapters and samples."""
        self._solo_losses: Counter[str] = Counter()
        """Solo losses by operation."""
        self._is_short = False
        self._num_checks = 0

    def begin_check(self) -> None:
        """Hold all groups back: a worker was lost, and the others are asked whether they live."""
        self._num_checks += 1
        self.changed.notify()

    def end_check(self) -> None:
        """End one check: each other worker has replied, or is late or lost, so nothing is placed there."""
        self._num_checks -= 1
        self.changed.notify()

    def pause(self, *, is_paused: bool) -> None:
        """Hold groups back that have lost two workers, while one is left and another one missing; or end that pause."""
        self._is_short = is_paused
        self.changed.notify()

    def note_waiting(self, names: Collection[str]) -> None:
        """Record which quarantined adapters cannot run now: others do not wait for a group of such names alone."""
        if names != self._waiting:
            self._waiting = names
            self.changed.notify()

    def note_unplaced(self, names: Collection[str]) -> None:
        """Record which quarantined samples fit only on workers that are not there now; likewise."""
        if names != self._unplaced:
            self._unplaced = names
            self.changed.notify()

    @property
    def names(self) -> frozenset[str]:
        """The quarantined adapters and samples."""
        return frozenset(name for group in self._groups for name in group.names)

    @property
    def group(self) -> frozenset[str]:
        """The group that may run; empty: nothing is quarantined, or what is must wait."""
        first = self._first()
        return frozenset(first.names) if first is not None else frozenset()

    def may_run(self, name: str) -> bool:
        """Return whether this adapter or sample may run now."""
        if not self._groups:
            return True
        if (first := self._first()) is not None:
            return name in first.names
        return name not in self.names

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

    def record_silence(self, adapters: Mapping[str, str], samples: Collection[str]) -> set[str]:
        """Record that a worker fell silent that had these in flight; `adapters`: with their tenants.

        Returns those of both that are suspects, of which `record_loss` must be told: they are in a group already, or
        were in flight at an earlier silence and have not finished since.
        """
        names = {*adapters, *samples}
        suspects = names & (self.names | self._silenced)
        self._silenced |= names
        if spared := adapters.keys() - suspects:
            self._tenants.update({name: adapters[name] for name in spared})
            self._groups.appendleft(_Group(set(spared), is_suspected=False))
        return suspects

    def record_loss(
        self,
        names: Collection[str],
        operations: Collection[str],
        tenants: Mapping[str, str] | None = None,
        *,
        has_others: bool = False,
    ) -> str | None:
        """Record the loss of a worker that had these adapters and samples in flight, running these operations.

        `tenants`: those of the adapters and samples. `has_others`: the worker had something in flight besides, which is
        not suspected. Returns the operation that is the poison, if that is decided by this loss.
        """
        lost = sorted(names)
        is_group = any(group.is_suspected and group.names == set(lost) for group in self._groups)
        was_solo = len(lost) == 1 and is_group and not has_others
        has_killed = not (self._silenced | self.names).isdisjoint(lost)
        for name in lost:
            self._take_out(name)
        self._tenants.update(tenants or {})
        if not was_solo:
            middle = (len(lost) + 1) // 2
            halves = (half for half in (set(lost[middle:]), set(lost[:middle])) if half)
            self._groups.extendleft(_Group(half, has_killed=has_killed) for half in halves)
            return None
        if len(operations) == 1:
            [operation] = operations
            if self.count_solo_loss(operation):
                self._tenants.pop(lost[0], None)
                self._silenced.discard(lost[0])
                self.changed.notify()
                return operation
        self._groups.appendleft(_Group(set(lost), has_killed=True))
        return None

    def release(self, name: str) -> None:
        """Release an adapter or sample that ran and whose worker survived, or that was deleted or has finished."""
        before = self.group
        self._take_out(name)
        self._tenants.pop(name, None)
        self._silenced.discard(name)
        for operation in [o for o in self._solo_losses if o == name or o.rpartition(":")[0] == name]:
            del self._solo_losses[operation]
        if self.group != before:
            self.changed.notify()

    def release_tenant(self, tenant_id: str) -> None:
        """Release the adapters and samples of a tenant that is on probation now."""
        for name in [name for name, owner in self._tenants.items() if owner == tenant_id]:
            self.release(name)

    def _first(self) -> _Group | None:
        """Return the first group that need not wait."""
        if self._num_checks:
            return None
        for group in self._groups:
            is_stuck = all(name in self._waiting or name in self._unplaced for name in group.names)
            if not (group.has_killed and self._is_short) and not is_stuck:
                return group
        return None

    def _take_out(self, name: str) -> None:
        for group in self._groups:
            group.names.discard(name)
        self._groups = deque(group for group in self._groups if group.names)

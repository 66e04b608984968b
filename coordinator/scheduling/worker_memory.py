"""Keeps what the workers of one base model hold within the host memory that they offer.

A worker reports the bytes of its copies and sampler versions after each batch. Above its limit, or while an adapter
waits for room, the least recently used ones leave it: versions that no sample uses and that are in a file, then copies
that their snapshots cover, which need no write, and copies that can be snapshotted, once they are. A quarantined copy
that may not run now leaves without a snapshot, and is replayed, as does one in the middle of a replay whose tenant is
suspended. Adapters with nothing to run go first. Those that wait are installed as room is made, so that more adapters
than fit take turns. All copies leave a worker that is drained, by the same ways.

Depends on the fleet, on adapter logs, and on what may be snapshotted; not on how states are written. Call it between
cycles. Main invariant: nothing leaves a worker that is not in a file or in the operation log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from coordinator.base.errors import ServiceError
from coordinator.checkpoints.published_weights import Publishing
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.registry import AdapterGroup
from coordinator.scheduling.classes import Classes
from coordinator.scheduling.quarantine import Quarantine

WANTED_BYTES_MAX = 32 << 20
"""Room that is made at a time for adapters that wait, unless one needs more."""


class WorkerMemory:
    """The host memory of one base model's workers."""

    def __init__(
        self,
        base_model: str,
        fleet: Fleet,
        group: AdapterGroup,
        quarantine: Quarantine,
        snapshots: Snapshots,
        publishing: Publishing,
        classes: Classes,
        is_held: Callable[[str], bool],
    ) -> None:
        """`is_held` returns whether a tenant is suspended."""
        self._is_held = is_held
        self._base_model = base_model
        self._fleet = fleet
        self._group = group
        self._quarantine = quarantine
        self._snapshots = snapshots
        self._publishing = publishing
        self._classes = classes
        self._waiting: dict[str, dict[str, int]] = {}
        """Worker to the adapters that wait for room there, and the bytes of each."""
        self._due: list[AdapterLog] = []
        self._asked: set[str] = set()

    @property
    def away(self) -> frozenset[str]:
        """The workers that nothing may be sent to for now; see `Fleet.away`."""
        return self._fleet.away

    @property
    def leaving(self) -> frozenset[str]:
        """The workers that are drained; see `Fleet.leaving`."""
        return self._fleet.leaving

    def size_of(self, log: AdapterLog) -> int:
        """Return the bytes of a copy of the adapter."""
        return self._fleet.copy_bytes(self._base_model, log.spec)

    def must_wait(self, log: AdapterLog, workers: Collection[str]) -> bool:
        """Return whether an adapter without a copy finds no room on any of these workers; room is made for it then.

        Or whether it waits for a worker of its class.
        """
        others = self._classes.others(log)
        open_to_it = [each for each in self._available() if each.info.worker_id in set(workers) - others]
        num_bytes = self.size_of(log) if open_to_it else 0
        if not open_to_it:
            return bool(others)
        if any(worker.has_room(num_bytes) for worker in open_to_it):
            return False
        chosen = min(open_to_it, key=lambda each: each.held_bytes)
        self._waiting.setdefault(chosen.info.worker_id, {})[log.adapter_id] = num_bytes
        return True

    def worker_ids(self) -> list[str]:
        """Return the workers that take work."""
        return [worker.info.worker_id for worker in self._available()]

    def crowded(self, log: AdapterLog) -> frozenset[str]:
        """Return the workers that have no room for a copy of the adapter, or are of another class."""
        full = {each.info.worker_id for each in self._available() if not each.has_room(self.size_of(log))}
        return self._classes.others(log).union(full)

    def forget(self, adapter_id: str) -> None:
        """Drop the state of a deleted adapter."""
        self._classes.forget(adapter_id)

    def has_suspended_replay(self, log: AdapterLog) -> bool:
        """Return whether the adapter has a replay that may not go on: its tenant is held, and no sampler needs it."""
        may_run = not self._is_held(log.tenant_id) or self._publishing.must_rematerialize(log.adapter_id)
        return not may_run and log.ahead(may_begin=False).is_replaying

    def others(self, log: AdapterLog) -> frozenset[str]:
        """Return the workers of another class than the adapter's; see `Classes.others`."""
        return self._classes.others(log)

    def make_room(self) -> bool:
        """Drop what workers have to give up and need not write; return whether anything was. See `take_due`.

        Call it again after that: what was dropped may be too little. Copies that do not count any more go in any case.
        """
        waiting, self._waiting, self._due, self._asked = self._waiting, {}, [], set()
        has_dropped = False
        for worker in self._fleet.drained(self._base_model):
            has_dropped |= self._vacate(worker, self._group.residency.on(worker.info.worker_id))
        for adapter_id in list(self.targets):
            log = self._group.logs.get(adapter_id)  # None: it is being deleted
            if log is not None and self.is_moving(log) and log.home not in self.away:
                has_dropped |= self._vacate(self._fleet.worker(log.home), [log.adapter_id])
        for worker in self._available():
            for adapter_id in self._group.residency.take_left(worker.info.worker_id):
                worker.drop(adapter_id)
            sizes = waiting.get(worker.info.worker_id, {}).values()
            wanted = max([min(sum(sizes), WANTED_BYTES_MAX), *sizes], default=0)
            most = worker.info.model.host_bytes_max
            excess = worker.held_bytes + wanted - most if most is not None else 0
            worker.note_room(is_lacking=excess > 0)
            if excess > 0:
                num_due, dropped = len(self._due), self._relieve(worker, excess)
                has_dropped |= dropped
                if wanted and worker.is_outdated and not dropped and len(self._due) == num_due:
                    self._asked.add(worker.info.worker_id)
        return has_dropped

    def take_due(self) -> list[AdapterLog]:
        """Return the adapters that are to be snapshotted so that they can leave their workers."""
        due, self._due = self._due, []
        return due

    def take_asked(self) -> set[str]:
        """Return workers that get a batch in any case: they report what they hold, and adapters wait for room there."""
        asked, self._asked = self._asked, set()
        return asked

    @property
    def needs_cycle(self) -> bool:
        """Whether `take_due` or `take_asked` returns any."""
        return bool(self._due or self._asked)

    def move(self, log: AdapterLog, worker_id: str) -> None:
        """Let an adapter go on on this worker, between two cycles; its copy elsewhere leaves first."""
        self._classes.send(log, worker_id)
        self._group.mark_dirty(log)

    @property
    def targets(self) -> Mapping[str, str]:
        """Adapters that are to go on on a certain worker; see `is_moving`."""
        return self._classes.targets

    def is_moving(self, log: AdapterLog) -> bool:
        """Return whether the adapter's copy is to leave its worker for another one that takes work."""
        target = self.targets.get(log.adapter_id, log.home)
        return bool(log.home) and target != log.home and target in self.worker_ids()

    def _vacate(self, worker: Incarnation, adapter_ids: Iterable[str]) -> bool:
        """Let these copies leave a worker; return whether any did.

        A copy stays until its snapshot counts, those with something to run first. One that cannot be snapshotted now,
        or whose last snapshot has failed, leaves at once: its adapter replays the log.
        """
        resident = [self._group.logs[each] for each in adapter_ids]
        is_reachable = worker.is_live and not worker.is_away
        due: list[AdapterLog] = []
        has_left = False
        for log in sorted(resident, key=AdapterLog.is_ready, reverse=True):
            is_covered = log.copy.applied_seq <= log.snapshot_seq
            can_wait = is_reachable and not is_covered and self._quarantine.may_run(log.adapter_id)
            if can_wait and self._snapshots.is_unsettled(log.adapter_id):
                continue
            if can_wait and self._snapshots.can_take(log) and not self._snapshots.has_failed(log.adapter_id):
                due.append(log)
            else:
                self._leave(worker, log)
                has_left = True
        self._due += due[: self._snapshots.num_readable(due, self.size_of)]  # cycles must not wait for the writing
        return has_left

    def _leave(self, worker: Incarnation, log: AdapterLog) -> None:
        """Drop an adapter's copy from its worker: it goes on from its snapshot, anywhere."""
        self._fleet.drop_copy(worker.info.worker_id, log.spec)
        log.lose_copy()
        self._group.mark_dirty(log)

    def _relieve(self, worker: Incarnation, excess: int) -> bool:
        """Drop at least `excess` bytes from a worker, as far as that is possible now; return whether any."""
        before = worker.held_bytes
        excess -= self._drop_versions(worker, excess)
        resident = [self._group.logs[each] for each in self._group.residency.on(worker.info.worker_id)]
        for log in sorted(resident, key=AdapterLog.is_ready):  # a stable order: the least recently used first
            if excess <= 0:
                break
            is_held = not self._quarantine.may_run(log.adapter_id) or self.has_suspended_replay(log)
            if not (log.is_between_operations or is_held):
                continue  # it would run the begun operation again
            if self._snapshots.is_unsettled(log.adapter_id):
                excess -= self.size_of(log)  # it goes when its snapshot counts
            elif log.copy.applied_seq <= log.snapshot_seq or is_held:  # others may wait for its room
                self._leave(worker, log)
                excess -= self.size_of(log)
            elif self._snapshots.may_take(log, is_awaited=True):
                self._due.append(log)
                excess -= self.size_of(log)
        return worker.held_bytes < before

    def _drop_versions(self, worker: Incarnation, excess: int) -> int:
        """Drop versions from a worker, at least `excess` bytes if there are as many; return how many."""
        dropped = 0
        in_use = {flight.version for flight in worker.samples.values()}
        for version in worker.versions:
            if dropped >= excess:
                break
            if version not in in_use and self._is_in_file(version):
                dropped += worker.drop_version(version)
        return dropped

    def _is_in_file(self, version: str) -> bool:
        try:
            return self._publishing.held(version) is None
        except ServiceError:
            return False  # it is not rematerialized

    def _available(self) -> list[Incarnation]:
        return self._fleet.available(self._base_model)

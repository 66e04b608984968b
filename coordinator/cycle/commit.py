"""Commits a cycle: outcomes, states, counters and metering in one transaction; then wakes the waits for them.

Does not depend on how items were run. Main invariants: a result is visible only after its transaction is durable; the
effects of an operation that was never logged are not stored, and the operations on top of it run again.
"""

from __future__ import annotations

import math

from coordinator.base.time import Time
from coordinator.checkpoints.saver import Saver
from coordinator.cycle.journal import CycleJournal
from coordinator.cycle.phase import Cycle
from coordinator.fleet.fleet import Fleet
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.registry import AdapterGroup
from coordinator.payloads.canonical import serialize
from coordinator.scheduling.planner import Planning
from coordinator.storage.cycles import CycleCommit


class Committer:
    """The commits of one base model's cycles."""

    def __init__(
        self,
        planning: Planning,
        group: AdapterGroup,
        saver: Saver,
        in_flight: InFlightTable,
        fleet: Fleet,
        journal: CycleJournal,
        time: Time,
    ) -> None:
        self._planning = planning
        self._group = group
        self._saver = saver
        self._in_flight = in_flight
        self._fleet = fleet
        self._journal = journal
        self._time = time

    async def commit(self, cycle: Cycle) -> frozenset[str]:
        """Commit the cycle. Returns the adapters that ran an operation whose append had failed.

        Raises StorageError.
        """
        for log in self._planning.ready.dirty():
            log.advance()
            cycle.finish(log.take_decided())
        message = cycle.as_message(self._planning.base_model)
        has_run = bool(cycle.entries)
        commit = CycleCommit(
            cycle_id=cycle.cycle_id if has_run else 0,
            summary=serialize(message) if has_run else b"",
            virtual_tokens=self._planning.counters(frozenset(entry.tenant for entry in cycle.entries.values())),
        )
        began = self._time.monotonic()
        lost: frozenset[str] = frozenset()
        if commit.cycle_id or cycle.finished:
            lost = await self._saver.persist(commit, cycle.staged, cycle.finished)
        self._publish_outcomes(cycle, lost)
        self._planning.ready.ran(cycle.entries)
        if has_run:
            message.commit_seconds = self._time.monotonic() - began
            self._planning.costs.observe_commit(message.commit_seconds)
            self._journal.publish(message)
        return lost

    def _publish_outcomes(self, cycle: Cycle, lost: frozenset[str]) -> None:
        """Update memory after the transaction: show outcomes, and drop the copies of the adapters `lost`."""
        for operation in cycle.finished:
            if operation.target_id in lost:
                operation.undecide()
            else:
                self._in_flight.finish(operation)
                operation.retire()
        for adapter_id in sorted(lost):
            if (log := self._group.logs.get(adapter_id)) is not None:
                log.lose_copy()
                self._group.mark_dirty(log)
        self._saver.committed(cycle.staged, lost)
        for worker_id, incarnation, operation in cycle.published:
            if operation.target_id in lost:
                self._fleet.remove(worker_id, operation.name)
            else:
                self._fleet.hold_version(worker_id, incarnation, operation.name)
        for snapshot in cycle.staged.snapshots:
            if snapshot.adapter_id in self._group.logs and snapshot.adapter_id not in lost:
                self._group.logs[snapshot.adapter_id].cover(snapshot.seq, b"", math.inf)

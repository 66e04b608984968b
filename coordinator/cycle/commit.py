"""The record of cycles: what the running one has decided so far, its plan in the log, its commit, and the last cycles.

`CycleJournal` numbers the cycles of all base models and shows committed ones. `Committer` commits outcomes, states,
counters and metering in one transaction, and then wakes the waits for them. Does not depend on how items are run.

Main invariants: ids grow over all base models and epochs; a result is visible only after its transaction is durable;
the effects of an operation that was never logged are not stored, and the operations on top of it run again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from coordinator.base.time import Time, day_of
from coordinator.checkpoints.saver import Saver
from coordinator.cycle.watchers import Watchers
from coordinator.fleet.fleet import Fleet
from coordinator.observe import metrics
from coordinator.observe.throughput import Throughput
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.history import Entries
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.operation import Kind, Operation, decided_row
from coordinator.operations.registry import AdapterGroup
from coordinator.payloads.canonical import serialize
from coordinator.scheduling.classes import Classes
from coordinator.scheduling.planner import PassPlan, Planning
from coordinator.storage.cycles import CycleCommit, Cycles, StagedStates
from coordinator.storage.rows import FileUse
from coordinator.storage.sqlite import ConflictError, StorageError
from tinkerpool.v1 import history_pb2, pool_pb2
from workers.contract.gradient_windows import EMPTY
from workers.contract.logs import about
from workers.contract.messages import ItemResult

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces

logger = logging.getLogger(__name__)

CYCLES_SHOWN_MAX = 1000
"""Cycles that are kept."""


@dataclass(slots=True)
class Cycle:
    """The running cycle; id 0: no cycle, only operations that were decided without one."""

    cycle_id: int
    started_wall: float
    started: float
    pass_ended: float = 0.0
    steps_ended: float = 0.0
    finished: list[Operation] = field(default_factory=list)
    """Decided operations, to be committed."""
    entries: dict[str, pool_pb2.CycleEntry] = field(default_factory=dict)
    """The adapters' parts in the cycle, by adapter id."""
    staged: StagedStates = field(default_factory=StagedStates)
    file_uses: list[FileUse] = field(default_factory=list)
    published: list[tuple[str, str, Operation, int]] = field(default_factory=list)
    """Saves that published weights, which their worker holds since: worker, incarnation, operation, bytes."""
    worker_s: float = 0.0
    """Seconds of the cycle that workers computed, and files took. The rest took the coordinator, and the way there."""
    pass_worker_s: float = 0.0
    """Those of the pass."""
    phase_s: dict[str, Counter[str]] = field(default_factory=dict)
    """Worker to the seconds of each phase of its work."""
    floors: Mapping[str, float] = field(default_factory=dict)
    """See `PassPlan.floors`."""
    unused_tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Tenant to what was planned and did not run: the plan charged it."""

    def planned(self, plan: PassPlan) -> None:
        """Record the plan that the cycle runs."""
        self.floors = plan.floors

    def end_pass(self, now: float) -> None:
        """Record the end of the pass."""
        self.pass_ended, self.pass_worker_s = now, self.worker_s

    def end_steps(self, now: float) -> None:
        """Record the end of the step phase."""
        self.steps_ended = now

    def finish(self, operations: Iterable[Operation]) -> None:
        """Commit these decided operations with the cycle."""
        self.finished += operations

    def split(self, cycle_id: int, adapter_ids: Collection[str]) -> Cycle:
        """Return a cycle with the part that these adapters have in this one; their worker is late in its phase.

        What the pass has decided goes with them, so that a pass and its step stay in one cycle.
        """
        part = Cycle(cycle_id, self.started_wall, self.started, self.pass_ended, floors=self.floors)
        part.finished = [operation for operation in self.finished if operation.target_id in adapter_ids]
        self.finished = [operation for operation in self.finished if operation.target_id not in adapter_ids]
        for operation in part.finished:
            operation.move_to_cycle(cycle_id)
        part.entries = {name: self.entries.pop(name) for name in sorted(adapter_ids) if name in self.entries}
        return part

    def note_unused(self, tenant_id: str, num_tokens: float) -> None:
        """Record what the plan charged a tenant for work that no worker ran."""
        self.unused_tokens[tenant_id] += num_tokens

    def worked(self, seconds: float) -> None:
        """Record seconds of the cycle that workers or files took."""
        self.worker_s += seconds

    def note_phases(self, phase_s: Mapping[str, Mapping[str, float]]) -> None:
        """Add the seconds of each phase of a worker's work."""
        for worker_id, seconds in phase_s.items():
            self.phase_s.setdefault(worker_id, Counter()).update(seconds)

    def use_files(self, log: AdapterLog, kind: Kind | str, num_bytes: int, seconds: float) -> None:
        """Meter with the cycle what an operation of this kind, or an install, took of the state files."""
        use = FileUse(
            adapter_id=log.adapter_id,
            base_model=log.base_model,
            tenant_id=log.tenant_id,
            kind=kind.value if isinstance(kind, Kind) else kind,
            num_bytes=num_bytes,
            seconds=seconds,
            is_operation=isinstance(kind, Kind),
        )
        self.file_uses.append(use)

    def count(self, log: AdapterLog, worker_id: str, result: ItemResult) -> pool_pb2.CycleEntry:
        """Count a result in the adapter's part of the cycle, and return that part.

        Its `tenant` is the tenant's id until the cycle is shown to a user.
        """
        if log.adapter_id not in self.entries:
            self.entries[log.adapter_id] = pool_pb2.CycleEntry(
                adapter_id=log.adapter_id, tenant=log.tenant_id, worker_id=worker_id
            )
        entry = self.entries[log.adapter_id]
        entry.num_tokens += result.num_tokens
        return entry

    def tenants(self) -> frozenset[str]:
        """Return the tenants that have results in the cycle."""
        return frozenset(entry.tenant for entry in self.entries.values())

    def as_message(self, base_model: str) -> pool_pb2.Cycle:
        """Return the cycle as the contract's message."""
        message = pool_pb2.Cycle(
            cycle_id=self.cycle_id,
            base_model=base_model,
            pass_seconds=self.pass_ended - self.started,
            step_seconds=self.steps_ended - self.pass_ended,
            entries=self.entries.values(),
            workers=[
                pool_pb2.WorkerPhases(worker_id=worker_id, seconds=seconds)
                for worker_id, seconds in self.phase_s.items()
            ],
        )
        message.start_time.FromNanoseconds(int(self.started_wall * 1e9))
        return message


class CycleJournal:
    """The cycles of all base models; their ids come from one counter."""

    def __init__(self, cycles: Cycles, throughput: Throughput) -> None:
        self._cycles = cycles
        self._throughput = throughput
        self._last_id = cycles.last_id()
        self.recent: deque[pool_pb2.Cycle] = deque(maxlen=CYCLES_SHOWN_MAX)
        self.watchers = Watchers()
        self._open: set[int] = set()
        """Cycles with a plan that have not ended."""

    def new_id(self) -> int:
        """Return the id of the next cycle."""
        self._last_id += 1
        return self._last_id

    def note_plan(self, cycle_id: int, plan: PassPlan) -> None:
        """Note which adapters run where: a hint after a crash, which becomes durable with the next commit."""
        self.note(cycle_id, {adapter_id: plan.placements[adapter_id] for adapter_id in plan.num_chunks})

    def note(self, cycle_id: int, placements: Mapping[str, str]) -> None:
        """Note a plan by its adapters and their workers; see `note_plan`."""
        self._open.add(cycle_id)
        self._cycles.note_plan(cycle_id, placements)

    def end(self, cycle_id: int) -> None:
        """Record that the plan of a cycle may be deleted, by the next commit of any cycle."""
        self._open.discard(cycle_id)

    async def persist(self, commit: CycleCommit) -> frozenset[str]:
        """Store a commit; return the adapters that it had to leave out. Raises StorageError."""
        return await self._cycles.persist(replace(commit, open_ids=tuple(sorted(self._open))))

    def publish(self, cycle: pool_pb2.Cycle) -> None:
        """Show and count a committed cycle."""
        metrics.count_cycle(cycle)
        for entry in cycle.entries:
            self._throughput.count_trained(entry.tenant, entry.worker_id, entry.num_tokens)
        self.recent.append(cycle)
        self.watchers.publish(cycle)


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
        classes: Classes,
        entries: Entries,
        traces: Traces | None,
    ) -> None:
        self._traces = traces
        self._classes = classes
        self._entries = entries
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
            cycle.finish(log.take_decided())
        self._journal.end(cycle.cycle_id)
        now = self._time.monotonic()
        for log in [self._group.logs[name] for name in cycle.entries if name in self._group.logs]:
            log.waits.switch(history_pb2.WAIT_REASON_CYCLE, now)
        self._planning.take_back(cycle.unused_tokens, cycle.floors)
        self._charge_rest(cycle)
        message = cycle.as_message(self._planning.base_model)
        has_run = bool(cycle.entries)
        commit = CycleCommit(
            cycle_id=cycle.cycle_id if has_run else 0,
            summary=serialize(message) if has_run else b"",
            states=cycle.staged,
            file_uses=cycle.file_uses,
            virtual_tokens=self._planning.counters(cycle.tenants()),
            fingerprints=self._classes.take_moved(cycle.entries),
        )
        began, day = self._time.monotonic(), day_of(self._time.wall())
        lost: frozenset[str] = frozenset()
        if has_run or cycle.finished:
            lost = await self._persist(commit, cycle, day)
        self._publish_outcomes(cycle, message, lost, day)
        if has_run:
            message.commit_seconds = self._time.monotonic() - began
            self._planning.costs.observe_end(cycle.worker_s - cycle.pass_worker_s, message.commit_seconds)
            if not cycle.file_uses:  # nothing was installed, saved or loaded
                self._observe_items(cycle, cycle.pass_worker_s + message.commit_seconds)
            self._journal.publish(message)
            if self._traces is not None:
                self._trace(message, self._traces)
        return lost

    def _trace(self, cycle: pool_pb2.Cycle, traces: Traces) -> None:
        """Trace a committed cycle, also for the operations of which chunks are left for later cycles."""
        adapter_ids = [entry.adapter_id for entry in cycle.entries]
        for log in [self._group.logs[name] for name in adapter_ids if name in self._group.logs]:
            for operation in log.run_in_part():
                traces.run_part(operation.name, cycle)
        traces.commit_cycle(cycle)

    def _observe_items(self, cycle: Cycle, seconds: float) -> None:
        """Record the adapters and the tokens of a cycle's pass with the seconds that pass and commit took."""
        parts = [(self._group.logs.get(name), entry.num_tokens) for name, entry in cycle.entries.items()]
        specs = [log.spec for log, num_tokens in parts if log is not None and num_tokens]
        self._planning.ready.costs.observe(specs, sum(num_tokens for _, num_tokens in parts), seconds)

    def _charge_rest(self, cycle: Cycle) -> None:
        """Charge what the coordinator itself took for the cycle so far, in equal parts for each adapter in it."""
        rest_s = self._time.monotonic() - cycle.started - cycle.worker_s
        self._planning.charge_equally(max(0.0, rest_s), (entry.tenant for entry in cycle.entries.values()))

    async def _persist(self, commit: CycleCommit, cycle: Cycle, day: int) -> frozenset[str]:
        """Store the commit with the cycle's outcomes; return the adapters that it had to leave out.

        A save whose sampler id is taken by another row is failed, and the outcomes of all others are committed. Raises
        StorageError.
        """
        while True:
            outcomes = [decided_row(operation, day, self._entry(cycle, operation)) for operation in cycle.finished]
            try:
                return await self._journal.persist(replace(commit, finished=outcomes))
            except ConflictError:
                if not self._saver.refuse_taken(cycle.staged, cycle.finished):
                    raise
            except StorageError as error:
                logger.error("cycle %d is not committed: %s", cycle.cycle_id, error, extra=about(cycle=cycle.cycle_id))
                raise

    def _entry(self, cycle: Cycle, operation: Operation) -> bytes:
        """Return an operation's entry in the history."""
        if operation.outcome is None or not operation.outcome.cycle_id:
            return self._entries.finished(operation)
        return self._entries.finished(
            operation,
            pass_s=cycle.pass_ended - cycle.started,
            step_s=cycle.steps_ended - cycle.pass_ended,
            num_tenants=len(cycle.tenants()),
        )

    def _publish_outcomes(self, cycle: Cycle, message: pool_pb2.Cycle, lost: frozenset[str], day: int) -> None:
        """Update memory after the transaction: show outcomes, and drop the copies of the adapters `lost`."""
        for operation in cycle.finished:
            if operation.target_id in lost:
                operation.undecide()
            else:
                self._in_flight.finish(operation, day)
                self._entries.committed(operation, message)
                operation.retire()
        for adapter_id in sorted(lost):
            if (log := self._group.logs.get(adapter_id)) is not None:
                log.lose_copy()
                self._group.mark_dirty(log)
        self._saver.committed(cycle.staged, lost)
        for worker_id, incarnation, operation, num_bytes in cycle.published:
            if operation.target_id in lost:
                self._fleet.drop_version(worker_id, operation.name)
            else:
                self._fleet.hold_version(worker_id, incarnation, operation.name, num_bytes)
        for snapshot in cycle.staged.snapshots:
            if snapshot.adapter_id in self._group.logs and snapshot.adapter_id not in lost:
                self._group.logs[snapshot.adapter_id].cover(snapshot.seq, EMPTY, math.inf)

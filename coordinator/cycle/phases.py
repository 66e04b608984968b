"""Runs the phases of a cycle: the pass, the step phase, and the snapshots between two cycles.

Makes sure that an adapter has a copy where it runs, builds the items, sends them (`dispatch`) and applies the results.
The part of a worker that is late is split off into a cycle of its own, which goes on when that worker has reported.
Does not depend on what a result means (`results`). Main invariants: an item is built only for an adapter with a current
copy; nothing is sent for an adapter whose part of another cycle is under way.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from coordinator.base.errors import ServiceError
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Cycle, CycleJournal
from coordinator.cycle.dispatch import Dispatch, Part, WorkerResult
from coordinator.cycle.items import ItemBuilder, MovedState, PhaseWork
from coordinator.cycle.results import Results
from coordinator.fleet.fleet import Fleet
from coordinator.observe.metrics import INSTALLS
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind
from coordinator.scheduling.classes import Classes
from coordinator.scheduling.planner import PassPlan, Planning
from tinkerpool.v1 import history_pb2
from workers.contract.logs import about
from workers.contract.messages import AdapterState, PassItem

logger = logging.getLogger(__name__)

EXPECTED_MAX = 64
"""Adapters in the hints to one worker; hints for more than it can load during a cycle would be useless."""
INSTALL_BYTES_MAX = 32 << 20
"""Most bytes of copies that one phase sends, unless a single one is larger; others are installed in the next cycle."""
DECODED_BYTES_MAX = 16 << 20
"""Large payloads that are decoded for one pass; the adapters beyond it run in the next cycle."""


@dataclass(frozen=True, slots=True)
class SplitCycle:
    """A part of a cycle that was split off, because its worker is late: a cycle with an id of its own."""

    cycle: Cycle
    part: Part
    adapter_ids: frozenset[str]


class Phases:
    """The phases of one base model's cycles."""

    def __init__(
        self,
        planning: Planning,
        logs: Mapping[str, AdapterLog],
        fleet: Fleet,
        items: ItemBuilder,
        dispatch: Dispatch,
        results: Results,
        snapshots: Snapshots,
        journal: CycleJournal,
        classes: Classes,
    ) -> None:
        self._classes = classes
        self._planning = planning
        self._logs = logs
        self._fleet = fleet
        self._items = items
        self.dispatch = dispatch
        self._results = results
        self._snapshots = snapshots
        self._journal = journal
        self._time = dispatch.time
        self._split: list[SplitCycle] = []
        self._resumed: SplitCycle | None = None
        """The one that `take_reported` returned last: its outcomes may not be committed yet."""
        self._read_byte_s = math.inf
        """Seconds that the message of a state takes for each byte: the fewest of all, because others wait for the event
        loop."""

    async def run_pass(self, cycle: Cycle, plan: PassPlan) -> None:
        """Run the planned chunks of forwards and forward_backwards, also if a stop or a suspension has come since."""
        work, unsent = PhaseWork(), dict(plan.charges)
        bytes_left: float = math.inf  # for the first one, whatever its size
        for adapter_id, num_chunks in plan.num_chunks.items():
            if (log := self._logs.get(adapter_id)) is None:
                continue  # it was deleted since the plan was made
            decoded = await self._items.decode_large(log.ahead(), num_chunks, bytes_left)
            if decoded is None:
                continue
            if decoded:
                num_bytes = sum(each.num_bytes for each in decoded.values())
                bytes_left = min(bytes_left, DECODED_BYTES_MAX) - num_bytes
            if self._logs.get(adapter_id) is log and await self._install(cycle, log, plan.placements[adapter_id], work):
                extra_tokens, now = unsent.pop(adapter_id), self._time.monotonic()
                for operation, item in self._items.pass_items(log.ahead(), num_chunks, decoded):
                    log.start(operation, now, cycle.cycle_id)
                    work.add(log, operation, item)
                    extra_tokens -= item.num_tokens
                work.weigh(log.home, extra_tokens)
                self._planning.ready.planned(adapter_id, cycle.cycle_id)
        for adapter_id, num_tokens in unsent.items():
            if (log := self._logs.get(adapter_id)) is not None:
                cycle.note_unused(log.tenant_id, num_tokens)
        for log in itertools.islice(self._planning.left_over(plan), EXPECTED_MAX):
            work.expect(log)
        for worker_id in self._planning.memory.take_asked():
            work.ask(worker_id)
        await self._run(cycle, work)
        self._planning.ready.ran(cycle.entries)

    async def run_steps(self, cycle: Cycle, only: Collection[str] | None = None) -> None:
        """Run the optimizer steps, saves and loads that are due by now, as many as the cycle has time for.

        `only`: of these adapters; None: of all.
        """
        work, residents = PhaseWork(), self._planning.residents()
        due = [(log, ahead.may_begin) for log, ahead in self._planning.ready.due_steps()]
        due = [(log, may_begin) for log, may_begin in due if only is None or log.adapter_id in only]
        elapsed_s = cycle.pass_ended - cycle.started if only is None else 0.0  # without the wait for a late worker
        num_planned = self._planning.plan_states(due, cycle.cycle_id, elapsed_s)
        for log, may_begin in due:
            if num_operations := num_planned.get(log.adapter_id, 0):
                await self._add_steps(cycle, log, may_begin, num_operations, residents, work)
            else:
                log.waits.switch(history_pb2.WAIT_REASON_BUDGET, cycle.pass_ended)
        await self._run(cycle, work)
        self._planning.ready.ran(cycle.entries)

    async def _add_steps(
        self,
        cycle: Cycle,
        log: AdapterLog,
        may_begin: bool,
        num_operations: int,
        residents: dict[str, int],
        work: PhaseWork,
    ) -> None:
        """Add the next operations of an adapter that are due."""
        worker_id = log.home or self._planning.place(log, residents)
        if worker_id not in residents or not await self._install(cycle, log, worker_id, work):
            return
        residents[worker_id] += 1
        generation = log.copy.generation
        began = self._time.monotonic()
        loaded = await self._items.read_load(log.ahead(may_begin=may_begin), num_operations)
        if loaded is not None:
            num_bytes = loaded.num_bytes if isinstance(loaded, AdapterState) else 0
            self._use_files(cycle, log, Kind.LOAD_STATE, num_bytes, self._time.monotonic() - began)
        ahead = log.ahead(may_begin=may_begin)
        if log.copy.generation != generation or self._planning.ready.waits_for_file(log, may_begin=may_begin):
            return  # the copy was lost, or a load arrived, while a file was read
        try:
            items = self._items.state_items(log, ahead, num_operations, loaded)
        except ServiceError as error:
            self._results.refuse_copy(log, error)
            return
        now = self._time.monotonic()
        for operation, item in items:
            log.start(operation, now, cycle.cycle_id)
            work.add(log, operation, item)

    async def take_snapshots(self, cycle: Cycle, logs: Collection[AdapterLog]) -> None:
        """Read these adapters' states from their workers, behind a cycle; they are written while later cycles run.

        Their tenants are charged what the workers and the messages take. Meanwhile the coordinator sends the results of
        that cycle, and the rest of the time is charged to its adapters.
        """
        work, asked = PhaseWork(), [(log, log.copy.generation) for log in logs]
        for log in logs:
            self._snapshots.begin(log)
            work.add(log, None, self._items.snapshot_item(log))
        reading = Cycle(0, self._time.wall(), self._time.monotonic())
        await self._run(reading, work)
        if any(log.home in self._fleet.away for log in logs):
            self._snapshots.end([(log, generation) for log, generation in asked if log.home not in self._fleet.away])
            return  # the wait is charged to no tenant
        self._snapshots.end(asked)
        rest_s = max(0.0, self._time.monotonic() - reading.started - reading.worker_s)
        num_bytes = sum(map(self._planning.memory.size_of, logs))
        self._read_byte_s = min(self._read_byte_s, rest_s / num_bytes)
        messages_s = num_bytes * self._read_byte_s
        self._planning.charge_equally(reading.worker_s + messages_s, (log.tenant_id for log in logs))
        self._planning.charge_equally(rest_s - messages_s, (entry.tenant for entry in cycle.entries.values()))

    # ---- workers that are late

    @property
    def awaits_workers(self) -> bool:
        """Whether a part that was split off has not ended."""
        return bool(self._split)

    @property
    def has_reports(self) -> bool:
        """Whether `take_reported` returns one."""
        return any(each.part.has_ended for each in self._split)

    def has_part_of(self, adapter_id: str) -> bool:
        """Return whether a part that was split off, and whose cycle has not ended, has the adapter."""
        return any(adapter_id in each.adapter_ids for each in (*self._split, self._resumed) if each is not None)

    def take_reported(self) -> SplitCycle | None:
        """Return a cycle that was split off and whose worker has reported or is lost; call `resume` and commit it.

        One at a time: the adapters of the others are held back until their turn. The cycle of the last one has ended.
        """
        self._resumed = next((each for each in self._split if each.part.has_ended), None)
        if self._resumed is not None:
            self._split.remove(self._resumed)
        return self._resumed

    async def resume(self, split: SplitCycle) -> None:
        """Apply what the worker reported; if that was a pass, then run the step phase of these adapters."""
        cycle, part = split.cycle, split.part
        self._fleet.set_apart(part.worker, is_apart=False)
        self._note_late()
        await self._apply(cycle, self.dispatch.take(cycle.cycle_id, part))
        cycle.note_phases({part.worker.info.worker_id: part.phase_s})
        now = self._time.monotonic()
        cycle.worked(now - cycle.started)  # the wait is charged to no tenant
        if not cycle.cycle_id:
            self._snapshots.end([(entry.log, entry.generation) for entry in part.entries])
            return
        self._planning.ready.ran(cycle.entries)
        if not cycle.pass_ended:
            cycle.end_pass(now)
            await self.run_steps(cycle, split.adapter_ids)
        cycle.end_steps(self._time.monotonic())

    def abandon(self) -> None:
        """Wait for no late worker any more: this coordinator ends."""
        for each in self._split:
            each.part.reply.cancel()
        self._split.clear()
        self._resumed = None

    def _split_off(self, cycle: Cycle, part: Part) -> None:
        """Let the part of a late worker be a cycle of its own: the other adapters do not wait for it."""
        worker_id = part.worker.info.worker_id
        adapter_ids = frozenset(entry.log.adapter_id for entry in part.entries)
        split = cycle.split(self._journal.new_id() if cycle.cycle_id else 0, adapter_ids)
        if split.cycle_id:
            self._journal.note(split.cycle_id, dict.fromkeys(sorted(adapter_ids), worker_id))
        logger.warning(
            "worker %s is late: %d adapters wait for it, in cycle %d instead of %d",
            part.worker.name,
            len(adapter_ids),
            split.cycle_id,
            cycle.cycle_id,
            extra=about(worker=worker_id, incarnation=part.worker.name, cycle=split.cycle_id),
        )
        self._split.append(SplitCycle(split, part, adapter_ids))
        self._fleet.set_apart(part.worker, is_apart=True)
        part.reply.add_done_callback(lambda _: self._fleet.changed.notify())
        self._note_late()

    def _note_late(self) -> None:
        names = frozenset[str]().union(*(each.adapter_ids for each in self._split))
        self._planning.ready.hold_back(names)

    async def _run(self, cycle: Cycle, work: PhaseWork) -> None:
        replies = await self.dispatch.run(cycle.cycle_id, work, self._planning)
        cycle.worked(replies.seconds)
        cycle.note_phases(replies.phase_s)
        await self._apply(cycle, replies.results)
        for part in replies.late:
            self._split_off(cycle, part)

    async def _apply(self, cycle: Cycle, results: Iterable[WorkerResult]) -> None:
        moved: dict[str, MovedState] = {}
        charges: defaultdict[str, float] = defaultdict(float)
        for entry, worker, result in results:
            began = self._time.monotonic()
            await self._results.apply(cycle, entry, worker, result)
            operation, tenant_id = entry.operation, entry.log.tenant_id
            if isinstance(entry.item, PassItem):
                if result.error is not None and not result.engine_s:
                    cycle.note_unused(tenant_id, self._planning.chunk_tokens(entry.log, entry.item))
                continue
            if operation is None:
                continue
            charges[tenant_id] += result.engine_s
            if not operation.kind.moves_state:
                continue
            applying_s = self._time.monotonic() - began
            num_bytes = result.state.num_bytes if result.state is not None else 0
            self._use_files(cycle, entry.log, operation.kind, num_bytes, applying_s)
            if result.error is None:
                kept = moved.setdefault(operation.name, MovedState(operation, entry.log))
                kept.add(entry, result, applying_s)
        self._planning.charge(charges)
        for each in moved.values():
            self._planning.observe_states(each.operation.kind, each.log.spec, each.num_bytes, each.seconds)

    async def _install(self, cycle: Cycle, log: AdapterLog, worker_id: str, work: PhaseWork) -> bool:
        """Place a copy of the adapter on the worker, unless it has one; return whether it has one.

        False also if the phase or the worker has no room for another copy, or its stored state is damaged; its
        operations are failed then.
        """
        if log.home:
            return True
        worker = self._fleet.find(worker_id)
        if worker is None or worker.is_away or self._snapshots.is_unsettled(log.adapter_id):
            return False  # its copy was lost since the plan was made, or the worker does not reply
        num_bytes = self._planning.memory.size_of(log)
        if not self._planning.has_room(log, worker):
            return False
        is_full = work.num_install_bytes > 0 and work.num_install_bytes + num_bytes > INSTALL_BYTES_MAX
        if is_full and self._items.has_snapshot(log):
            return False
        began = self._time.monotonic()
        try:
            install = await self._items.read_copy(log)
        except ServiceError as error:
            self._results.refuse_copy(log, error)
            return False
        if install.state is not None:
            self._use_files(cycle, log, "install", install.state.num_bytes, self._time.monotonic() - began)
        is_there = self._logs.get(log.adapter_id) is log
        if not is_there or not worker.is_live or self._snapshots.is_unsettled(log.adapter_id):
            return False
        log.place_copy(worker_id)
        self._classes.placed(log, worker)
        worker.keep(log.adapter_id)
        worker.sent(num_bytes)
        work.install(log, install)
        INSTALLS.inc()
        return True

    def _use_files(self, cycle: Cycle, log: AdapterLog, kind: Kind | str, num_bytes: int, seconds: float) -> None:
        """Charge and meter what an adapter took of the state files."""
        self._planning.charge({log.tenant_id: seconds})
        cycle.worked(seconds)
        cycle.use_files(log, kind, num_bytes, seconds)

"""Runs the phases of a cycle: the pass, the step phase, and the snapshots between two cycles.

`Phases` makes sure that an adapter has a copy where it runs, builds the items and applies the results. `Dispatch` sends
a phase to its workers. Does not depend on what a result means (`results`). Main invariants: an item is built only for
an adapter with a current copy; a batch goes to the incarnation that its copies were built for, or not at all.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from coordinator.base.errors import ServiceError
from coordinator.base.time import Time, within
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.commit import Cycle
from coordinator.cycle.items import Entry, ItemBuilder, MovedState, PhaseWork, flights
from coordinator.cycle.results import Results
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.adapter_log import AdapterLog
from coordinator.operations.operation import Kind
from coordinator.scheduling.cost_model import Deadlines
from coordinator.scheduling.planner import PassPlan, Planning
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.worker_losses import LossRecorder
from workers.contract.failpoints import failpoint
from workers.contract.messages import AdapterState, Batch, BatchResult, ItemResult, PassItem
from workers.contract.protocols import Pool, WorkerLost

EXPECTED_MAX = 64
"""Adapters in the hints to one worker; hints for more than it can load during a cycle would be useless."""
INSTALL_BYTES_MAX = 32 << 20
"""Most bytes of copies that one phase sends, unless a single one is larger; others are installed in the next cycle."""
DECODED_BYTES_MAX = 16 << 20
"""Large payloads that are decoded for one pass; the adapters beyond it run in the next cycle."""
OVERDUE_S = 5.0
"""Seconds after its deadline at which a cycle that has made no progress counts as stuck."""


class TakenOver(Exception):
    """A coordinator of a later epoch has the workers: this one must end."""


class Dispatch:
    """Sends one phase to all its workers at once, and waits for each until the deadline of its batch.

    Does not depend on what a result means.
    """

    def __init__(
        self,
        pool: Pool,
        time: Time,
        epoch: int,
        fleet: Fleet,
        losses: LossRecorder,
        quarantine: Quarantine,
        deadlines: Deadlines,
    ) -> None:
        self._pool = pool
        self._time = time
        self._epoch = epoch
        self._fleet = fleet
        self._losses = losses
        self._quarantine = quarantine
        self._deadlines = deadlines
        self._overdue_at = math.inf

    @property
    def is_overdue(self) -> bool:
        """Whether the present cycle has passed its deadline by more than `OVERDUE_S`."""
        return self._time.monotonic() > self._overdue_at

    def watch(self, seconds: float) -> None:
        """Start a deadline: the cycle must make progress within these seconds and `OVERDUE_S`."""
        self._overdue_at = self._time.monotonic() + seconds + OVERDUE_S

    def rest(self) -> None:
        """End the deadline."""
        self._overdue_at = math.inf

    async def run(
        self, cycle_id: int, work: PhaseWork, planning: Planning
    ) -> tuple[list[tuple[Entry, Incarnation, ItemResult]], float]:
        """Run one phase; return the results of the workers that replied, item by item, and the seconds they took.

        If a worker was lost: the seconds until that was known. Raises TakenOver.
        """
        began = self._time.monotonic()
        sent: list[tuple[Incarnation, list[Entry], Batch, float, float]] = []
        for worker_id in work.worker_ids():
            worker, entries = self._fleet.find(worker_id), work.entries(worker_id)
            if worker is None:
                continue  # lost since the work was built: its copies are not current
            worker.begin_phase(flights(entries))
            batch = self._batch(cycle_id, work, worker, entries, planning)
            extra_tokens = work.extra_tokens(worker_id)
            sent.append((worker, entries, batch, extra_tokens, self._allowed_s(worker, batch, extra_tokens)))
        self.watch(max((allowed_s for *_, allowed_s in sent), default=0.0))
        replies = await asyncio.gather(
            *(
                self._run_batch(worker, batch, extra_tokens, allowed_s, is_first=index == 0)
                for index, (worker, _, batch, extra_tokens, allowed_s) in enumerate(sent)
            ),
            return_exceptions=True,
        )
        self.rest()
        waited_s, computed_s = self._time.monotonic() - began, 0.0
        results: list[tuple[Entry, Incarnation, ItemResult]] = []
        for (worker, entries, *_), reply in zip(sent, replies, strict=True):
            if isinstance(reply, BatchResult):
                worker.end_phase(reply.held_bytes)
                computed_s = max(computed_s, reply.wall_s)
                if reply.epoch != self._epoch:
                    raise TakenOver(f"{worker.name} works for epoch {reply.epoch}, this is {self._epoch}")
                results += ((entry, worker, result) for entry, result in zip(entries, reply.results, strict=True))
            elif isinstance(reply, WorkerLost):
                self._losses.record(worker.info.worker_id, worker.name, f"in cycle {cycle_id}: {reply}")
                computed_s = waited_s
            else:
                raise reply
        return results, min(computed_s, waited_s)

    def _batch(
        self, cycle_id: int, work: PhaseWork, worker: Incarnation, entries: list[Entry], planning: Planning
    ) -> Batch:
        worker_id = worker.info.worker_id
        sampling = {flight.tenant_id for flight in worker.samples.values()}
        return Batch(
            epoch=self._epoch,
            cycle_id=cycle_id,
            installs=work.installs(worker_id),
            removals=worker.take_removals(),
            items=tuple(entry.item for entry in entries),
            decode_share=planning.decode_share(worker_id, sampling, {entry.log.tenant_id for entry in entries}),
            expected=work.expected(worker_id),
        )

    def _allowed_s(self, worker: Incarnation, batch: Batch, extra_tokens: float) -> float:
        losses = max((self._quarantine.num_solo_losses(flight.name) for flight in worker.training), default=0)
        return self._deadlines.allowed_s(batch, worker.name, losses, extra_tokens)

    async def _run_batch(
        self, worker: Incarnation, batch: Batch, extra_tokens: float, allowed_s: float, *, is_first: bool
    ) -> BatchResult:
        """Return a worker's reply, if it comes in time. Raises WorkerLost."""
        if not is_first:
            failpoint("dispatch.partial")
        began = self._time.monotonic()
        try:
            reply = await within(allowed_s, self._pool.run(worker.info.worker_id, batch))
        except TimeoutError:
            self._deadlines.forget(worker.name)
            raise WorkerLost(f"no reply to a batch within {allowed_s:.0f} s") from None
        self._fleet.answered(worker.info.worker_id)
        self._deadlines.observe(batch, worker.name, self._time.monotonic() - began, extra_tokens)
        return reply


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
        time: Time,
    ) -> None:
        self._planning = planning
        self._logs = logs
        self._fleet = fleet
        self._items = items
        self.dispatch = dispatch
        self._results = results
        self._snapshots = snapshots
        self._time = time

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
                extra_tokens = unsent.pop(adapter_id)
                for operation, item in self._items.pass_items(log.ahead(), num_chunks, decoded):
                    log.copy.start(operation)
                    work.add(log.home, log, operation, item)
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

    async def run_steps(self, cycle: Cycle) -> None:
        """Run the optimizer steps, saves and loads that are due by now, as many as the cycle has time for."""
        work, residents = PhaseWork(), self._planning.residents()
        due = [(log, ahead.may_begin) for log, ahead in self._planning.ready.due_steps()]
        num_planned = self._planning.plan_states(due, cycle.cycle_id, cycle.pass_ended - cycle.started)
        for log, may_begin in due:
            if num_operations := num_planned.get(log.adapter_id, 0):
                await self._add_steps(cycle, log, may_begin, num_operations, residents, work)
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
            await self._refuse_copy(log, error)
            return
        for operation, item in items:
            log.copy.start(operation)
            work.add(log.home, log, operation, item)

    async def take_snapshots(self, logs: Collection[AdapterLog]) -> None:
        """Read these adapters' states from their workers; they are written while later cycles run."""
        work = PhaseWork()
        for log in logs:
            self._snapshots.begin(log)
            work.add(log.home, log, None, self._items.snapshot_item(log))
        began = self._time.monotonic()
        await self._run(Cycle(0, self._time.wall(), began), work)
        self._snapshots.end()
        part_s = (self._time.monotonic() - began) / max(1, len(logs))
        num_adapters = Counter(log.tenant_id for log in logs)
        self._planning.charge({tenant: part_s * number for tenant, number in num_adapters.items()})

    async def _run(self, cycle: Cycle, work: PhaseWork) -> None:
        moved: dict[str, MovedState] = {}
        charges: defaultdict[str, float] = defaultdict(float)
        results, worker_s = await self.dispatch.run(cycle.cycle_id, work, self._planning)
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
        cycle.worked(worker_s)
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
        if worker is None or self._snapshots.is_unsettled(log.adapter_id):
            return False  # its copy was lost since the plan was made
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
            await self._refuse_copy(log, error)
            return False
        if install.state is not None:
            self._use_files(cycle, log, "install", install.state.num_bytes, self._time.monotonic() - began)
        is_there = self._logs.get(log.adapter_id) is log
        if not is_there or not worker.is_live or self._snapshots.is_unsettled(log.adapter_id):
            return False
        log.place_copy(worker_id)
        worker.keep(log.adapter_id)
        worker.sent(num_bytes)
        work.install(log, install)
        return True

    def _use_files(self, cycle: Cycle, log: AdapterLog, kind: Kind | str, num_bytes: int, seconds: float) -> None:
        """Charge and meter what an adapter took of the state files."""
        self._planning.charge({log.tenant_id: seconds})
        cycle.worked(seconds)
        cycle.use_files(log, kind, num_bytes, seconds)

    async def _refuse_copy(self, log: AdapterLog, error: ServiceError) -> None:
        """Handle an adapter of which no copy can be made.

        After a transient failure: back off, so that the next cycle does not retry at once.
        """
        self._results.refuse_copy(log, error)
        if error.retry_delay_s is not None:
            await self._time.sleep(error.retry_delay_s)

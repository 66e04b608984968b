"""The hot loop of one base model: plan, log, run, commit.

A cycle has two phases. The pass runs chunks of forwards and forward_backwards of many tenants on every worker at once;
the step phase, planned when the pass has ended, takes the optimizer steps, saves and loads that are due by then.
Nothing that a cycle did is visible before its commit.

Knows the parts (queues, planner, builder, pool, store) and their order; each part knows its own business. Does not know
doors, tenants' names or SQL.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import ServiceError
from coordinator.base.time import Time
from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.snapshots import Snapshots
from coordinator.cycle.dispatch import Dispatch
from coordinator.cycle.items import BatchBuilder
from coordinator.cycle.phase import Running, Work
from coordinator.cycle.results import Answers
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.canonical import serialize
from coordinator.operations.in_flight import OperationTable
from coordinator.operations.operation import Operation
from coordinator.scheduling.budget import TokenBudget
from coordinator.scheduling.clock import CycleClock
from coordinator.scheduling.cost_model import CycleCosts
from coordinator.scheduling.planner import FairState, PassPlan, place, plan_pass
from coordinator.scheduling.quarantine import Suspects
from coordinator.scheduling.ready_set import Roster
from coordinator.storage.store import Store
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import WorkerInfo
from workers.contract.protocols import Pool

SNAPSHOTS_AT_ONCE = 8
"""States that are in memory at a time when everything is snapshotted."""
STOP_POLL_S = 0.01
EXPECTED_MAX = 64
"""Adapters that a worker is told are likely to come next; more than it could fetch during a cycle helps nobody."""


class CycleLoop:
    """Runs the cycles of one base model over its adapters and workers."""

    def __init__(
        self,
        *,
        base_model: str,
        chunk_tokens: int,
        config: CoordinatorConfig,
        time: Time,
        epoch: int,
        store: Store,
        pool: Pool,
        builder: BatchBuilder,
        saver: Saver,
        table: OperationTable,
        suspects: Suspects,
        fair: FairState,
        new_cycle_id: Callable[[], int],
        publish: Callable[[pool_pb2.Cycle], None],
        take_removals: Callable[[str], tuple[str, ...]],
        decode_share: Callable[[str, Collection[str]], float],
        published: Callable[[str, str], None],
        withdrawn: Callable[[str, str], None],
        worker_lost: Callable[[str, str], None],
        worker_answered: Callable[[str], None],
    ) -> None:
        self.base_model = base_model
        costs = CycleCosts()
        self.clock = CycleClock(time, config.linger_s, costs)
        self.fair = fair
        self.dead_workers: set[str] = set()
        self.suspects = suspects
        self.budget = TokenBudget(
            costs,
            base_model=base_model,
            chunk_tokens=chunk_tokens,
            tokens=config.cycle_tokens_max,
            cycle_s_max=config.cycle_s_max,
        )
        self._snapshots = Snapshots(saver, time, config.replay_s_max, self.clock.notify)
        self._roster = Roster(suspects, self._snapshots.is_unsettled, saver.publishing.is_unwritten)
        self._answers = Answers(saver, self._snapshots, published)
        self._dispatch = Dispatch(
            pool=pool,
            time=time,
            epoch=epoch,
            suspects=suspects,
            costs=costs,
            take_removals=take_removals,
            decode_share=decode_share,
            worker_lost=worker_lost,
            worker_answered=worker_answered,
        )
        self._stop_s_max = config.stop_s_max
        self._costs = costs
        self._time = time
        self._store = store
        self._pool = pool
        self._builder = builder
        self._saver = saver
        self._table = table
        self._new_cycle_id = new_cycle_id
        self._publish = publish
        self._published = published
        self._withdrawn = withdrawn
        self._is_over = False
        self._is_idle, self._has_ended = asyncio.Event(), asyncio.Event()
        self._is_idle.set()
        self._has_ended.set()

    async def run(self) -> None:
        """Cycle after cycle, until `stop`. Raises what makes going on unsafe (a failed commit)."""
        self._has_ended.clear()
        try:
            while True:
                await self.clock.next_cycle(self._is_ready, self._roster.tenants, self._is_full)
                if self._is_over:
                    return
                self._is_idle.clear()
                cycle, plan = self._plan()
                self._log(cycle, plan)
                await self._run(cycle, plan)
                lost = await self._commit(cycle)
                await self._snapshot(lost)
                self._is_idle.set()
        finally:
            self._is_idle.set()
            self._has_ended.set()

    async def stop(self) -> None:
        """Begin no more operations, and wait for the running cycle and for what has been run in part."""
        self._roster.is_stopping = True
        await self._is_idle.wait()
        deadline = self._time.monotonic() + self._stop_s_max
        while self._is_ready() and self._time.monotonic() < deadline:
            self.clock.notify()
            await asyncio.sleep(STOP_POLL_S)
            await self._is_idle.wait()
        self._is_over = True
        self.clock.notify()
        await self._has_ended.wait()

    @property
    def is_stuck(self) -> bool:
        """The present cycle has not come on for longer than it may."""
        return self._dispatch.is_overdue

    @property
    def adapters(self) -> Mapping[str, AdapterQueue]:
        """The adapters of this base model."""
        return self._roster.adapters

    def add(self, adapter: AdapterQueue) -> None:
        """A new adapter."""
        self._roster.add(adapter)

    def touch(self, adapter: AdapterQueue) -> None:
        """The adapter has something new. (It may have been deleted while that was logged.)"""
        if adapter.adapter_id in self.adapters:
            self._roster.touch(adapter)
            self.clock.arrived(adapter.tenant_id)

    async def remove(self, adapter: AdapterQueue) -> None:
        """Let go of a deleted adapter; returns when no cycle has it any more."""
        self._roster.remove(adapter)
        self.suspects.clear(adapter.adapter_id)
        await self._is_idle.wait()
        self.suspects.clear(adapter.adapter_id)  # its worker may have died meanwhile
        self._snapshots.forget(adapter.adapter_id)
        self._answers.forget(adapter.adapter_id)

    def running_on(self, worker_id: str) -> list[Operation]:
        """What the worker is running of the present cycle."""
        return self._dispatch.running_on(worker_id)

    def lose_worker(self, worker_id: str) -> None:
        """A worker's life has ended, and every copy on it. What it was running is suspected."""
        self.dead_workers.add(worker_id)
        self.suspects.wait(is_waiting=True)
        seqs: dict[str, list[int]] = {}
        for operation in self._dispatch.running_on(worker_id):
            seqs.setdefault(operation.target_id, []).append(operation.seq)
        for adapter in self.adapters.values():
            if adapter.worker_id == worker_id:
                adapter.lose_copy()
                self._roster.touch(adapter)
            if found := seqs.get(adapter.adapter_id):
                adapter.suspect(min(found), max(found))
        self._dispatch.forget(worker_id)

    def worker_is_back(self, worker_id: str) -> None:
        """A new life of the worker has started, empty."""
        self.dead_workers.discard(worker_id)
        self.suspects.wait(is_waiting=bool(self.dead_workers))
        self.clock.notify()

    def workers(self) -> list[WorkerInfo]:
        """The live workers of this base model."""
        return [
            w for w in self._pool.workers() if w.model.name == self.base_model and w.worker_id not in self.dead_workers
        ]

    def convict(self, operation: Operation) -> None:
        """Its worker died whenever it ran, also alone: fail it."""
        adapter = self.adapters[operation.target_id]
        self._answers.convict(adapter, operation)
        self.touch(adapter)

    async def snapshot_all(self) -> None:
        """Snapshot every adapter whose copy is ahead of its snapshot, so that the next start replays nothing."""
        await self._snapshots.finish()
        self._snapshots.settle(self.adapters)
        for adapter in self.adapters.values():
            adapter.settle()
            self._roster.touch(adapter)
        await self._commit(Running(0, self._time.wall(), self._time.monotonic()))  # what has been decided since
        ahead = [adapter for adapter in self.adapters.values() if self._snapshots.can_take(adapter)]
        for start in range(0, len(ahead), SNAPSHOTS_AT_ONCE):
            await self._take_snapshots(ahead[start : start + SNAPSHOTS_AT_ONCE])
            await self._snapshots.finish()
        self._snapshots.settle(self.adapters)

    # ---- plan

    def _is_ready(self) -> bool:
        if self._is_over:
            return True
        self._snapshots.settle(self.adapters)
        if not self.workers():
            return False
        return self._roster.is_ready()

    def _is_full(self) -> bool:
        return self._roster.has_tokens(self.budget.tokens * max(1, len(self.workers())))

    def _residents(self) -> dict[str, int]:
        return self._roster.residents(worker.worker_id for worker in self.workers())

    def _plan(self) -> tuple[Running, PassPlan]:
        cycle = Running(self._new_cycle_id(), self._time.wall(), self._time.monotonic())
        self.budget.update()
        candidates = self._roster.candidates()
        plan, self.fair = plan_pass(candidates, self.fair, self._residents(), self.budget.tokens)
        return cycle, plan

    # ---- log

    def _log(self, cycle: Running, plan: PassPlan) -> None:
        """Note who is about to run where. It rides the next commit: no barrier, only a hint after a crash."""
        placements = {adapter_id: plan.placements[adapter_id] for adapter_id in plan.num_chunks}
        self._store.cycles.note_plan(cycle.cycle_id, placements)

    # ---- run

    async def _run(self, cycle: Running, plan: PassPlan) -> None:
        await self._run_pass(cycle, plan)
        cycle.pass_ended = self._time.monotonic()
        await self._run_steps(cycle)
        cycle.step_ended = self._time.monotonic()

    async def _run_pass(self, cycle: Running, plan: PassPlan) -> None:
        work = Work()
        for adapter_id, num_chunks in plan.num_chunks.items():
            adapter = self.adapters.get(adapter_id)  # it may have been deleted since the plan was made
            if adapter is not None and await self._install(adapter, plan.placements[adapter_id], work):
                for operation, item in self._builder.pass_items(adapter, num_chunks):
                    operation.is_running = True
                    work.add(adapter, operation, item)
                self._roster.planned(adapter_id, cycle.cycle_id)
        for adapter in itertools.islice(self._left_over(plan), EXPECTED_MAX):
            work.expect(adapter)
        await self._run_work(cycle, work)

    def _left_over(self, plan: PassPlan) -> Iterator[AdapterQueue]:
        """Adapters with a copy somewhere whose passes are ready and did not get into the plan."""
        for adapter in self._roster.allowed():
            is_left = adapter.adapter_id not in plan.num_chunks and adapter.worker_id not in {"", *self.dead_workers}
            if is_left and next(adapter.ready_passes(), None) is not None:
                yield adapter

    async def _run_steps(self, cycle: Running) -> None:
        work = Work()
        residents = self._residents()
        for adapter in self._roster.due_steps():
            worker_id = adapter.worker_id or place(residents)
            if worker_id not in residents or not await self._install(adapter, worker_id, work):
                continue
            residents[worker_id] += 1
            if self._roster.waits_for_file(adapter):
                continue  # a load has come while another copy, or its own, was read
            try:
                items = self._builder.state_items(adapter)
            except ServiceError as error:
                await self._give_up(adapter, error)
                continue
            for operation, item in items:
                operation.is_running = True
                work.add(adapter, operation, item)
        await self._run_work(cycle, work)

    async def _install(self, adapter: AdapterQueue, worker_id: str, work: Work) -> bool:
        """Make sure that the adapter has a copy on the worker.

        False if it cannot have one now, or if its state is damaged; its operations fail then.
        """
        if adapter.worker_id:
            return True
        if self._snapshots.is_unsettled(adapter.adapter_id) or worker_id in self.dead_workers:
            return False  # its copy was lost since the plan was made
        try:
            install = await asyncio.to_thread(self._builder.installer(adapter))
            if worker_id in self.dead_workers:
                return False
        except ServiceError as error:
            await self._give_up(adapter, error)
            return False
        adapter.placed(worker_id)
        adapter.settle()
        work.installs.setdefault(worker_id, []).append(install)
        return True

    async def _give_up(self, adapter: AdapterQueue, error: ServiceError) -> None:
        """No copy of it can be made. Where that may pass, not every cycle to come shall try it at once."""
        self._answers.give_up(adapter, error)
        if error.retry_delay_s is not None:
            await self._time.sleep(error.retry_delay_s)

    async def _run_work(self, cycle: Running, work: Work) -> None:
        """Run one phase on all its workers at once, then take in the answers."""
        for entry, result in await self._dispatch.run(cycle.cycle_id, work, self.workers()):
            await self._answers.take_in(cycle, entry, result)

    # ---- commit

    async def _commit(self, cycle: Running) -> frozenset[str]:
        """Make true what the cycle did. Returns the adapters of which something ran whose append had failed."""
        self._dispatch.watch(0.0)
        for adapter in self._roster.touched():
            adapter.settle()
            cycle.finished += adapter.decided
            adapter.decided.clear()
        tenants = frozenset(entry.tenant for entry in cycle.entries.values())
        commit = cycle.commit
        commit.virtual_tokens = {t: self.fair.shares[t].virtual_tokens for t in tenants if t in self.fair.shares}
        message = self._message(cycle)
        if cycle.entries:
            commit.cycle_id, commit.summary = cycle.cycle_id, serialize(message)
        committing_at = self._time.monotonic()
        lost: frozenset[str] = frozenset()
        if commit.cycle_id or cycle.finished:
            lost = await self._saver.persist(commit, cycle.finished)
        self._dispatch.rest()
        for operation in cycle.finished:
            if operation.target_id in lost:
                operation.undecide()
            else:
                self._table.finished(operation)
                operation.retire()
        for adapter in [self.adapters[adapter_id] for adapter_id in sorted(lost) if adapter_id in self.adapters]:
            adapter.lose_copy()
            self._roster.touch(adapter)
        self._saver.committed(commit, lost)
        for worker_id, operation in cycle.published:
            (self._withdrawn if operation.target_id in lost else self._published)(worker_id, operation.name)
        for snapshot in commit.snapshots:
            if snapshot.adapter_id in self.adapters and snapshot.adapter_id not in lost:
                self.adapters[snapshot.adapter_id].covered(snapshot.seq, b"", math.inf)
        self._roster.ran(cycle.entries)
        self.clock.finished(tenants)
        if cycle.entries:
            message.commit_seconds = self._time.monotonic() - committing_at
            self._costs.observe_commit(message.commit_seconds)
            self._publish(message)
        return lost

    # ---- between cycles

    async def _snapshot(self, lost: frozenset[str]) -> None:
        """Have states handed out that are due for a snapshot; they are written beside the next cycles.

        Not beside a suspect: a worker that dies of a snapshot would look as if that had killed it.
        """
        ahead = [adapter for adapter in self._roster.ahead() if self.suspects.may_run(adapter.adapter_id)]
        due = self._snapshots.due(ahead, lost)
        if due:
            await self._take_snapshots(due)

    async def _take_snapshots(self, adapters: Iterable[AdapterQueue]) -> None:
        work = Work()
        for adapter in adapters:
            self._snapshots.begin(adapter)
            work.add(adapter, None, self._builder.snapshot_item(adapter))
        await self._run_work(Running(0, self._time.wall(), self._time.monotonic()), work)
        self._snapshots.end()

    def _message(self, cycle: Running) -> pool_pb2.Cycle:
        message = pool_pb2.Cycle(
            cycle_id=cycle.cycle_id,
            base_model=self.base_model,
            pass_seconds=cycle.pass_ended - cycle.started,
            step_seconds=cycle.step_ended - cycle.pass_ended,
            entries=cycle.entries.values(),
        )
        message.start_time.FromNanoseconds(int(cycle.started_wall * 1e9))
        return message

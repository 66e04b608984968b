"""The hot loop of one base model: plan, log, run, commit.

A cycle has two phases. The pass runs chunks of forwards and forward_backwards of many tenants on every worker at once;
the step phase, planned when the pass has ended, takes the optimizer steps, saves and loads that are due by then.
Nothing that a cycle did is visible before its commit.

Knows the parts (queues, planner, builder, pool, store) and their order; each part knows its own business. Does not know
doors, tenants' names or SQL.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from coordinator.batches import BatchBuilder, fill_load, fill_pass, fill_step, service_error
from coordinator.bodies import serialize
from coordinator.clock import CycleClock, Time
from coordinator.config import CoordinatorConfig
from coordinator.errors import Code, ServiceError
from coordinator.operations import Kind, Operation, item_error
from coordinator.planner import Candidate, FairState, PassPlan, place, plan_pass
from coordinator.queue import AdapterQueue, window_closed
from coordinator.running import Running, Work, finished_row
from coordinator.saving import Saver
from coordinator.store import Store
from coordinator.waiting import OperationTable
from tinkerpool.v1 import pool_pb2
from workers.messages import BatchResult, ErrorCode, Item, ItemResult, PassItem, WorkerInfo
from workers.pool import Pool, WorkerLost

logger = logging.getLogger(__name__)

LOGGED_OPERATIONS_MAX = 1000
"""Operations since its snapshot after which an adapter is snapshotted, however cheap they were: memory is bounded."""
REINSTALLS_MAX = 5
"""How often in a row an adapter's copy may be found out of order before its operations are failed."""


class TakenOver(Exception):
    """A later coordinator has the workers: this one must end."""


class CycleLoop:
    """Runs the cycles of one base model over its adapters and workers."""

    def __init__(
        self,
        *,
        base_model: str,
        config: CoordinatorConfig,
        time: Time,
        epoch: int,
        store: Store,
        pool: Pool,
        builder: BatchBuilder,
        saver: Saver,
        table: OperationTable,
        fair: FairState,
        new_cycle_id: Callable[[], int],
        publish: Callable[[pool_pb2.Cycle], None],
        take_removals: Callable[[str], tuple[str, ...]],
        published: Callable[[str, str], None],
        worker_lost: Callable[[str, str], None],
    ) -> None:
        self.base_model = base_model
        self.adapters: dict[str, AdapterQueue] = {}
        self.clock = CycleClock(time, config.linger_s)
        self.fair = fair
        self.is_stopping = False
        self.dead_workers: set[str] = set()
        self._config = config
        self._time = time
        self._epoch = epoch
        self._store = store
        self._pool = pool
        self._builder = builder
        self._saver = saver
        self._table = table
        self._new_cycle_id = new_cycle_id
        self._publish = publish
        self._take_removals = take_removals
        self._published = published
        self._worker_lost = worker_lost
        self._ready: dict[str, AdapterQueue] = {}
        self._last_cycle: dict[str, int] = {}
        self._num_reinstalls: dict[str, int] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def run(self) -> None:
        """Cycle after cycle, until `stop`. Raises what makes going on unsafe (a failed commit)."""
        try:
            while True:
                await self.clock.next_cycle(self._is_ready, self._ready_tenants, self._is_full)
                self._is_idle.clear()
                cycle, plan = self._plan()
                self._log(cycle, plan)
                await self._run(cycle, plan)
                await self._commit(cycle)
                self._is_idle.set()
        finally:
            self._is_idle.set()

    async def stop(self) -> None:
        """Plan no more cycles and wait for the running one."""
        self.is_stopping = True
        await self._is_idle.wait()

    def touch(self, adapter: AdapterQueue) -> None:
        """The adapter has something new. (It may have been deleted while that was logged.)"""
        if adapter.adapter_id in self.adapters:
            self._ready[adapter.adapter_id] = adapter
            self.clock.notify()

    async def remove(self, adapter: AdapterQueue) -> None:
        """Let go of a deleted adapter; returns when no cycle has it any more."""
        self.adapters.pop(adapter.adapter_id, None)
        self._ready.pop(adapter.adapter_id, None)
        self._last_cycle.pop(adapter.adapter_id, None)
        await self._is_idle.wait()

    def lose_worker(self, worker_id: str) -> None:
        """A worker's life has ended, and every copy on it."""
        self.dead_workers.add(worker_id)
        for adapter in self.adapters.values():
            if adapter.worker_id == worker_id:
                adapter.lose_copy()
                self._ready[adapter.adapter_id] = adapter

    def worker_is_back(self, worker_id: str) -> None:
        """A new life of the worker has started, empty."""
        self.dead_workers.discard(worker_id)
        self.clock.notify()

    def workers(self) -> list[WorkerInfo]:
        """The live workers of this base model."""
        return [
            w for w in self._pool.workers() if w.model.name == self.base_model and w.worker_id not in self.dead_workers
        ]

    async def snapshot_all(self) -> None:
        """Snapshot every adapter whose copy is ahead of its snapshot, so that the next start replays nothing."""
        cycle = Running(0, self._time.wall(), self._time.monotonic())
        work = Work()
        for adapter in self.adapters.values():
            adapter.settle()
            if self._can_snapshot(adapter):
                work.add(adapter, None, self._builder.snapshot_item(adapter))
        await self._run_work(cycle, work)
        self._saver.committed(cycle.commit, self.adapters, await self._store.commit_cycle(cycle.commit))

    # ---- plan

    def _is_ready(self) -> bool:
        if self.is_stopping or not self.workers():
            return False
        for adapter_id in [a for a, adapter in self._ready.items() if not adapter.is_ready()]:
            del self._ready[adapter_id]
        return bool(self._ready)

    def _ready_tenants(self) -> frozenset[str]:
        return frozenset(adapter.tenant_id for adapter in self._ready.values())

    def _is_full(self) -> bool:
        room = self._config.cycle_tokens_max * max(1, len(self.workers()))
        for adapter in self._ready.values():
            room -= sum(_ready_chunk_tokens(adapter, room))
            if room <= 0:
                return True
        return False

    def _residents(self) -> dict[str, int]:
        residents = {worker.worker_id: 0 for worker in self.workers()}
        for adapter in self.adapters.values():
            if adapter.worker_id in residents:
                residents[adapter.worker_id] += 1
        return residents

    def _plan(self) -> tuple[Running, PassPlan]:
        cycle = Running(self._new_cycle_id(), self._time.wall(), self._time.monotonic())
        candidates = [
            Candidate(
                adapter_id=adapter.adapter_id,
                tenant_id=adapter.tenant_id,
                worker_id=adapter.worker_id,
                chunk_tokens=tokens,
                last_cycle_id=self._last_cycle.get(adapter.adapter_id, 0),
            )
            for adapter in self._ready.values()
            if (tokens := _ready_chunk_tokens(adapter, self._config.cycle_tokens_max))
        ]
        plan, self.fair = plan_pass(candidates, self.fair, self._residents(), self._config.cycle_tokens_max)
        return cycle, plan

    # ---- log

    def _log(self, cycle: Running, plan: PassPlan) -> None:
        """Note who is about to run where. It rides the next commit: no barrier, only a hint after a crash."""
        placements = {adapter_id: plan.placements[adapter_id] for adapter_id in plan.num_chunks}
        self._store.note_plan(cycle.cycle_id, placements)

    # ---- run

    async def _run(self, cycle: Running, plan: PassPlan) -> None:
        await self._run_pass(cycle, plan)
        cycle.pass_ended = self._time.monotonic()
        await self._run_steps(cycle)
        cycle.step_ended = self._time.monotonic()

    async def _run_pass(self, cycle: Running, plan: PassPlan) -> None:
        work = Work()
        for adapter_id, num_chunks in plan.num_chunks.items():
            adapter = self.adapters[adapter_id]
            if self._install(adapter, plan.placements[adapter_id], work):
                for operation, item in self._builder.pass_items(adapter, num_chunks):
                    operation.is_running = True
                    work.add(adapter, operation, item)
                self._last_cycle[adapter_id] = cycle.cycle_id
        await self._run_work(cycle, work)

    async def _run_steps(self, cycle: Running) -> None:
        work = Work()
        residents = self._residents()
        for adapter in list(self._ready.values()):
            adapter.settle()
            if next(adapter.ready_states(), None) is None:
                continue
            worker_id = adapter.worker_id or place(residents)
            if worker_id not in residents or not self._install(adapter, worker_id, work):
                continue
            residents[worker_id] += 1
            try:
                items = self._builder.state_items(adapter)
            except ServiceError as error:
                self._give_up(adapter, error)
                continue
            for operation, item in items:
                operation.is_running = True
                work.add(adapter, operation, item)
        await self._run_work(cycle, work)
        for adapter, operations in work.by_adapter():
            if any(o.kind is Kind.LOAD_STATE and not o.is_failed for o in operations):
                adapter.engine_s_since_snapshot = math.inf  # a replay would need the checkpoint, which may be deleted
        await self._run_snapshots(cycle)

    async def _run_snapshots(self, cycle: Running) -> None:
        """Snapshot the adapters of this cycle that would be dear to replay or have a long log, where it is safe."""
        work = Work()
        for adapter in [self.adapters[a] for a in cycle.entries if a in self.adapters]:
            is_dear = adapter.engine_s_since_snapshot > self._config.replay_s_max
            is_due = is_dear or len(adapter.operations) > LOGGED_OPERATIONS_MAX
            adapter.settle()
            if is_due and self._can_snapshot(adapter):
                work.add(adapter, None, self._builder.snapshot_item(adapter))
        await self._run_work(cycle, work)

    def _can_snapshot(self, adapter: AdapterQueue) -> bool:
        is_ahead = bool(adapter.worker_id) and adapter.placed_seq > adapter.snapshot_seq
        first = next(adapter.ready_passes(), None)
        is_between_operations = first is None or not first.next_chunk
        return is_ahead and is_between_operations and adapter.is_snapshot_safe and not adapter.is_replaying

    def _install(self, adapter: AdapterQueue, worker_id: str, work: Work) -> bool:
        """Make sure that the adapter has a copy on the worker.

        False if its state is damaged; its operations fail then.
        """
        if adapter.worker_id:
            return True
        try:
            install = self._builder.install(adapter)
        except ServiceError as error:
            self._give_up(adapter, error)
            return False
        adapter.placed(worker_id)
        adapter.settle()
        work.installs.setdefault(worker_id, []).append(install)
        return True

    async def _run_work(self, cycle: Running, work: Work) -> None:
        """Run one phase on all its workers at once, then take in the answers."""
        batches = work.batches(self._epoch, cycle.cycle_id, self._take_removals)
        lives = {worker.worker_id: worker.incarnation for worker in self.workers()}
        answers = await asyncio.gather(
            *(self._pool.run(worker_id, batch) for worker_id, batch in batches.items()), return_exceptions=True
        )
        for worker_id, answer in zip(batches, answers, strict=True):
            if isinstance(answer, BatchResult):
                if answer.epoch != self._epoch:
                    raise TakenOver(f"{worker_id} works for epoch {answer.epoch}, this is {self._epoch}")
                entries = work.items.get(worker_id, [])
                for (adapter, operation, item), result in zip(entries, answer.results, strict=True):
                    await self._take_in(cycle, adapter, operation, item, result)
            elif isinstance(answer, WorkerLost):
                logger.warning("worker %s lost in cycle %d: %s", worker_id, cycle.cycle_id, answer)
                self._worker_lost(worker_id, lives.get(worker_id, ""))
            else:
                raise answer

    async def _take_in(
        self, cycle: Running, adapter: AdapterQueue, operation: Operation | None, item: Item, result: ItemResult
    ) -> None:
        if operation is not None and operation.is_failed:
            return  # a later chunk of what has just failed
        if result.error is not None and result.error.code is ErrorCode.OUT_OF_ORDER:
            self._found_out_of_order(adapter, result)
            return
        if not adapter.worker_id:
            return  # found out of order earlier in this batch
        entry = cycle.entry(adapter)
        entry.num_tokens += result.num_tokens
        adapter.engine_s_since_snapshot += result.engine_s
        if operation is None:
            await self._saver.take_snapshot(cycle.commit, adapter, result)
            return
        self._num_reinstalls.pop(adapter.adapter_id, None)
        is_last = not isinstance(item, PassItem) or item.chunk_index == item.num_chunks - 1
        if operation.is_final:  # a replay
            operation.next_chunk = 0 if is_last else operation.next_chunk + 1
            if result.error is not None:
                self._give_up(adapter, _replay_differs(adapter, operation, result))
            elif is_last:
                operation.drop_body()
                adapter.ran(operation)
        else:
            operation.parts.append(result)
            operation.next_chunk += 1
            if operation.kind.needs_open_window and adapter.window_error is not None:
                operation.fail(window_closed(adapter.window_error), cycle_id=cycle.cycle_id)
            elif result.error is not None:
                operation.fail(item_error(result.error), cycle_id=cycle.cycle_id)
            elif is_last:
                await self._succeed(cycle, adapter, operation, result)
            else:
                operation.is_running = False
                return
            adapter.ran(operation)
            cycle.finished.append(operation)
            entry.num_operations += 1
            entry.is_step |= operation.kind is Kind.OPTIM_STEP and not operation.is_failed
        adapter.settle()

    async def _succeed(self, cycle: Running, adapter: AdapterQueue, operation: Operation, result: ItemResult) -> None:
        operation.is_running = False
        match operation.kind:
            case Kind.FORWARD | Kind.FORWARD_BACKWARD:
                fill_pass(operation, cycle.cycle_id)
            case Kind.OPTIM_STEP:
                fill_step(operation, result, cycle.cycle_id)
            case Kind.LOAD_STATE:
                fill_load(operation, cycle.cycle_id)
            case Kind.SAVE_STATE | Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                try:
                    await self._saver.save(cycle.commit, cycle.cycle_id, adapter, operation, result)
                except ServiceError as error:
                    operation.fail(service_error(error), cycle_id=cycle.cycle_id)
                if operation.kind is Kind.SAVE_WEIGHTS_FOR_SAMPLER:
                    self._published(adapter.worker_id, operation.name)
            case _:
                raise AssertionError(f"{operation.kind} is not an operation on an adapter")

    def _found_out_of_order(self, adapter: AdapterQueue, result: ItemResult) -> None:
        """The worker's fence held: its copy is not where we believe. Install it anew, unless that never helps."""
        if not adapter.worker_id:
            return
        logger.warning("%s: %s", adapter.adapter_id, result.error)
        adapter.lose_copy()
        self._num_reinstalls[adapter.adapter_id] = self._num_reinstalls.get(adapter.adapter_id, 0) + 1
        if self._num_reinstalls[adapter.adapter_id] > REINSTALLS_MAX:
            error = ServiceError(Code.INTERNAL, "STATE_LOST", "the adapter's state cannot be rebuilt on any worker")
            self._give_up(adapter, error)

    def _give_up(self, adapter: AdapterQueue, error: ServiceError) -> None:
        logger.error("%s: %s", adapter.adapter_id, error.message)
        adapter.give_up(service_error(error))

    # ---- commit

    async def _commit(self, cycle: Running) -> None:
        for adapter in list(self._ready.values()):
            adapter.settle()
            cycle.finished += adapter.decided
            adapter.decided.clear()
        tenants = frozenset(entry.tenant for entry in cycle.entries.values())
        commit = cycle.commit
        commit.finished = [finished_row(operation) for operation in cycle.finished]
        commit.virtual_tokens = {t: self.fair.shares[t].virtual_tokens for t in tenants if t in self.fair.shares}
        message = self._message(cycle)
        if cycle.entries:
            commit.cycle_id, commit.summary = cycle.cycle_id, serialize(message)
        committing_at = self._time.monotonic()
        lost: frozenset[str] = frozenset()
        if commit.cycle_id or commit.finished:
            lost = await self._store.commit_cycle(commit)
        for operation in cycle.finished:
            self._table.finished(operation)
            operation.retire()
        self._saver.committed(commit, self.adapters, lost)
        self.clock.finished(tenants)
        if cycle.entries:
            message.commit_seconds = self._time.monotonic() - committing_at
            self._publish(message)

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


def _ready_chunk_tokens(adapter: AdapterQueue, tokens_max: int) -> tuple[int, ...]:
    """Its ready chunks, in order, up to what fills a cycle: a long queue must not make planning long."""
    tokens: list[int] = []
    for operation in adapter.ready_passes():
        for chunk in operation.chunks[operation.next_chunk :]:
            tokens.append(chunk.num_tokens)
            tokens_max -= chunk.num_tokens
            if tokens_max <= 0:
                return tuple(tokens)
    return tuple(tokens)


def _replay_differs(adapter: AdapterQueue, operation: Operation, result: ItemResult) -> ServiceError:
    logger.error("replay of %s failed: %s", operation.name, result.error)
    return ServiceError(
        Code.DATA_LOSS,
        "REPLAY_DIFFERS",
        f"{adapter.adapter_id} could not be rebuilt: {operation.name} had succeeded, but failed when run again",
    )

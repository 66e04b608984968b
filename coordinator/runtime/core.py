"""The coordinator's parts, put together, and their life: start, supervise, sweep, stop. Knows no doors and no requests.

One life holds the data directory's lock and has an epoch of its own; workers refuse batches of older epochs.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Code
from coordinator.base.failure import Failure
from coordinator.base.time import SystemTime, Time, within
from coordinator.checkpoints.publishing import named, unnamed
from coordinator.checkpoints.saver import Saver
from coordinator.cycle.items import BatchBuilder
from coordinator.cycle.loop import CycleLoop
from coordinator.operations.adapter_log import AdapterQueue
from coordinator.operations.admission import Admission, storage_error
from coordinator.operations.finished_samples import Followers
from coordinator.operations.in_flight import OperationTable
from coordinator.operations.outcomes import decided_row
from coordinator.operations.sessions import SessionTable
from coordinator.runtime import recovery
from coordinator.sampling.scheduler import Sampling
from coordinator.scheduling.quarantine import Suspects
from coordinator.storage.database import Connection, StorageError
from coordinator.storage.disk import Disk, RealDisk
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import pool_pb2
from workers.contract.messages import AdapterSpec, ModelInfo
from workers.contract.protocols import Pool, WorkerLost

T = TypeVar("T")
logger = logging.getLogger(__name__)

PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 5.0
BACKOFF_S, BACKOFF_S_MAX = 0.25, 30.0
"""How long the second life that ends at once is let lie, and the most."""
CYCLES_SHOWN_MAX = 1000


class DataDirInUse(Exception):
    """Another coordinator holds the data directory."""


class Core:
    """Everything that outlives a request."""

    def __init__(
        self,
        config: CoordinatorConfig,
        pool: Pool,
        time: Time | None = None,
        *,
        disk: Disk | None = None,
        connect: Callable[[Path], Connection] | None = None,
    ) -> None:
        """`disk` holds the state folders, `connect` opens the database; by default they are the machine's."""
        self.config = config
        self.pool = pool
        self.time = time or SystemTime()
        self._disk = disk or RealDisk()
        self._connect = connect
        self.epoch = 0
        self.models: dict[str, ModelInfo] = {}
        self.loops: dict[str, CycleLoop] = {}
        self.adapters: dict[str, AdapterQueue] = {}
        self.cycles: deque[pool_pb2.Cycle] = deque(maxlen=CYCLES_SHOWN_MAX)
        self.cycle_watchers: set[asyncio.Queue[pool_pb2.Cycle | None]] = set()
        self.failure = Failure()
        self.started_at = 0.0
        self._last_cycle_id = 0
        self._lock: IO[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._use_cases: set[asyncio.Task[Any]] = set()
        self._replacing: set[str] = set()
        self._num_deaths: Counter[str] = Counter()
        """By worker, since it last answered a batch."""
        self._suspects: dict[str, Suspects] = {}
        self._is_stopping = False

    async def start(self) -> None:
        """Take the data directory, recover, start the pool, begin cycles. Raises DataDirInUse."""
        self.config.data_dir.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self.store = Store(self.config.data_dir / "tinkerpool.db", self.time, self.failure, connect=self._connect)
        self.epoch = await self.store.raise_epoch()
        self._last_cycle_id = self.store.cycles.last_id()
        self.followers = Followers(self.epoch)
        self.table = OperationTable(self.followers.note)
        self.sessions = SessionTable(self.store, self.time.monotonic)
        self.sessions.load()
        self.admission = Admission(self.store, self.table, self.config.limits)
        self.saver = Saver(
            self.config.data_dir,
            self._disk,
            self.store,
            self.models.__getitem__,
            self.time.wall,
            self.sessions.take_sampler_index,
            on_settled=self._settled,
            on_derived=self._derived,
            fatal=self.failure.report,
        )
        self.saver.remove_orphans()
        self.sampling = Sampling(
            config=self.config,
            pool=self.pool,
            store=self.store,
            table=self.table,
            saver=self.saver,
            shares=recovery.load_fair_state(self.store).shares,
            spec_of=self.spec_of,
            live_workers=self._live_workers,
            suspects_of=self._suspects.__getitem__,
            worker_lost=self._worker_lost,
            fatal=self.failure.report,
        )
        await self.pool.start()
        for worker in self.pool.workers():
            self.models.setdefault(worker.model.name, worker.model)
        self._note_memory()
        self._make_loops()
        self._recover()
        for worker in self.pool.workers():
            self.sampling.worker_started(worker.worker_id, worker.incarnation)
            self._spawn(self._ping(worker.worker_id))
        for loop in self.loops.values():
            self._spawn(loop.run())
        self._spawn(self._sweep())
        self.started_at = self.time.monotonic()

    async def stop(self) -> None:
        """Admit nothing more, finish the running cycles, snapshot, end the pool. Idempotent."""
        if self._is_stopping or self._lock is None:
            return
        self._is_stopping = True
        if hasattr(self, "sampling"):
            self.admission.is_stopping = True
            self.store.give_up()
            self.table.close()
            self.followers.close()
            for watcher in self.cycle_watchers:
                watcher.put_nowait(None)
            self.saver.publishing.give_up()
            await self.sampling.stop()
            for loop in self.loops.values():
                await self._finish_loop(loop)
            await self.saver.publishing.finish()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._use_cases, return_exceptions=True)
        await self.pool.stop()
        if hasattr(self, "store"):
            await self.store.close()
        self._lock.close()

    async def _finish_loop(self, loop: CycleLoop) -> None:
        await loop.stop()
        if self.failure.is_reported:
            return
        try:
            await loop.snapshot_all()
        except (StorageError, WorkerLost) as error:
            logger.warning("not everything has a snapshot, the next start will replay: %s", error)

    async def uninterrupted(self, use_case: Coroutine[Any, Any, T]) -> T:
        """Run a use case to its end even if its caller goes away: half of one would leave memory and log apart.

        Raises ServiceError if the log does not take it.
        """
        task = asyncio.get_running_loop().create_task(use_case)
        self._use_cases.add(task)
        task.add_done_callback(self._use_case_done)
        try:
            return await asyncio.shield(task)
        except StorageError as error:
            raise storage_error(error) from None

    def is_healthy(self) -> bool:
        """Whether cycles can make progress: nothing has failed and every base model has a live worker."""
        return (
            not self._is_stopping
            and not self.failure.is_reported
            and bool(self.loops)
            and all(loop.workers() and not loop.is_stuck for loop in self.loops.values())
        )

    def add_adapter(self, adapter: AdapterQueue) -> None:
        """A new adapter."""
        assert adapter.adapter_id not in self.adapters
        self.adapters[adapter.adapter_id] = adapter
        if loop := self.loops.get(adapter.base_model):
            loop.add(adapter)

    async def delete_adapter(self, adapter: AdapterQueue, error: ops_pb.OperationError) -> None:
        """Delete an adapter's training state; its unfinished operations fail with `error`.

        What it has published without a file is written first, for its log goes. Raises StorageError, and ServiceError
        if that can be made only later.
        """
        self.saver.publishing.check_derived(adapter.adapter_id)
        adapter.is_deleted = True
        self.adapters.pop(adapter.adapter_id, None)
        loop = self.loops.get(adapter.base_model)
        if loop is not None:
            await loop.remove(adapter)
        unfinished = adapter.decided + [o for o in adapter.operations.values() if not o.is_final]
        for operation in unfinished:
            if not operation.is_final:
                operation.fail(error)
        try:
            await self.saver.publishing.until_written(adapter.adapter_id)
            finished = [decided_row(operation) for operation in unfinished]
            folder = await self.store.adapters.delete(adapter.adapter_id, finished, self.time.wall())
        except StorageError:
            adapter.decided = unfinished
            self._put_back(adapter)
            raise
        if adapter.worker_id:
            self.sampling.forget(adapter.worker_id, adapter.adapter_id)
        for operation in unfinished:
            self.table.finished(operation)
            operation.retire()
        if folder is not None:
            self.saver.snapshots.remove(folder)

    def _put_back(self, adapter: AdapterQueue) -> None:
        """Its deletion has failed. What a cycle or a snapshot did meanwhile, the queue was not told."""
        if (row := self.store.snapshots.get(adapter.adapter_id)) is not None:
            adapter.covered(row.seq, row.window_error, math.inf)
        adapter.lose_copy()  # its worker may have been lost, too
        adapter.is_deleted = False
        self.add_adapter(adapter)
        self.touch(adapter)

    def touch(self, adapter: AdapterQueue) -> None:
        """The adapter has something new."""
        if loop := self.loops.get(adapter.base_model):
            loop.touch(adapter)

    def spec_of(self, adapter_id: str) -> AdapterSpec:
        """What makes an adapter, also a deleted one."""
        if (adapter := self.adapters.get(adapter_id)) is not None:
            return adapter.spec
        row = self.store.adapters.get(adapter_id)
        assert row is not None
        return recovery.spec_of_row(row)

    async def end_session(self, session_id: str) -> None:
        """End a session: its samplers and queued samples end. Its adapters stay, to be trained on or read later.

        Raises StorageError, and then it goes on.
        """
        with self.sessions.ending(session_id):
            await self.store.sessions.end(session_id, self.time.wall())
        for sampler_id in self.store.samplers.ids_of_session(session_id):
            self.sampling.end_sampler(sampler_id)
        await self.saver.remove_samplers(session_id)

    # ---- start

    def _take_lock(self) -> None:
        path = self.config.data_dir / "lock"
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise DataDirInUse(
                f"{self.config.data_dir} is in use by another tinkerpool (process {owner}): stop that one, or choose "
                "another data directory"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _make_loops(self) -> None:
        fair = recovery.load_fair_state(self.store)
        for base_model, model in self.models.items():
            self._suspects[base_model] = Suspects(functools.partial(self._turn, base_model))
            self.loops[base_model] = CycleLoop(
                base_model=base_model,
                chunk_tokens=model.chunk_tokens,
                config=self.config,
                time=self.time,
                epoch=self.epoch,
                store=self.store,
                pool=self.pool,
                builder=BatchBuilder(self.store, self.saver.checkpoints, self.saver.snapshots),
                saver=self.saver,
                table=self.table,
                suspects=self._suspects[base_model],
                fair=fair,
                new_cycle_id=self._new_cycle_id,
                publish=self._publish_cycle,
                take_removals=self.sampling.take_removals,
                decode_share=self.sampling.decode_share,
                published=self.sampling.published,
                withdrawn=self.sampling.forget,
                worker_lost=self._worker_lost,
                worker_answered=self._worker_answered,
            )

    def _recover(self) -> None:
        for cycle_id, adapter_ids in self.store.cycles.plans().items():
            logger.warning("the last life ended in cycle %d, which ran %s", cycle_id, ", ".join(adapter_ids))
        versions = [unnamed(row, self.spec_of(row.adapter_id)) for row in self.store.samplers.unwritten()]
        versions += [named(row, self.spec_of(row.adapter_id)) for row in self.store.checkpoints.unwritten()]
        underived: set[str] = set()
        for adapter in recovery.load_adapters(self.store, {version.name for version in versions}):
            self.add_adapter(adapter)
            underived.update(operation.name for operation in adapter.operations.values() if operation.is_underived)
            for operation in adapter.operations.values():
                if not operation.is_final:
                    self.table.add(operation)
            self.touch(adapter)
        for version in versions:
            self.saver.publishing.expect(version, is_in_log=version.name in underived)
        for operation in recovery.load_samples(self.store):
            self.table.add(operation)
            sampler = self.store.samplers.get(operation.target_id)
            assert sampler is not None
            self.sampling.submit(operation, sampler)

    def _new_cycle_id(self) -> int:
        self._last_cycle_id += 1
        return self._last_cycle_id

    # ---- life

    def _publish_cycle(self, cycle: pool_pb2.Cycle) -> None:
        self.cycles.append(cycle)
        for watcher in self.cycle_watchers:
            if watcher.qsize() < CYCLES_SHOWN_MAX:
                watcher.put_nowait(cycle)

    def _live_workers(self, base_model: str) -> list[str]:
        loop = self.loops.get(base_model)
        return [worker.worker_id for worker in loop.workers()] if loop else []

    def _worker_lost(self, worker_id: str, incarnation: str) -> None:
        """Give up one life of a worker and start its next. Whoever notices first is heard."""
        if worker_id in self._replacing or incarnation != self._incarnation(worker_id):
            return
        self._replacing.add(worker_id)
        for loop in self.loops.values():
            if any(worker.worker_id == worker_id for worker in loop.workers()):
                self._lose(loop, worker_id)
        if not self._is_stopping:
            self._spawn(self._replace(worker_id))

    def _lose(self, loop: CycleLoop, worker_id: str) -> None:
        """Let everybody know that a worker is gone, and suspect who was on it."""
        operations = [o for o in loop.running_on(worker_id) if o.target_id in loop.adapters]
        samples = self.sampling.running_on(worker_id)
        names = {operation.target_id for operation in operations}.union(samples)
        by_name = {operation.name: operation for operation in operations}
        convicted = loop.suspects.died(names, [*by_name, *samples]) if names else None
        if convicted is not None and convicted not in by_name:
            self.sampling.convict(convicted)  # before what the worker had begins again elsewhere
        loop.lose_worker(worker_id)
        self.sampling.worker_ended(worker_id)
        if convicted in by_name:
            loop.convict(by_name[convicted])

    def _worker_answered(self, worker_id: str) -> None:
        self._num_deaths.pop(worker_id, None)

    def _settled(self, base_model: str) -> None:
        """Weights of one of its adapters need the log no more."""
        if loop := self.loops.get(base_model):
            loop.clock.notify()

    def _derived(self, version: str) -> None:
        """The log has been run again for these weights."""
        self.sampling.derived(version)

    def _turn(self, base_model: str) -> None:
        """Others may run than before."""
        self.loops[base_model].clock.notify()
        self.sampling.dispatch(base_model)

    def _incarnation(self, worker_id: str) -> str:
        return next((w.incarnation for w in self.pool.workers() if w.worker_id == worker_id), "")

    async def _replace(self, worker_id: str) -> None:
        worker = None
        while worker is None:
            self._num_deaths[worker_id] += 1
            await self.time.sleep(_backoff_s(self._num_deaths[worker_id]))
            try:
                worker = await self.pool.replace(worker_id)
            except WorkerLost as error:
                logger.error("worker %s does not start again: %s; trying on", worker_id, error)
                for loop in self.loops.values():
                    if worker_id in loop.dead_workers:  # who runs beside a suspect is at risk; who waits, for ever
                        loop.suspects.wait(is_waiting=False)
        logger.warning("worker %s replaced by %s", worker_id, worker.incarnation)
        self._replacing.discard(worker_id)
        self._note_memory()
        self.loops[worker.model.name].worker_is_back(worker_id)
        self.sampling.worker_started(worker_id, worker.incarnation)

    def _note_memory(self) -> None:
        """What a base model's workers have memory for: an adapter may come to live on the one with the least, a sample
        can go to the one with the most.
        """
        for name, model in self.models.items():
            found = [worker.model for worker in self.pool.workers() if worker.model.name == name]
            fitting = [each.fitting_tokens for each in found if each.fitting_tokens is not None]
            blocks = [each.num_cache_blocks for each in found if each.num_cache_blocks is not None]
            self.models[name] = replace(
                model,
                fitting_tokens=min(fitting, default=None),
                num_cache_blocks=max(blocks, default=None) if len(blocks) == len(found) else None,
            )

    async def _ping(self, worker_id: str) -> None:
        while True:
            await self.time.sleep(PING_INTERVAL_S)
            if worker_id in self._replacing:
                continue
            incarnation = self._incarnation(worker_id)
            try:
                await within(PING_TIMEOUT_S, self.pool.ping(worker_id))
            except (WorkerLost, TimeoutError) as error:
                logger.warning("worker %s does not answer: %s", worker_id, str(error) or "time-out")
                self._worker_lost(worker_id, incarnation)

    async def _sweep(self) -> None:
        """Expire sessions, fail what waits behind a lost seq, drop old results and checkpoints."""
        while True:
            await self.time.sleep(self.config.sweep_interval_s)
            for adapter in self.adapters.values():
                self._fail_behind_gap(adapter)
            try:
                for session in self.sessions.expired(self.config.session_timeout_s):
                    logger.info("session %s expired", session.session_id)
                    await self.end_session(session.session_id)
                await self.saver.remove_expired()
                now = self.store.service_time()
                await self.store.operations.drop_results(
                    fetched_before=now - self.config.fetched_retention_s,
                    finished_before=now - self.config.result_retention_s,
                )
            except StorageError as error:
                logger.warning("the database takes no writes: %s; trying on", error)

    def _fail_behind_gap(self, adapter: AdapterQueue) -> None:
        missing, now = adapter.missing_seq(), self.time.monotonic()
        if missing is None:
            adapter.gap_since = None
            return
        if adapter.gap_since is None:
            adapter.gap_since = now
        elif now - adapter.gap_since > self.config.gap_timeout_s:
            error = ops_pb.OperationError(
                code=Code.ABORTED,
                reason="SEQ_LOST",
                message=f"operation {missing} of {adapter.adapter_id} never came: send it, then these again",
            )
            for operation in adapter.operations.values():
                if operation.seq > missing and not operation.is_final:
                    operation.fail(error)
                    adapter.decided.append(operation)
            adapter.gap_since = None
            self.touch(adapter)

    def _use_case_done(self, task: asyncio.Task[Any]) -> None:
        self._use_cases.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may have gone away: then nobody else looks at it

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure.report(error)


def _backoff_s(num_deaths: int) -> float:
    """How long to wait before the next life: the first time not at all."""
    return min(BACKOFF_S_MAX, BACKOFF_S * 2 ** (num_deaths - 2)) if num_deaths > 1 else 0.0

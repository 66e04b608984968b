"""The coordinator's parts, put together, and their start and stop. Depends on no door and no request.

One process holds the data directory's lock and has an epoch of its own; workers refuse batches of older epochs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from coordinator.base.config import CoordinatorConfig
from coordinator.base.failure import Failure
from coordinator.base.time import SystemTime, Time
from coordinator.checkpoints.folders import StateFolders
from coordinator.checkpoints.saver import Saver
from coordinator.cycle.journal import CycleJournal
from coordinator.cycle.loop import CycleLoop
from coordinator.fleet.fleet import Fleet
from coordinator.operations.admission import Admission
from coordinator.operations.finished_samples import FinishedSamples
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.registry import AdapterRegistry
from coordinator.operations.sessions import SessionTable
from coordinator.runtime.assembly import SharedParts, assemble_loop, assemble_samples
from coordinator.runtime.deletion import Deletions
from coordinator.runtime.housekeeping import Housekeeping
from coordinator.runtime.lock import DataDirLock
from coordinator.runtime.recovery import Recovery, load_fair_state
from coordinator.runtime.supervision import Supervisor
from coordinator.runtime.tasks import Tasks
from coordinator.scheduling.losses import LossRecorder
from coordinator.scheduling.quarantine import Quarantine
from coordinator.storage.database import Connection, StorageError
from coordinator.storage.disk import Disk, RealDisk
from coordinator.storage.store import Store
from workers.contract.protocols import Pool, WorkerLost

T = TypeVar("T")
logger = logging.getLogger(__name__)


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
        self.failure = Failure()
        """Reports an error after which going on is unsafe; the process that runs the coordinator awaits it."""
        self.fleet = Fleet()
        self.epoch = 0
        self.started_at = 0.0
        self._disk = disk or RealDisk()
        self._connect = connect
        self._tasks = Tasks(self.failure)
        self._lock: DataDirLock | None = None
        self.loops: dict[str, CycleLoop] = {}
        self._is_started = self._is_stopping = False

    async def start(self) -> None:
        """Take the data directory, recover, start the pool, begin cycles. Raises DataDirInUse."""
        self.config.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = DataDirLock(self.config.data_dir)
        self._open_log()
        self.epoch = await self.store.raise_epoch()
        self._make_registers()
        await self.pool.start()
        self.fleet.start(self.pool.workers())
        self._assemble()
        self._is_started = True
        Recovery(self.store, self.registry, self.in_flight, self.saver, self.samples).run()
        self.samples.start()
        self._supervisor.start()
        for loop in self.loops.values():
            self._tasks.spawn(loop.run())
        self._tasks.spawn(self.housekeeping.run())
        self.started_at = self.time.monotonic()

    async def stop(self) -> None:
        """Admit nothing more, finish the running cycles, snapshot, end the pool. Idempotent."""
        if self._is_stopping or self._lock is None:
            return
        self._is_stopping = True
        if self._is_started:
            self.admission.close()
            self.store.give_up()
            self.in_flight.close()
            self.finished_samples.close()
            self.journal.close()
            self.saver.publishing.give_up()
            self._supervisor.stop()
            await self.samples.stop()
            for loop in self.loops.values():
                await self._finish_loop(loop)
            await self.saver.publishing.finish()
        await self._tasks.stop()
        await self.pool.stop()
        if hasattr(self, "store"):
            await self.store.close()
        self._lock.release()

    async def uninterrupted(self, use_case: Coroutine[Any, Any, T]) -> T:
        """Run a use case to its end even if its caller goes away. Raises ServiceError if the log does not take it."""
        return await self._tasks.uninterrupted(use_case)

    def is_healthy(self) -> bool:
        """Whether cycles can make progress: nothing has failed, and every base model has a live worker."""
        is_running = self._is_started and not self._is_stopping and not self.failure.is_reported
        return is_running and bool(self.loops) and all(loop.is_healthy for loop in self.loops.values())

    # ---- assembly

    def _open_log(self) -> None:
        path = self.config.data_dir / "tinkerpool.db"
        self.store = Store(path, self.time, self.failure, connect=self._connect)

    def _make_registers(self) -> None:
        """Make the parts that hold state by tenant, session, adapter and operation."""
        config, store, time = self.config, self.store, self.time
        self.finished_samples = FinishedSamples(self.epoch)
        self.in_flight = InFlightTable(self.finished_samples)
        self.registry = AdapterRegistry(time, store.adapters)
        self.sessions = SessionTable(store, time)
        self.sessions.load()
        self.admission = Admission(store, self.in_flight, self.registry, config.limits)
        self.journal = CycleJournal(store.cycles)
        folders = StateFolders(config.data_dir, self._disk)
        self.saver = Saver(folders, store, self.fleet, self.sessions, time, self.failure)
        self.saver.remove_orphans()

    def _assemble(self) -> None:
        """Make the parts that run operations, for each base model that the pool serves."""
        self.quarantines = quarantines = {base_model: Quarantine() for base_model in self.fleet.models}
        self.losses = LossRecorder(self.fleet, self.registry, quarantines, self.saver.publishing)
        shared = SharedParts(
            config=self.config,
            pool=self.pool,
            time=self.time,
            epoch=self.epoch,
            store=self.store,
            fleet=self.fleet,
            registry=self.registry,
            in_flight=self.in_flight,
            saver=self.saver,
            journal=self.journal,
            losses=self.losses,
            quarantines=quarantines,
            fair=load_fair_state(self.store),
            failure=self.failure,
        )
        self.loops = {base_model: assemble_loop(base_model, shared) for base_model in self.fleet.models}
        self.samples = assemble_samples(shared)
        self._supervisor = Supervisor(
            self.pool, self.time, self.fleet, self.losses, quarantines, self.registry, self.samples, self._tasks
        )
        self.deletions = Deletions(
            self.store, self.registry, self.in_flight, self.saver, self.fleet, self.loops, quarantines, self.time
        )
        self.housekeeping = Housekeeping(
            self.config,
            self.time,
            self.store,
            self.registry,
            self.sessions,
            self.saver,
            self.admission,
            self.samples,
        )

    async def _finish_loop(self, loop: CycleLoop) -> None:
        await loop.stop(self.config.stop_s_max)
        if self.failure.is_reported:
            return
        try:
            await loop.snapshot_all()
        except (StorageError, WorkerLost) as error:
            logger.warning("not everything has a snapshot, the next start will replay: %s", error)

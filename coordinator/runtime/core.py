"""Starts and stops the parts of a coordinator in order, and tells whether they are healthy.

Does not depend on doors or requests. Main invariant: at most one process holds the data directory, and each that does
has an epoch of its own; workers refuse batches of older epochs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Failure
from coordinator.base.time import SystemTime, Time
from coordinator.checkpoints.saver import Saver
from coordinator.checkpoints.states import States
from coordinator.fleet.fleet import Fleet
from coordinator.limits.results import Responses
from coordinator.limits.turns import Turns
from coordinator.operations.epoch import Context, Registers, open_registers
from coordinator.runtime.assembly import Runners, make_runners
from coordinator.runtime.base_weights import BaseWeights
from coordinator.runtime.data_dir import DataDir, Seams
from coordinator.runtime.drains import keep_drained
from coordinator.runtime.recovery import Recovery, load_fair_state
from coordinator.runtime.tasks import Tasks
from coordinator.scheduling.probation import Probation
from coordinator.scheduling.schedule import make_scheduling
from coordinator.tenants.accounts import Accounts
from tinkerpool.serving import STAGES
from workers.contract.logs import about
from workers.contract.protocols import Owner, Pool, PoolStartError

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces

logger = logging.getLogger(__name__)

DECODE_TURNS = 1
"""Large requests and results that are decoded or encoded at a time. That holds the interpreter, so more threads gain
nothing; and what is made of one is in memory before its bytes are freed."""
LISTING_TURNS = 1
"""Slices of lists that are made at a time: on the event loop, so more would only be mixed."""
FILE_TURNS = 2
"""Use cases that read or write state files at a time. The cycles' saves and snapshots use the same few threads."""


class Core:
    """The parts of one coordinator, which use cases share."""

    def __init__(
        self, config: CoordinatorConfig, pool: Pool, time: Time | None = None, seams: Seams | None = None
    ) -> None:
        """`time` and `seams` are the machine's by default."""
        self.config = config
        self.pool = pool
        self.time = time or SystemTime()
        self.failure = Failure()
        """Reports an error after which going on is unsafe; the process that runs the coordinator awaits it."""
        self.fleet = Fleet()
        self.epoch = 0
        self.started_at = 0.0
        self._seams = seams or Seams()
        self.tasks = Tasks(self.failure)
        self.file_turns = Turns(FILE_TURNS)
        self.decode_turns = Turns(DECODE_TURNS)
        self.listing_turns = Turns(LISTING_TURNS)
        self.responses = Responses()
        self.traces: Traces | None = None
        """None: the pool sends none."""
        self._data_dir: DataDir | None = None
        self._runners: Runners | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Take the data directory, recover, start the pool, begin cycles.

        Raises DataDirError, PoolStartError, and ImportError if it is to send traces and OpenTelemetry is not installed.
        """
        STAGES.info("opening the data")
        self._data_dir = DataDir(self.config, self.time, self.failure, self._seams)
        self.store = self._data_dir.store
        self.epoch = await self._data_dir.begin_epoch()
        if self.config.otlp_endpoint is not None:
            from coordinator.observe.traces import Traces

            self.traces = Traces(self.config.otlp_endpoint, self.time)
        context = Context(
            config=self.config, time=self.time, failure=self.failure, epoch=self.epoch, traces=self.traces
        )
        self.accounts = Accounts(self.store, self.time.wall)
        registers = open_registers(context, self.store, self.fleet)
        self.states = States(
            self._data_dir.folders, self.store, self.fleet, self.failure, registers.holdings, registers.in_flight
        )
        self.states.set_orphans_aside()
        saver = Saver(self.states, self.store, registers.sessions, self.time)
        owner = Owner(pool_id=self.store.identity().name, epoch=self.epoch)
        drained = await keep_drained(self.store.drained_workers, self.pool.base_models())
        self.fleet.expect(each for each in self.pool.base_models() if each not in drained)
        await self.pool.start(owner, drained)
        base_weights = BaseWeights(self.store.base_models)
        self._take_in(base_weights)
        self.probation = Probation(self.store.probations, self.config.probation_s)
        self.scheduling = make_scheduling(
            context,
            self.fleet,
            registers.registry,
            self.states,
            load_fair_state(self.store, registers.quotas.weights()),
            self.probation,
            self.accounts,
            self.store.worker_classes,
        )
        self._runners = make_runners(
            context, self.pool, self.store, self.fleet, registers, saver, self.scheduling, self.tasks, base_weights
        )
        self._publish(registers, self._runners)
        STAGES.info("recovering what was acknowledged")
        Recovery(self.store, self.registry, self.in_flight, self.states, self.samples).run()
        self._runners.start(self.tasks, self.time)
        self.tasks.spawn(self._data_dir.keep_noting(self.time))
        self.started_at = self.time.monotonic()

    async def stop(self, *, is_final: bool = False) -> None:
        """Refuse new operations, finish the running cycles, snapshot, stop the pool. Idempotent.

        `is_final`: no other coordinator is to follow soon, see `Pool.stop`.
        """
        if self._is_stopping or self._data_dir is None:
            return
        self._is_stopping = True
        if self._runners is not None:
            await self._finish(self._runners)
        await self.tasks.stop()
        await self.pool.stop(is_final=is_final)
        await self._data_dir.close()
        if self.traces is not None:
            await self.traces.close()

    def weigh(self, tenant_id: str) -> None:
        """Schedule a tenant by its present weight from now on: cycles and samples of every base model."""
        weight = self.quotas.of(tenant_id).weight
        for loop in self.loops.values():
            loop.planning.weigh(tenant_id, weight)
        self.samples.weigh(tenant_id, weight)

    def is_healthy(self) -> bool:
        """Return whether new work is taken and makes progress.

        Nothing has failed, the disk has room, and every base model has a live worker.
        """
        if self._runners is None or self._is_stopping or self.failure.is_reported or self.store.database.problem():
            return False
        return bool(self.loops) and all(loop.is_healthy for loop in self.loops.values())

    def _take_in(self, base_weights: BaseWeights) -> None:
        """Add the workers that have started. Raises PoolStartError if no worker of a base model may take work."""
        problems: dict[str, str] = {}
        for worker in self.pool.workers():
            if not (problem := base_weights.problem(worker)):
                self.fleet.add(worker)
                continue
            problems[worker.model.name] = problem
            ids = about(worker=worker.worker_id, incarnation=worker.incarnation)
            logger.error("worker %s takes no work: %s", worker.incarnation, problem, extra=ids)
            self.fleet.note_start_problem(worker.worker_id, problem)
        for name, problem in problems.items():
            if name not in self.fleet.models:
                raise PoolStartError(problem)

    def _publish(self, registers: Registers, runners: Runners) -> None:
        """Set the attributes that use cases read."""
        self.registry, self.sessions = registers.registry, registers.sessions
        self.in_flight, self.finished_samples = registers.in_flight, registers.finished_samples
        self.admission, self.quotas = registers.admission, registers.quotas
        self.entries, self.throughput = registers.entries, registers.throughput
        self.holdings, self.ceilings, self.rates = registers.holdings, registers.ceilings, registers.rates
        self.quotas.listed.update(
            result_bytes=self.responses.budget,
            file_turns=self.file_turns,
            decode_turns=self.decode_turns,
            listing_turns=self.listing_turns,
        )
        self.journal, self.loops, self.samples = runners.cycles.journal, runners.cycles.by_model, runners.samples
        self.deletions, self.housekeeping = runners.deletions, runners.housekeeping
        self.supervisor = runners.supervisor

    async def _finish(self, runners: Runners) -> None:
        """Refuse new operations, end waits and streams, finish the running cycles, write unwritten states."""
        self.admission.close()
        self.store.cycles.stop_retrying()
        self.in_flight.close()
        self.finished_samples.close()
        runners.cycles.journal.watchers.close()
        self.states.publishing.stop_retrying()
        runners.supervisor.stop()
        await runners.samples.stop()
        for loop in runners.cycles.by_model.values():
            await loop.stop(0.0 if self.failure.is_reported else self.config.stop_s_max)  # no cycle commits after it
            if not self.failure.is_reported:
                await loop.snapshot_all()
        await self.states.publishing.finish()
        await self.states.until_removed()

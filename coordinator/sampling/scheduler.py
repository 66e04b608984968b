"""Sample requests: on which worker they run, with which weights; and their tokens and results on the way back.

Samples have no order among themselves, so they pass by the cycles: a request goes to a worker as soon as that has room,
the tenant first that has had the least (`sample_turns`). The one whose turn it is waits until it has room, and the
others wait behind it, or a large one would wait for ever. Tokens stream to listeners and are kept nowhere; a finished
request commits by group commit. A lost worker's requests start again from their logged seeds and give the same tokens.

Knows the pool's sampling side and the store; not what a token means.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field

from coordinator.base.config import CoordinatorConfig
from coordinator.base.errors import Code, ServiceError
from coordinator.checkpoints.publishing import version_of
from coordinator.checkpoints.saver import Saver
from coordinator.operations.in_flight import OperationTable
from coordinator.operations.operation import Operation
from coordinator.operations.outcomes import decided_row, item_error, service_error, worker_died
from coordinator.operations.sample_payloads import decode_sample, fill_sample
from coordinator.scheduling.fair_queue import SampleTurns
from coordinator.scheduling.planner import Share
from coordinator.scheduling.quarantine import Suspects
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.store import Store
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2
from workers.contract.messages import (
    AdapterSpec,
    ErrorCode,
    ItemError,
    SampleResult,
    SamplerVersion,
    TokenEvent,
)
from workers.contract.protocols import Pool, WorkerLost

logger = logging.getLogger(__name__)

VERSIONS_MAX = 64
"""Sampler versions that one worker is asked to remember; the least recently used leave."""

PLACES_FRACTION = 4
"""One request takes at most the fourth part of a worker's places: its sequences take turns there with everybody's."""
REFUSALS_MAX = 3
"""How often a request is started anew because a worker did not know its version."""
DECODE_SHARE, DECODE_SHARE_MIN, DECODE_SHARE_MAX = 0.5, 0.1, 0.9
"""The part of a worker's time for its samples where nobody's weight says another one, the least and the most."""
Event = sampling_pb2.SampledToken | ops_pb.Operation
"""What a listener gets; None when the coordinator stops."""


@dataclass(slots=True, eq=False)
class _Request:
    operation: Operation
    sampler: SamplerRow
    num_places: int
    """How many of a worker's places it takes: one per sequence, but never so many that others find none."""
    num_tokens_max: int
    num_cache_blocks_min: int
    worker_id: str = ""
    is_cancelled: bool = False
    num_refused: int = 0
    """How often a worker did not know the version."""
    num_drawn: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens drawn on its present worker."""
    num_streamed: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens that listeners have had: what is drawn again elsewhere is not sent again."""

    @property
    def base_model(self) -> str:
        return str(self.sampler.base_model)


@dataclass(slots=True, eq=False)
class _Worker:
    """What one life of a worker is doing and which versions it knows."""

    incarnation: str
    num_places_taken: int = 0
    versions: OrderedDict[str, None] = field(default_factory=OrderedDict)
    removals: list[str] = field(default_factory=list)
    running: dict[str, _Request] = field(default_factory=dict)


class Sampling:
    """All sample requests of a coordinator."""

    def __init__(
        self,
        *,
        config: CoordinatorConfig,
        pool: Pool,
        store: Store,
        table: OperationTable,
        saver: Saver,
        shares: Mapping[str, Share],
        spec_of: Callable[[str], AdapterSpec],
        live_workers: Callable[[str], list[str]],
        suspects_of: Callable[[str], Suspects],
        worker_lost: Callable[[str, str], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._pool = pool
        self._store = store
        self._table = table
        self._saver = saver
        self._shares = shares
        self._spec_of = spec_of
        self._live_workers = live_workers
        self._suspects_of = suspects_of
        self._worker_lost = worker_lost
        self._fatal = fatal
        self._turns: defaultdict[str, SampleTurns] = defaultdict(lambda: SampleTurns(shares))
        """By base model."""
        self._awaiting: dict[str, list[_Request]] = {}
        """Requests for versions that only the log can make again, by version."""
        self._requests: dict[str, _Request] = {}
        self._workers: dict[str, _Worker] = {}
        self._listeners: dict[str, list[asyncio.Queue[Event | None]]] = {}
        self._last_seq: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_stopping = False

    @property
    def num_requests(self) -> int:
        """Requests that are not finished."""
        return len(self._requests)

    def submit(self, operation: Operation, sampler: SamplerRow) -> None:
        """Queue a durable sample operation."""
        asked = decode_sample(operation.body)
        num_places = min(asked.num_samples, max(1, self._config.samples_per_worker_max // PLACES_FRACTION))
        request = _Request(
            operation, self._current(sampler), num_places, asked.num_tokens_max, asked.num_cache_blocks_min
        )
        self._last_seq[operation.target_id] = max(operation.seq, self._last_seq.get(operation.target_id, 0))
        self._requests[operation.name] = request
        if self._saver.publishing.is_awaited(request.sampler.version):
            self._awaiting.setdefault(request.sampler.version, []).append(request)
            return
        self._enqueue(request)
        self.dispatch(request.base_model)

    def derived(self, version: str) -> None:
        """The log has been run again for these weights, which no file had, or never will be: who waits may begin."""
        for request in self._awaiting.pop(version, ()):
            if not request.operation.is_final:
                self._enqueue(request)
                self.dispatch(request.base_model)

    def _current(self, sampler: SamplerRow) -> SamplerRow:
        """The sampler whose weights it samples from now: itself, or the newest that follows the same adapter."""
        if not sampler.is_inflight:
            return sampler
        newest = self._store.samplers.newest_inflight(sampler.adapter_id)
        assert newest is not None
        return newest

    def next_seq(self, sampler_id: str) -> int:
        """A number that no request to this sampler has had."""
        if sampler_id not in self._last_seq:
            self._last_seq[sampler_id] = self._store.operations.last_seq(sampler_id)
        self._last_seq[sampler_id] += 1
        return self._last_seq[sampler_id]

    def cancel(self, name: str) -> None:
        """End a request at the next decode step, or at once if it waits."""
        request = self._requests.get(name)
        if request is None or request.is_cancelled or request.operation.is_final:
            return  # what is decided and waits for its commit may have outlived its worker
        request.is_cancelled = True
        if request.worker_id:
            self._spawn(self._cancel_on(request.worker_id, self._workers[request.worker_id], name))
        else:
            self._finish(request, SampleResult(op_id=name, error=CANCELLED))

    def end_sampler(self, sampler_id: str) -> None:
        """Its session has ended, and nothing more is asked of it: cancel what it has queued."""
        self._last_seq.pop(sampler_id, None)
        for request in [r for r in self._requests.values() if r.operation.target_id == sampler_id]:
            self.cancel(request.operation.name)

    def listen(self, name: str) -> asyncio.Queue[Event | None]:
        """Tokens of a request from now on, and at the end its operation. Call before it is submitted."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        if self.is_stopping:
            queue.put_nowait(None)
        self._listeners.setdefault(name, []).append(queue)
        return queue

    def unlisten(self, name: str, queue: asyncio.Queue[Event | None]) -> None:
        """The listener has gone."""
        queues = self._listeners.get(name, [])
        if queue in queues:
            queues.remove(queue)
        if not queues:
            self._listeners.pop(name, None)

    def worker_started(self, worker_id: str, incarnation: str) -> None:
        """A life of a worker begins: follow its events."""
        self._workers[worker_id] = _Worker(incarnation)
        self._spawn(self._follow(worker_id, self._workers[worker_id]))
        for base_model in list(self._turns):
            self.dispatch(base_model)

    def worker_ended(self, worker_id: str) -> None:
        """A life of a worker has ended: its requests start again elsewhere."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        requests = list(worker.running.values())
        worker.running.clear()
        for request in requests:
            if not request.operation.is_final:
                self._again(request)
        for base_model in list(self._turns):
            self.dispatch(base_model)

    def running_on(self, worker_id: str) -> list[str]:
        """The requests that a worker has."""
        return list(self._workers[worker_id].running) if worker_id in self._workers else []

    def convict(self, name: str) -> None:
        """Its worker died, and it had run alone, more than once: fail it."""
        if (request := self._requests.get(name)) is not None and not request.operation.is_final:
            self._turns[request.base_model].end(name, 0)
            request.operation.fail(worker_died(request.operation))
            self._spawn(self._commit(request))

    def published(self, worker_id: str, version: str) -> None:
        """A worker holds this version since its last batch."""
        if worker_id in self._workers:
            self._remember(self._workers[worker_id], version)

    def forget(self, worker_id: str, key: str) -> None:
        """Let a worker drop an adapter or version with the next batch or sample that it gets."""
        if worker_id in self._workers:
            self._workers[worker_id].removals.append(key)

    def take_removals(self, worker_id: str) -> tuple[str, ...]:
        """Adapters and versions that the worker shall forget with what it is sent now."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return ()
        removals, worker.removals = tuple(worker.removals), []
        return removals

    def decode_share(self, worker_id: str, training: Collection[str]) -> float:
        """The part of a worker's time that its samples get beside a batch of these tenants: by the weights of those who
        sample there and of those who train. Who does both counts on both sides.
        """
        worker = self._workers.get(worker_id)
        running = list(worker.running.values()) if worker is not None else []
        sampling = {request.operation.tenant_id for request in running}
        if not (sampling and training):
            return DECODE_SHARE
        sampled, trained = (sum(self._weight(tenant) for tenant in tenants) for tenants in (sampling, set(training)))
        return min(max(sampled / (sampled + trained), DECODE_SHARE_MIN), DECODE_SHARE_MAX)

    def _weight(self, tenant_id: str) -> float:
        return self._shares.get(tenant_id, Share()).weight

    async def stop(self) -> None:
        """Start and follow nothing more. Unfinished requests run again after the next start."""
        self.is_stopping = True
        for queue in [queue for queues in self._listeners.values() for queue in queues]:
            queue.put_nowait(None)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- turns

    def dispatch(self, base_model: str) -> None:
        """Hand out requests while a worker has room for the one whose turn it is."""
        turns, suspects = self._turns[base_model], self._suspects_of(base_model)
        while not self.is_stopping and self._has_room(base_model):
            name = turns.first(suspects.may_run)
            worker_id = self._choose_worker(base_model, self._requests[name]) if name is not None else None
            if name is None or worker_id is None:
                return
            turns.begin(name)
            request, worker = self._requests[name], self._workers[worker_id]
            request.worker_id = worker_id
            request.operation.is_running = True
            worker.running[name] = request
            worker.num_places_taken += request.num_places
            self._spawn(self._start(worker_id, worker, request))

    def _enqueue(self, request: _Request) -> None:
        name, tenant_id = request.operation.name, request.operation.tenant_id
        self._turns[request.base_model].add(name, tenant_id, request.num_tokens_max)

    def _again(self, request: _Request) -> None:
        """Start it anew, on any worker: from its logged seed it draws the same tokens."""
        request.worker_id = ""
        request.operation.is_running = False
        request.num_drawn.clear()
        self._turns[request.base_model].again(request.operation.name)

    def _has_room(self, base_model: str) -> bool:
        """Whether there is room for anything: if not, nobody need look whose turn it is."""
        workers = (self._workers.get(worker_id) for worker_id in self._live_workers(base_model))
        return any(
            worker is not None and worker.num_places_taken < self._config.samples_per_worker_max for worker in workers
        )

    def _choose_worker(self, base_model: str, request: _Request) -> str | None:
        """A worker with room: of those with the memory for it, one that knows the version, then the least busy."""
        version = request.sampler.version
        live = self._live_workers(base_model)
        candidates = [
            (version not in worker.versions, worker.num_places_taken, worker_id)
            for worker_id in self._with_memory(live, request) or live  # if none has it, any of them says so
            if (worker := self._workers.get(worker_id)) is not None
            and worker.num_places_taken + request.num_places <= self._config.samples_per_worker_max
        ]
        return min(candidates)[2] if candidates else None

    def _with_memory(self, worker_ids: Collection[str], request: _Request) -> list[str]:
        """Those into whose memory for keys and values a request can fit."""
        blocks = {worker.worker_id: worker.model.num_cache_blocks for worker in self._pool.workers()}
        return [
            worker_id
            for worker_id in worker_ids
            if (num_blocks := blocks.get(worker_id)) is None or request.num_cache_blocks_min <= num_blocks
        ]

    def _remember(self, worker: _Worker, version: str) -> None:
        worker.versions[version] = None
        worker.versions.move_to_end(version)
        if version in worker.removals:
            worker.removals.remove(version)
        in_use = {request.sampler.version for request in worker.running.values()}
        for old in [v for v in worker.versions if v not in in_use and v != version]:
            if len(worker.versions) <= VERSIONS_MAX:
                break
            del worker.versions[old]
            worker.removals.append(old)

    # ---- one request's way

    async def _start(self, worker_id: str, worker: _Worker, request: _Request) -> None:
        name = request.operation.name
        try:
            version = await self._version(worker, request.sampler)
            if worker.running.get(name) is not request:
                return  # the worker was lost meanwhile, and the request has begun anew
            asked = decode_sample(request.operation.body)
            scope, is_heard = request.operation.tenant_id, name in self._listeners
            removals = self.take_removals(worker_id)
            wanted = asked.request(name, version, scope=scope, stream=is_heard, removals=removals)
            await self._pool.start_sample(worker_id, wanted)
            if request.is_cancelled:
                await self._pool.cancel_sample(worker_id, name)
        except ServiceError as error:
            if worker.running.get(name) is request:
                self._done_on(worker, request)
                self._turns[request.base_model].end(name, 0)
                request.operation.fail(service_error(error))
                self._spawn(self._commit(request))
                self.dispatch(request.base_model)
        except WorkerLost as error:
            logger.warning("worker %s lost: %s", worker_id, error)
            self._worker_lost(worker_id, worker.incarnation)

    async def _version(self, worker: _Worker, sampler: SamplerRow) -> SamplerVersion:
        key = sampler.version
        if not key:
            return SamplerVersion(key="")
        spec = self._spec_of(sampler.adapter_id)
        # First, so that it does not depend on the worker whether a sampler whose checkpoint was deleted goes on.
        checkpoint = self._checkpoint(sampler) if sampler.model_path else None
        if key in worker.versions:
            self._remember(worker, key)
            return SamplerVersion(key=key, spec=spec)
        if checkpoint is None:
            state = await self._saver.publishing.state(sampler.sampler_id)
        else:
            state = await self._saver.read_checkpoint(checkpoint)
        self._remember(worker, key)
        return SamplerVersion(key=key, spec=spec, state=state)

    def _checkpoint(self, sampler: SamplerRow) -> CheckpointRow:
        """The checkpoint that a sampler was made of. Raises ServiceError if it is gone."""
        found = self._store.checkpoints.by_path(sampler.model_path)
        # Another checkpoint may have taken the path since: a sampler's weights never change.
        if found is None or version_of(found) != sampler.version:
            raise ServiceError(
                Code.NOT_FOUND, "NOT_FOUND", f"the sampler's checkpoint {sampler.model_path} was deleted"
            )
        return found

    async def _cancel_on(self, worker_id: str, worker: _Worker, name: str) -> None:
        try:
            await self._pool.cancel_sample(worker_id, name)
        except WorkerLost:
            self._worker_lost(worker_id, worker.incarnation)

    async def _follow(self, worker_id: str, worker: _Worker) -> None:
        try:
            async for event in self._pool.sample_events(worker_id):
                request = worker.running.get(event.op_id)
                if request is None:
                    continue
                if isinstance(event, TokenEvent):
                    self._stream(request, event)
                elif _is_version_unknown(event) and request.num_refused < REFUSALS_MAX:
                    request.num_refused += 1
                    worker.versions.pop(request.sampler.version, None)
                    self._done_on(worker, request)
                    self._again(request)
                    self.dispatch(request.base_model)
                else:
                    self._done_on(worker, request)
                    self._finish(request, event)
        except WorkerLost as error:
            if not self.is_stopping and self._workers.get(worker_id) is worker:
                logger.warning("worker %s lost: %s", worker_id, error)
                self._worker_lost(worker_id, worker.incarnation)

    def _stream(self, request: _Request, event: TokenEvent) -> None:
        request.num_drawn[event.sequence_index] += 1
        if request.num_drawn[event.sequence_index] <= request.num_streamed[event.sequence_index]:
            return
        request.num_streamed[event.sequence_index] += 1
        token = sampling_pb2.SampledToken(sequence_index=event.sequence_index, token=event.token, logprob=event.logprob)
        for queue in self._listeners.get(event.op_id, ()):
            queue.put_nowait(token)

    def _done_on(self, worker: _Worker, request: _Request) -> None:
        if worker.running.pop(request.operation.name, None) is not None:
            worker.num_places_taken -= request.num_places

    def _finish(self, request: _Request, result: SampleResult) -> None:
        operation = request.operation
        if result.error is not None:
            operation.fail(item_error(result.error))
        else:
            fill_sample(operation, result)
        assert operation.outcome is not None
        operation.outcome.num_tokens = result.num_prompt_tokens + result.num_sampled_tokens
        operation.outcome.engine_seconds = result.engine_s
        num_computed = result.num_prompt_tokens - result.num_cached_tokens + result.num_sampled_tokens
        self._turns[request.base_model].end(operation.name, num_computed)
        self._spawn(self._commit(request))
        self.dispatch(request.base_model)

    async def _commit(self, request: _Request) -> None:
        operation = request.operation
        await self._store.persist(CycleCommit(finished=[decided_row(operation)]))
        operation.drop_body()
        self._requests.pop(operation.name, None)
        self._suspects_of(request.base_model).clear(operation.name)
        self._table.finished(operation)
        assert operation.outcome is not None
        for queue in self._listeners.pop(operation.name, ()):
            queue.put_nowait(operation.outcome)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished_task)

    def _finished_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal(error)


def _is_version_unknown(event: SampleResult) -> bool:
    """The worker's fence held: it has dropped the version that we believed it to have."""
    return event.error is not None and event.error.code is ErrorCode.OUT_OF_ORDER


CANCELLED = ItemError(code=ErrorCode.CANCELLED, message="cancelled")

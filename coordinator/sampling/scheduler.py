"""Schedules samples: which one runs next and on which worker; receives its tokens and its result.

Samples have no order among themselves, so they are not part of cycles. The fair queue names the next sample. It waits
until a worker has room for it, and the others wait behind it, because a large one would never run otherwise. One that
fits only on workers that are not there now is passed over until one of them is back. Tokens stream to listeners and are
not kept; a finished sample is committed by group commit. The samples of a lost worker start again from their logged
seeds and draw the same tokens.

Depends on the pool's sampling side and the store; not on what a token means. Main invariant: losses of workers are read
before a sample's placement is used or changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine

from coordinator.base.errors import Failure, ServiceError
from coordinator.base.time import Time
from coordinator.fleet.fleet import Incarnation
from coordinator.observe.metrics import FIRST_TOKEN_SECONDS
from coordinator.observe.timeline import WaitClock
from coordinator.operations.operation import Operation, service_error
from coordinator.payloads.samples import DecodedSample, decode_sample
from coordinator.sampling.fair_queue import SampleQueues
from coordinator.sampling.placement import Placement, SamplerVersions
from coordinator.sampling.sample import Sample, SampleCommits, TokenStreams
from coordinator.scheduling.worker_losses import LossKind, LossRecorder, WorkerLoss, worker_died
from coordinator.storage.rows import SamplerRow
from tinkerpool.v1 import history_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import ErrorCode, ItemError, SampleResult, TokenEvent
from workers.contract.protocols import Pool, WorkerLost

REFUSALS_MAX = 3
"""How often a sample is started again because a worker did not hold its version."""
CANCELLED = ItemError(code=ErrorCode.CANCELLED, message="cancelled")


class SampleScheduler:
    """All unfinished samples of a coordinator."""

    def __init__(
        self,
        pool: Pool,
        versions: SamplerVersions,
        placement: Placement,
        queues: SampleQueues,
        commits: SampleCommits,
        streams: TokenStreams,
        losses: LossRecorder,
        failure: Failure,
        time: Time,
    ) -> None:
        self.streams = streams
        self.wake = asyncio.Event()
        """Set when samples may run that could not before; subscribe it to the signals of their producers."""
        self._pool = pool
        self._versions = versions
        self._placement = placement
        self._queues = queues
        self._commits = commits
        self._losses = losses
        self._lost = losses.subscribe(self.wake)
        self._failure = failure
        self._time = time
        self._awaiting: dict[str, list[Sample]] = {}
        """Samples from versions that must be rematerialized first, by version."""
        self._samples: dict[str, Sample] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    @property
    def num_samples(self) -> int:
        """Unfinished samples."""
        return len(self._samples)

    def start(self) -> None:
        """Begin to dispatch whenever something changes."""
        self._spawn(self._dispatch_at_changes())

    def submit(self, operation: Operation, sampler: SamplerRow, decoded: DecodedSample | None = None) -> None:
        """Queue a durable sample operation; `decoded` is its decoded payload, if that is at hand."""
        assert operation.is_durable
        decoded = decoded or decode_sample(operation.payload)
        slots = self._placement.num_slots(decoded.num_samples)
        sample = Sample(operation, self._versions.current(sampler), decoded, slots)
        self._samples[operation.name] = sample
        if operation.is_cancelled:  # before its append was durable
            self._finish(sample, SampleResult(op_id=sample.name, error=CANCELLED))
            return
        if self._versions.is_awaited(sample.sampler.version):
            sample.waits.switch(history_pb2.WAIT_REASON_FILE, self._time.monotonic())
            self._awaiting.setdefault(sample.sampler.version, []).append(sample)
            return
        self._queues.add(sample)
        self._dispatch(sample.base_model)

    def is_running(self, name: str) -> bool:
        """Return whether a worker has the sample."""
        sample = self._samples.get(name)
        return sample is not None and sample.worker is not None

    def waits(self, name: str) -> WaitClock | None:
        """Return the clock of what an unfinished sample waits for; None: there is no such sample."""
        sample = self._samples.get(name)
        return sample.waits if sample is not None else None

    def cancel(self, operation: Operation) -> None:
        """End a sample at the next decode step, at once if it is queued, or when it is submitted if it is not yet."""
        self._read_losses()
        if operation.is_cancelled or operation.is_final:
            return  # a decided sample is being committed, perhaps after the loss of its worker
        operation.cancel()
        sample = self._samples.get(operation.name)
        if sample is None:
            return  # its append is not durable yet: `submit` ends it
        if sample.worker is not None:
            self._spawn(self._cancel_on(sample.worker, sample.name))
        else:
            self._finish(sample, SampleResult(op_id=sample.name, error=CANCELLED))

    def weigh(self, tenant_id: str, weight: float) -> None:
        """Choose samples by another weight of a tenant from now on."""
        self._queues.weigh(tenant_id, weight)

    def end_samplers(self, sampler_ids: Collection[str]) -> None:
        """Cancel the samples of samplers whose session has ended."""
        for sample in [s for s in self._samples.values() if s.operation.target_id in sampler_ids]:
            self.cancel(sample.operation)

    def end_tenant(self, tenant_id: str) -> None:
        """Cancel the samples of a tenant that is being deleted: queued ones would wait, because the tenant is held."""
        for sample in [s for s in self._samples.values() if s.operation.tenant_id == tenant_id]:
            self.cancel(sample.operation)

    def follow(self, worker: Incarnation) -> None:
        """Read the events of a worker that has started, from now on, and let it have samples."""
        self._read_losses()
        self._placement.open(worker)
        self._spawn(self._follow(worker))
        self._dispatch_all()

    def leave(self, worker: Incarnation, until_s: float) -> None:
        """Run the samples of a drained worker again elsewhere that would not end by then, at the best guess.

        A sample is expected to run as long again as it has run so far. `until_s`: service time in seconds.
        """
        self._read_losses()
        now = self._time.monotonic()
        for sample in [self._samples[name] for name in worker.samples if name in self._samples]:
            if sample.operation.is_final or now + (now - sample.started_s) <= until_s:
                continue
            self._spawn(self._cancel_on(worker, sample.name))
            self._requeue(sample)
            self._dispatch(sample.base_model)

    async def stop(self) -> None:
        """Stop dispatching and following. Unfinished samples run again after the next start."""
        self._is_stopping = True
        self.streams.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _dispatch_at_changes(self) -> None:
        while True:
            await self.wake.wait()
            self.wake.clear()
            self._read_losses()
            for version in [v for v in self._awaiting if not self._versions.is_awaited(v)]:
                for sample in self._awaiting.pop(version):
                    if not sample.operation.is_final:
                        sample.waits.switch(history_pb2.WAIT_REASON_SLOTS, self._time.monotonic())
                        self._queues.add(sample)
            self._dispatch_all()

    def _dispatch_all(self) -> None:
        for base_model in self._queues.base_models():
            self._dispatch(base_model)

    def _dispatch(self, base_model: str) -> None:
        """Send samples to workers while a worker has room for the next one."""
        self._read_losses()
        while not self._is_stopping and self._placement.has_room(base_model):
            name = self._queues.peek(base_model, self._must_wait)
            worker = self._placement.choose(self._samples[name]) if name is not None else None
            if name is None or worker is None:
                return
            self._queues.start(self._samples[name])
            self._placement.take(self._samples[name], worker, self._time.monotonic())
            self._spawn(self._start(worker, self._samples[name]))

    def _must_wait(self, name: str) -> bool:
        sample = self._samples.get(name)
        return sample is not None and self._placement.must_wait(sample)

    def _requeue(self, sample: Sample) -> None:
        """Queue a sample again whose worker does not have it any more; end it if it was cancelled meanwhile."""
        self._placement.free(sample)
        if sample.is_cancelled:
            self._end(sample, SampleResult(op_id=sample.name, error=CANCELLED))
            return
        sample.restart()
        self._queues.requeue(sample)

    def _read_losses(self) -> None:
        """Fail the poison, then start the other samples of lost workers again."""
        for loss in self._lost.take():
            for sample in self._unfinished(loss):
                if sample.name == loss.poison:
                    self._fail(sample, worker_died(sample.operation, loss.probation))
            for sample in self._unfinished(loss):
                self._requeue(sample)

    def _unfinished(self, loss: WorkerLoss) -> list[Sample]:
        found = (self._samples.get(flight.name) for flight in loss.samples)
        return [sample for sample in found if sample is not None and not sample.operation.is_final]

    async def _start(self, worker: Incarnation, sample: Sample) -> None:
        try:
            version = await self._versions.for_worker(sample.sampler, worker)
            if not self._is_on(sample, worker):
                return  # the worker was lost meanwhile, and the sample was queued again
            request = sample.decoded.request(
                sample.name,
                version,
                scope=sample.operation.tenant_id,
                stream=self.streams.has_listener(sample.name),
                removals=worker.take_removals(),
            )
            worker.send_sample(sample.name)
            await self._pool.start_sample(worker.info.worker_id, request)
            if sample.is_cancelled:
                await self._pool.cancel_sample(worker.info.worker_id, sample.name)
        except ServiceError as error:
            if self._is_on(sample, worker):
                self._placement.free(sample)
                self._fail(sample, service_error(error))
                self._dispatch(sample.base_model)
        except WorkerLost as error:
            self._losses.record(worker.info.worker_id, worker.name, LossKind.DIED, str(error))

    async def _cancel_on(self, worker: Incarnation, name: str) -> None:
        try:
            await self._pool.cancel_sample(worker.info.worker_id, name)
        except WorkerLost as error:
            self._losses.record(worker.info.worker_id, worker.name, LossKind.DIED, str(error))

    async def _follow(self, worker: Incarnation) -> None:
        try:
            async for event in self._pool.sample_events(worker.info.worker_id):
                self._read_losses()
                sample = self._samples.get(event.op_id)
                if sample is None or not self._is_on(sample, worker):
                    continue
                if isinstance(event, TokenEvent):
                    if not sample.has_streamed and (arrived := sample.operation.timeline.arrived) is not None:
                        FIRST_TOKEN_SECONDS.observe(self._time.monotonic() - arrived)
                    self.streams.send_token(sample, event)
                elif _is_version_unknown(event) and sample.num_refused < REFUSALS_MAX:
                    sample.refused()
                    worker.misses(sample.sampler.version)
                    self._requeue(sample)
                    self._dispatch(sample.base_model)
                else:
                    self._placement.free(sample)
                    self._finish(sample, event)
        except WorkerLost as error:
            if not self._is_stopping:
                self._losses.record(worker.info.worker_id, worker.name, LossKind.DIED, str(error))
                self._placement.close(worker.name)

    def _is_on(self, sample: Sample, worker: Incarnation) -> bool:
        self._read_losses()
        return sample.worker is worker and sample.name in worker.samples

    def _finish(self, sample: Sample, result: SampleResult) -> None:
        self._end(sample, result)
        self._dispatch(sample.base_model)

    def _end(self, sample: Sample, result: SampleResult) -> None:
        self._queues.finish(sample, sample.decide(result))
        self._spawn(self._commit(sample))

    def _fail(self, sample: Sample, error: ops_pb.OperationError) -> None:
        sample.fail(error)
        self._queues.finish(sample, 0)
        self._spawn(self._commit(sample))

    async def _commit(self, sample: Sample) -> None:
        await self._commits.commit(sample)
        self._samples.pop(sample.name, None)
        self._queues.release(sample)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure.report(error)


def _is_version_unknown(event: SampleResult) -> bool:
    """Return whether the worker's fence refused the sample: it has dropped the version that the sample needs."""
    return event.error is not None and event.error.code is ErrorCode.OUT_OF_ORDER

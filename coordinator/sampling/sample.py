"""A sample request that is not finished: its operation, its sampler, its worker, its tokens; their streams; its commit.

A sample is in memory only, and its tokens are not kept: listeners get them as they are drawn, and at the end the
finished operation; a listener that leaves many unread gets the rest with that. Does not depend on queues or placement.
Main invariants: a token is streamed at most once, also if it is drawn again; the operation is a stream's last event; an
outcome is visible only after it is durable.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from coordinator.fleet.fleet import Flight, Incarnation
from coordinator.observe.metrics import PROMPT_TOKENS
from coordinator.observe.throughput import Throughput
from coordinator.observe.timeline import WaitClock
from coordinator.operations.history import NO_PHASES, Entries
from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.operation import Operation, Usage, decided_row, item_error
from coordinator.payloads.provenance import record_bytes
from coordinator.payloads.samples import DecodedSample
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.rows import SampleRecord, SamplerRow, SequenceRecord
from coordinator.storage.store import Store
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import history_pb2, sampling_pb2
from tinkerpool.v1 import operations_pb2 as ops_pb
from workers.contract.messages import SampleResult, StopReason, TokenEvent, TokenLogprobs

Event = sampling_pb2.SampledToken | ops_pb.Operation
"""An event for a listener; None in its queue: the coordinator stops."""
UNREAD_MAX, UNREAD_OF_TENANT_MAX = 8192, 4096
"""Tokens of all listeners, and of one tenant's, that may be unread: each takes a kilobyte."""
UNREAD_ALWAYS = 256
"""Unread tokens that a listener may have whatever others have."""


@dataclass(slots=True, eq=False)
class Sample:
    """One unfinished sample request."""

    operation: Operation
    sampler: SamplerRow
    decoded: DecodedSample
    num_slots: int
    """Sequence slots that it counts for on a worker."""
    worker: Incarnation | None = None
    """The incarnation that has it; None: it is queued."""
    started_s: float = 0.0
    """When it was last sent to a worker, in seconds of service time."""
    waits: WaitClock = field(default_factory=lambda: WaitClock(history_pb2.WAIT_REASON_SLOTS))
    """What it waits for while it is queued."""
    record: SampleRecord | None = None
    """Its record, once it is decided; None: it failed, or none was asked for."""
    num_sampled_tokens: int = 0
    """Tokens that were drawn for it, once a worker's result has decided it."""
    phase_s: Mapping[str, float] = field(default_factory=lambda: NO_PHASES)
    """See `SampleResult`; once a worker's result has decided it."""
    num_refused: int = 0
    """How often a worker did not hold its version."""
    _num_drawn: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens drawn on its present worker."""
    _num_streamed: Counter[int] = field(default_factory=Counter)
    """Sequence to tokens that were streamed: tokens that are drawn again elsewhere are not sent again."""

    @property
    def name(self) -> str:
        """The operation's name."""
        return self.operation.name

    @property
    def base_model(self) -> str:
        """The base model that it samples from."""
        return self.sampler.base_model

    @property
    def is_cancelled(self) -> bool:
        """Whether its owner, or the end of its sampler or tenant, has cancelled it."""
        return self.operation.is_cancelled

    @property
    def worker_id(self) -> str:
        """The worker that it was last sent to; empty: it is queued."""
        return self.worker.info.worker_id if self.worker is not None else ""

    @property
    def has_streamed(self) -> bool:
        """Whether a token of it was streamed."""
        return bool(self._num_streamed)

    @property
    def flight(self) -> Flight:
        """Its record for the fleet."""
        o = self.operation
        return Flight(o.name, o.target_id, o.seq, o.append_id, o.tenant_id, self.sampler.version)

    def fail(self, error: ops_pb.OperationError) -> None:
        """Decide it as failed without a worker's result."""
        self.operation.fail(error)

    def decide(self, result: SampleResult) -> int:
        """Decide by a worker's result; return how many tokens the engine computed."""
        self.num_sampled_tokens, self.phase_s = result.num_sampled_tokens, result.phase_s
        usage = Usage(result.num_prompt_tokens + result.num_sampled_tokens, result.engine_s)
        if result.error is not None:
            self.operation.fail(item_error(result.error), usage)
        else:
            fill_sample(self.operation, self.decoded, result, usage)
            self.record = self._record(result) if self.decoded.is_recorded else None
        PROMPT_TOKENS.labels("yes").inc(result.num_cached_tokens)
        PROMPT_TOKENS.labels("no").inc(result.num_prompt_tokens - result.num_cached_tokens)
        return result.num_prompt_tokens - result.num_cached_tokens + result.num_sampled_tokens

    def _record(self, result: SampleResult) -> SampleRecord:
        """Return the record of a result: what a pass of its tokens needs to know about how they were drawn."""
        decoded, sequences = self.decoded, result.sequences
        return SampleRecord(
            target_id=self.operation.target_id,
            seq=self.operation.seq,
            tenant_id=self.operation.tenant_id,
            session_id=self.operation.target_id.partition(":")[0],  # `sampler` is another one, if that is inflight
            temperature=decoded.logprobs_temperature,
            logprobs_version=sampling_pb2.LOGPROBS_VERSION_SCALED,
            sampler_version=self.sampler.version,
            num_prompt_tokens=len(decoded.prompt),
            num_bytes=record_bytes(len(sequences), sum(len(sequence.tokens) for sequence in sequences)),
            sequences=tuple(
                SequenceRecord(each.tokens.astype("<i4").tobytes(), each.logprobs.astype("<f4").tobytes())
                for each in sequences
            ),
        )

    def start_on(self, worker: Incarnation, now: float) -> None:
        """Record the worker that it is sent to. `now`: service time in seconds."""
        self.worker, self.started_s = worker, now
        self.operation.timeline.begin(self.waits, worker.info.worker_id, now)

    def restart(self) -> None:
        """Queue it again: from its logged seed it draws the same tokens, on any worker."""
        self.worker = None
        self._num_drawn.clear()

    def refused(self) -> None:
        """Count a refusal: its worker did not hold the version."""
        self.num_refused += 1

    def is_new(self, token: TokenEvent) -> bool:
        """Count a drawn token; return whether it was not streamed before."""
        index = token.sequence_index
        self._num_drawn[index] += 1
        if self._num_drawn[index] <= self._num_streamed[index]:
            return False
        self._num_streamed[index] += 1
        return True


class Listener:
    """A sample's events for one reader: tokens while few are unread, then the finished operation, which has all."""

    def __init__(self, tenant_id: str, unread: Counter[str], *, takes_tokens: bool = True) -> None:
        """`unread`: numbers of unread tokens by tenant, over all listeners; this one adds its own.

        Without `takes_tokens` the finished operation is its only event.
        """
        self.takes_tokens = takes_tokens
        self._tenant_id = tenant_id
        self._unread = unread
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._num_unread = 0
        self._is_cut = not takes_tokens

    async def get(self) -> Event | None:
        """Return the next event; None: the coordinator stops."""
        event = await self._events.get()
        if isinstance(event, sampling_pb2.SampledToken):
            self._count(-1)
        return event

    def put(self, event: Event | None) -> None:
        """Add an event; a token only as long as none was left out."""
        if isinstance(event, sampling_pb2.SampledToken):
            self._is_cut = self._is_cut or self._is_full()
            if self._is_cut:
                return
            self._count(1)
        self._events.put_nowait(event)

    def close(self) -> None:
        """Take no more tokens, and count none: the reader has gone, perhaps before the sample was submitted."""
        self._is_cut = True
        self._count(-self._num_unread)

    def _is_full(self) -> bool:
        if self._num_unread < UNREAD_ALWAYS:
            return False
        return self._unread[self._tenant_id] >= UNREAD_OF_TENANT_MAX or self._unread.total() >= UNREAD_MAX

    def _count(self, number: int) -> None:
        self._num_unread += number
        self._unread[self._tenant_id] += number
        if not self._unread[self._tenant_id]:
            del self._unread[self._tenant_id]


class TokenStreams:
    """The listeners of all samples."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {}
        self._unread: Counter[str] = Counter()
        self._is_closed = False

    def listener(self, tenant_id: str, *, takes_tokens: bool = True) -> Listener:
        """Return a listener for a tenant, which the caller closes."""
        return Listener(tenant_id, self._unread, takes_tokens=takes_tokens)

    def listen(self, name: str, listener: Listener) -> None:
        """Let a listener follow a sample from now on. Call before the sample is submitted."""
        if self._is_closed:
            listener.put(None)
        self._listeners.setdefault(name, []).append(listener)

    def unlisten(self, name: str, listener: Listener) -> None:
        """Remove a listener."""
        listeners = self._listeners.get(name, [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._listeners.pop(name, None)

    def has_listener(self, name: str) -> bool:
        """Return whether a listener takes the sample's tokens: a worker sends no others."""
        return any(listener.takes_tokens for listener in self._listeners.get(name, ()))

    def send_token(self, sample: Sample, event: TokenEvent) -> None:
        """Send a drawn token to the sample's listeners, unless they have it."""
        if not sample.is_new(event):
            return
        token = sampling_pb2.SampledToken(sequence_index=event.sequence_index, token=event.token, logprob=event.logprob)
        for listener in self._listeners.get(sample.name, ()):
            listener.put(token)

    def finish(self, name: str, operation: ops_pb.Operation) -> None:
        """Send the finished operation; the sample has no listeners after that."""
        for listener in self._listeners.pop(name, ()):
            listener.put(operation)

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.put(None)


class SampleCommits:
    """Commits the samples of all base models."""

    def __init__(
        self,
        store: Store,
        in_flight: InFlightTable,
        streams: TokenStreams,
        entries: Entries,
        throughput: Throughput,
    ) -> None:
        self._store = store
        self._in_flight = in_flight
        self._streams = streams
        self._entries = entries
        self._throughput = throughput

    async def commit(self, sample: Sample) -> None:
        """Make the outcome durable, then visible. Raises StorageError."""
        operation, day = sample.operation, self._store.database.day()
        commit = CycleCommit(
            finished=[decided_row(operation, day, self._entries.finished(operation))],
            records=[] if sample.record is None else [sample.record],
        )
        lost = await self._store.cycles.persist(commit)
        assert not lost, f"{operation.name} ran without being logged"
        operation.drop_payload()
        self._in_flight.finish(operation, day)
        self._entries.committed(operation, phase_s=sample.phase_s)
        self._throughput.count_sampled(operation.tenant_id, sample.worker_id, sample.num_sampled_tokens)
        assert operation.outcome is not None
        self._streams.finish(operation.name, operation.outcome)


def fill_sample(operation: Operation, asked: DecodedSample, result: SampleResult, usage: Usage) -> None:
    """Decide a sample: succeeded, with a worker's result."""
    sample = operation.succeed(0, usage).sample
    sample.note = asked.note
    for sequence in result.sequences:
        added = sample.sequences.add(
            tokens=to_tensor(sequence.tokens),
            logprobs=to_tensor(sequence.logprobs),
            stop_reason=_STOP_REASONS[sequence.stop_reason],
        )
        if sequence.topk is not None:
            added.topk.CopyFrom(_token_logprobs(sequence.topk))
    if result.prompt_logprobs is not None:
        sample.prompt_logprobs.CopyFrom(to_tensor(result.prompt_logprobs))
    if result.topk_prompt is not None:
        sample.topk_prompt.CopyFrom(_token_logprobs(result.topk_prompt))
    if result.prompt_target_logprobs is not None:
        assert asked.prompt_targets is not None
        # NaN where no token was named: 0 would be a possible log-probability.
        logprobs = np.where(asked.prompt_targets < 0, np.float32(np.nan), result.prompt_target_logprobs)
        sample.prompt_target_logprobs.CopyFrom(to_tensor(logprobs))
    if result.prompt_alt_tokens is not None:
        sample.prompt_alt_tokens.CopyFrom(_token_logprobs(result.prompt_alt_tokens))
    sample.num_cached_prompt_tokens = result.num_cached_tokens


_STOP_REASONS = {
    StopReason.STOP: ops_pb.STOP_REASON_STOP,
    StopReason.LENGTH: ops_pb.STOP_REASON_LENGTH,
}


def _token_logprobs(found: TokenLogprobs) -> ops_pb.TokenLogprobs:
    return ops_pb.TokenLogprobs(token_ids=to_tensor(found.token_ids), logprobs=to_tensor(found.logprobs))

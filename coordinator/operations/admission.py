"""Admission: which requests become operations, and at which sequence number.

The only way into an adapter log, the in-flight table and the operation log. A retryable refusal consumes no seq. A
permanent refusal of an explicit seq is recorded as a failed operation, so that later operations do not wait for it. So
is a seq that never arrived (`record_lost`). A known seq or request id returns the operation that it named, if the
payload is the same. Acceptance is synchronous: the operation enters its adapter log at once, so that a cycle may start
while the append is being synced.

Depends on the store and the adapter logs; not on how requests are decoded, and not on cycles. Main invariant: a caller
is acknowledged only after the append is durable.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from coordinator.base.config import Limits
from coordinator.base.errors import Code, Quota, ServiceError, exists, invalid, not_found, unavailable, unmet
from coordinator.limits.rates import Rates
from coordinator.observe.timeline import WaitClock
from coordinator.operations.adapter_log import AdapterLog, seq_lost
from coordinator.operations.ceilings import Ceilings
from coordinator.operations.holdings import NO_CLAIM, Claim
from coordinator.operations.in_flight import InFlightTable, SampleNumbers
from coordinator.operations.operation import Kind, Operation, new_row, operation_of_row, service_error
from coordinator.operations.registry import AdapterRegistry
from coordinator.operations.windows import window_closed
from coordinator.payloads.canonical import digest, serialize
from coordinator.payloads.passes import Chunk, DecodedPass
from coordinator.payloads.samples import unversioned_form
from coordinator.storage.sqlite import ConflictError, LockedError, StorageError, StoreBrokenError
from coordinator.storage.store import Store
from tinkerpool.names import operation_name
from tinkerpool.v1 import history_pb2, training_pb2
from workers.contract.gradient_windows import GradientWindow, WindowRole
from workers.contract.messages import UNMARKED, RequestBatch

if TYPE_CHECKING:
    from coordinator.observe.traces import Traces

DISK_DELAY_S = 10.0
"""Pause before a retry when the disk is full: files have to be deleted first."""
AWAITED_BYTES_MAX = 32 << 20
"""Room beyond `queued_bytes_max` for operations that others of the tenant wait for: two requests of the largest size.
Without it a client that sends the first part of a batch last would wait for its own later parts, which wait for it."""
SAMPLER_SEQ_MAX = 4 * 10**18
"""Leaves room below 2^63 for the numbers that the server assigns afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request on its way in: decoded and checked, or refused."""

    kind: Kind
    raw: Message
    """The message as it was received, for the record of a refusal."""
    payload: bytes = b""
    """Its canonical bytes: a function of the request only, so that a repeat is recognized; but see `identity`."""
    identity: bytes = b""
    """What its hash covers, if that is not the payload: the payload then has more than the request."""
    records: tuple[tuple[str, int], ...] = ()
    """The recorded samples (sampler, seq) that the payload was made with: the append renews them."""
    decoded: DecodedPass | None = None
    chunks: tuple[Chunk, ...] = ()
    chunk_tokens: int = 0
    batch: RequestBatch = UNMARKED
    """The batch that a forward_backward is part of, also if it is refused."""
    malformed: ServiceError | None = None
    """Why it has no payload."""
    refusal: ServiceError | None = None
    """Why it cannot be accepted now; does not count for a repeat."""
    claim: Claim = NO_CLAIM
    """What the operation may add to what its tenant holds."""
    refused_payload: bytes = b""
    """The payload that records its refusal, if it was made where that takes no time of the event loop."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Operations that were accepted, now or by an earlier call."""

    operations: Sequence[Operation]
    appended: Sequence[asyncio.Future[None]]
    """Their appends: done when they are durable; ServiceError if an append failed. Empty: they were durable before."""
    refusal: ServiceError | None = None
    """The permanent refusal that these operations record."""
    is_new: bool = True

    async def until_durable(self) -> Sequence[Operation]:
        """Return the operations once they are durable. Raises ServiceError, also the recorded refusal."""
        for appended in self.appended:
            await asyncio.shield(appended)
        if self.refusal is not None:
            raise self.refusal
        return self.operations


class Admission:
    """Accepts operations."""

    def __init__(
        self,
        store: Store,
        in_flight: InFlightTable,
        registry: AdapterRegistry,
        limits: Limits,
        ceilings: Ceilings,
        rates: Rates,
        clock: Callable[[], float],
        traces: Traces | None = None,
    ) -> None:
        """`clock`: returns service time in seconds."""
        self._clock = clock
        self._traces = traces
        self._store = store
        self._in_flight = in_flight
        self._registry = registry
        self._limits = limits
        self._ceilings = ceilings
        self._rates = rates
        self._numbers = SampleNumbers(store)
        self._appending: dict[str, asyncio.Future[None]] = {}
        """Operation to the future of its append."""
        self._is_closed = False

    def close(self) -> None:
        """Accept no more operations."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise ServiceError if new work is refused: UNAVAILABLE once the coordinator is shutting down, and
        RESOURCE_EXHAUSTED while the disk has too little room.
        """
        if self._is_closed:
            raise unavailable("SHUTTING_DOWN", "the pool is shutting down: try again")
        if lack := self._store.database.lack_of_room():
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED,
                "STORAGE",
                f"{lack}; delete checkpoints, adapters or sessions that you do not need, or ask an administrator to "
                "make room, then try again",
                retry_delay_s=DISK_DELAY_S,
            )

    def check_report(self, tenant_id: str) -> None:
        """Take a write of a tenant's own into the store from its rate of operations. Raises ServiceError."""
        self.check_open()
        self._rates.check(tenant_id, 1, 0)
        self._rates.draw(tenant_id, 1, 0)

    def check_room(self, log: AdapterLog, seq: int, request_id: str, num_tokens_min: int) -> None:
        """Raise ServiceError if any request would be refused for lack of room: before it is decoded.

        `num_tokens_min`: the least tokens of such a request. A repeat needs no room, nor does a request that is refused
        for its seq.
        """
        try:
            seq = self._known_seq(log.adapter_id, seq, request_id) or log.next_seq
        except ServiceError:
            return  # `accept` raises it
        if self._find_from(log, seq) is None and seq > log.snapshot_seq:
            self._check_room(log, seq, 1, (1, num_tokens_min))

    def accept(self, log: AdapterLog, seq: int, request_id: str, requests: Sequence[Request]) -> Accepted:
        """Accept consecutive operations of an adapter, all or none.

        Raises ServiceError for a refusal that leaves no record; a recorded refusal is part of the result.
        """
        is_explicit = seq > 0
        seq = self._known_seq(log.adapter_id, seq, request_id) or log.next_seq
        existing = [self._find_from(log, seq + i) for i in range(len(requests))]
        if existing[0] is not None:
            return self._repeat(log, existing, requests)
        if is_explicit and log.is_restored:
            raise _restored(log.adapter_id)
        if seq <= log.snapshot_seq:
            raise _dropped(f"{log.adapter_id}:{seq}", _expected(log))
        amounts = len(requests), sum(request.claim.num_tokens for request in requests)
        self._check_room(log, seq, sum(len(request.payload) for request in requests), amounts)
        num_beyond = seq - log.next_seq  # more to be recorded if they are lost, beside those that are missing now
        if num_beyond > 0 and num_beyond + log.num_missing >= self._limits.pending_operations_max:
            raise unmet(
                "SEQ_TOO_FAR",
                f"seq {seq} is too far ahead: the next free seq of {log.adapter_id} is {log.next_seq}",
                metadata=_expected(log),
            )
        if taken := next((o for o in existing if o is not None), None):
            raise exists("SEQ_TAKEN", f"{taken.name} is another operation", metadata=_expected(log))
        refusal = self._refusal(log, requests)
        if refusal is not None and (not is_explicit or refusal.code is Code.ALREADY_EXISTS):
            raise refusal
        if refusal is not None:
            self._rates.draw(log.tenant_id, len(requests), 0)
            return self._record(log, seq, requests, refusal)
        operations = [
            self._operation(log.tenant_id, log.adapter_id, seq + i, request_id if i == 0 else "", request)
            for i, request in enumerate(requests)
        ]
        appended = self._enter(log, operations)
        self._registry.used(log)
        self._rates.draw(log.tenant_id, *amounts)
        for operation, request in zip(operations, requests, strict=True):
            if request.decoded is not None:
                self._in_flight.keep_decoded(operation, request.decoded)
        self._registry.group_of(log).submitted(log)
        return Accepted(operations, (appended,))

    def record_lost(self, log: AdapterLog, seqs: Iterable[int]) -> None:
        """Record sequence numbers that never arrived as failed operations, so that operations behind them can run.

        As forward_backwards, which close the gradient window: each may have been a part of its gradient. Each is a
        batch of its own, because what came behind it has failed, too. If the append fails, they are missing again.
        """
        operations = []
        for seq in seqs:
            raw, batch = training_pb2.ForwardBackwardRequest(), RequestBatch(seq, seq)
            lost = Request(kind=Kind.FORWARD_BACKWARD, raw=raw, batch=batch)
            operation = self._operation(log.tenant_id, log.adapter_id, seq, "", lost)
            operation.fail(seq_lost(log.adapter_id, seq))
            operations.append(operation)
        self._rates.draw(log.tenant_id, len(operations), 0)
        self._enter(log, operations, is_record=True)

    def accept_sample(self, tenant_id: str, sampler_id: str, seq: int, request_id: str, request: Request) -> Accepted:
        """Accept a sample. Raises ServiceError."""
        if seq > SAMPLER_SEQ_MAX:
            raise invalid(f"seq must be at most {SAMPLER_SEQ_MAX}, not {seq}")
        known_seq = self._known_seq(sampler_id, seq, request_id)
        existing = self.find(sampler_id, known_seq) if known_seq else None
        if request.malformed is not None:
            raise request.malformed
        if existing is not None:
            _check_same_sample(existing, request)
            if existing.is_dropped:
                raise _dropped(existing.name, {})
            return Accepted((existing,), self._appends_of([existing]), is_new=False)
        if request.refusal is not None:
            raise request.refusal
        self._check_queue(tenant_id, sampler_id, len(request.payload))
        self._rates.check(tenant_id, 1, request.claim.num_tokens)
        self._ceilings.check_samples(tenant_id, request.claim)
        seq = known_seq or self._numbers.next(sampler_id)
        operation = self._operation(tenant_id, sampler_id, seq, request_id, request)
        now = self._clock()
        operation.timeline.arrive(WaitClock(history_pb2.WAIT_REASON_SLOTS), now)
        if self._traces is not None:
            self._traces.accept(operation.name, now)
        self._numbers.note(sampler_id, seq)
        self._in_flight.add(operation)
        self._rates.draw(tenant_id, 1, request.claim.num_tokens)
        return Accepted((operation,), (self._append(None, [operation]),))

    def find(self, target_id: str, seq: int) -> Operation | None:
        """Return the operation at a sequence number, finished or not."""
        found = self._in_flight.get(f"{target_id}:{seq}")
        if found is not None:
            return found
        row = self._store.operations.find(target_id, seq)
        return operation_of_row(row) if row is not None else None

    def owner(self, target_id: str, seq: int) -> str | None:
        """Return the tenant of the operation at a sequence number; None if there is none."""
        if (found := self._in_flight.get(f"{target_id}:{seq}")) is not None:
            return found.tenant_id
        return self._store.operations.owner(target_id, seq)

    def result_bytes(self, tenant_id: str, target_id: str, seq: int) -> int:
        """Return the size of the stored result of a tenant's operation; 0 if there is none yet."""
        if self._in_flight.get(f"{target_id}:{seq}") is not None:
            return 0
        return self._store.operations.result_bytes(tenant_id, target_id, seq)

    def end_sampler(self, sampler_id: str) -> None:
        """Drop the numbering of a sampler whose session has ended: it gets no more samples."""
        self._numbers.forget(sampler_id)

    # ---- checks

    def _find_from(self, log: AdapterLog, seq: int) -> Operation | None:
        """Return the operation of an adapter at a sequence number.

        The adapter log holds every operation above the snapshot, so a free seq there costs no read of the database: the
        seq of a pass is often free below `next_seq`, because its smaller optim_step arrives first.
        """
        if seq >= log.next_seq or (seq > log.snapshot_seq and seq not in log.operations):
            return None
        return self.find(log.adapter_id, seq)

    def _known_seq(self, target_id: str, seq: int, request_id: str) -> int:
        """Return the explicit seq, or that of an earlier request of this id; 0: the server is to assign one."""
        if seq < 0:
            raise invalid(f"seq must be 1 or more, or 0 with a request_id, not {seq}")
        if seq > 0:
            return seq
        if not request_id:
            raise invalid("seq is 0 and request_id is empty: set one of them, so that the call is safe to repeat")
        if (found := self._in_flight.of_request(target_id, request_id)) is not None:
            return found.seq
        return self._store.operations.seq_of_request(target_id, request_id) or 0

    def _repeat(self, log: AdapterLog, existing: Sequence[Operation | None], requests: Sequence[Request]) -> Accepted:
        """Return the operations that a repeated request named the first time."""
        operations: list[Operation] = []
        for operation, request in zip(existing, requests, strict=True):
            if operation is None and operations and operations[-1].seq < log.snapshot_seq:
                raise _dropped(f"{log.adapter_id}:{operations[-1].seq + 1}", _expected(log))
            if operation is None or operation.kind is not request.kind:
                raise _taken(existing[0] or operation, _expected(log))  # type: ignore[arg-type]  # one is there
            _check_same(operation, request, _expected(log))
            if operation.is_dropped:
                raise _dropped(operation.name, _expected(log))
            operations.append(operation)
        refusal = next((request.malformed for request in requests if request.malformed is not None), None)
        if refusal is not None:
            refusal.operation = operations[0].name
        return Accepted(operations, self._appends_of(operations), refusal, is_new=False)

    def _appends_of(self, operations: Iterable[Operation]) -> tuple[asyncio.Future[None], ...]:
        """Return the unfinished appends of these operations, which may have entered by several calls."""
        return tuple(self._appending[each.name] for each in operations if each.name in self._appending)

    def _check_room(self, log: AdapterLog, seq: int, num_bytes: int, amounts: tuple[int, int]) -> None:
        """Raise ServiceError if there is no room, or the rates of the tenant lack these operations and tokens.

        The operation that the adapter waits for has room of its own, and no rate refuses it.
        """
        try:
            self._check_queue(log.tenant_id, log.adapter_id, num_bytes)
            self._rates.check(log.tenant_id, *amounts)
        except ServiceError as refusal:
            bytes_beyond = num_bytes - AWAITED_BYTES_MAX
            has_room = self._ceilings.queued_bytes.refusal(log.tenant_id, bytes_beyond) is None
            if refusal.reason not in ("QUEUE_FULL", "RATE_LIMITED") or not has_room or not log.waits_for(seq):
                raise

    def _check_queue(self, tenant_id: str, target_id: str, num_bytes: int) -> None:
        self.check_open()
        num_unfinished, num_max = self._in_flight.num_of_target(target_id), self._limits.pending_operations_max
        of_target = Quota(f"queued operations of {target_id}", num_unfinished, num_max)
        self._ceilings.check_queue(tenant_id, of_target, num_bytes)

    def _refusal(self, log: AdapterLog, requests: Sequence[Request]) -> ServiceError | None:
        """Return why these requests are refused for good: malformed, not possible now, or too much for one window."""
        for reasons in ((r.malformed for r in requests), (r.refusal for r in requests)):
            if (error := next(filter(None, reasons), None)) is not None:
                return error
        if (error := self._ceilings.refusal(log.tenant_id, requests[0].claim)) is not None:
            return error
        added = sum(len(request.payload) for request in requests if request.kind is Kind.FORWARD_BACKWARD)
        if added and log.window_bytes + added > self._limits.window_bytes_max:
            return unmet(
                "WINDOW_TOO_LARGE",
                f"the gradient since the last optim_step comes from {log.window_bytes + added} bytes of requests, "
                f"at most {self._limits.window_bytes_max} are kept: take an optim_step first, or discard the gradient",
            )
        return None

    # ---- the way into the log

    def _record(self, log: AdapterLog, seq: int, requests: Sequence[Request], refusal: ServiceError) -> Accepted:
        """Record a refused seq as a failed operation, so that operations behind it can run."""
        failure = service_error(refusal)
        operations = []
        for i, request in enumerate(requests):
            operation = self._operation(log.tenant_id, log.adapter_id, seq + i, "", request, is_refused=True)
            operation.fail(failure if i == 0 else window_closed(GradientWindow(failure), WindowRole.STEP))
            operations.append(operation)
        refusal.operation = operation_name(log.adapter_id, seq)
        return Accepted(operations, (self._enter(log, operations, is_record=True),), refusal)

    def _enter(
        self, log: AdapterLog, operations: Sequence[Operation], *, is_record: bool = False
    ) -> asyncio.Future[None]:
        """Put operations into the adapter log and the in-flight table, and begin their append.

        There is no await between these: a deletion that begins later finds the operations in the adapter log, and its
        write is queued behind theirs. Raises ServiceError if a deletion has begun.
        """
        if log.is_deleted:
            raise not_found("adapter", log.adapter_id)
        now = self._clock()
        for operation in operations:
            log.add(operation)
            log.arrived(operation, now)
            self._in_flight.add(operation)
            if self._traces is not None and not is_record:
                self._traces.accept(operation.name, now)
        return self._append(log, operations, is_record=is_record)

    def _append(
        self, log: AdapterLog | None, operations: Sequence[Operation], *, is_record: bool = False
    ) -> asyncio.Future[None]:
        """Queue the append; `is_record`: it records a refusal, whose outcome becomes durable with it."""
        appended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        appended.add_done_callback(asyncio.Future.exception)  # mark it retrieved: the caller may have been cancelled
        for operation in operations:
            self._appending[operation.name] = appended
        written = self._store.operations.append([new_row(operation) for operation in operations])
        written.add_done_callback(functools.partial(self._appended, log, operations, appended, is_record))
        return appended

    def _appended(
        self,
        log: AdapterLog | None,
        operations: Sequence[Operation],
        appended: asyncio.Future[None],
        is_record: bool,
        written: asyncio.Future[None],
    ) -> None:
        """Finish or withdraw the operations of an append that ended; runs before the waits for later commits resume."""
        error = written.exception()
        for operation in operations:
            del self._appending[operation.name]
            if error is None:
                operation.accept()
                self._in_flight.spill(operation)
                if self._traces is not None:
                    self._traces.append(operation.name)
            else:
                self._in_flight.remove(operation)
                if self._traces is not None:
                    self._traces.withdraw(operation.name)
                if log is None:
                    operation.withdraw()
                else:
                    log.withdraw(operation)
        if error is None and is_record:
            for operation in operations:
                self._in_flight.finish(operation)
        if log is not None:
            has_waited = error is None and log.accepted()
            if error is not None or has_waited or any(operation.is_final for operation in operations):
                self._registry.group_of(log).mark_dirty(log)
        if error is None:
            appended.set_result(None)
        else:
            appended.set_exception(_append_error(error))

    def _operation(
        self,
        tenant_id: str,
        target_id: str,
        seq: int,
        request_id: str,
        request: Request,
        *,
        is_refused: bool = False,
    ) -> Operation:
        payload = _record_of(request) if is_refused else request.payload
        identity = payload if is_refused else request.identity or payload
        return Operation(
            tenant_id=tenant_id,
            target_id=target_id,
            seq=seq,
            kind=request.kind,
            payload=payload,
            payload_hash=digest(identity, request.kind.value),
            request_id=request_id,
            chunk_tokens=request.chunk_tokens,
            num_bytes=len(payload),
            chunks=() if is_refused else request.chunks,
            batch=request.batch,
            claim=NO_CLAIM if is_refused else request.claim,
            append_id=self._store.operations.new_append_id(),
            records=() if is_refused else request.records,
        )


def storage_error(error: object) -> ServiceError:
    """Return the refusal for a request whose append failed, or may have failed. Repeating it is safe in both cases."""
    if isinstance(error, StoreBrokenError):
        return unavailable(
            "STORAGE_BROKEN",
            "the server's disk fails and the server stops; whether the request was logged is not known: send it again",
        )
    if isinstance(error, LockedError):
        return unavailable(
            "STORAGE_LOCKED",
            "another program has locked the server's database: nothing was accepted, send the request again",
        )
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "STORAGE",
        f"the server cannot log requests at the moment ({error}): nothing was accepted, try again later",
        retry_delay_s=1.0,
    )


def _append_error(error: BaseException) -> BaseException:
    if isinstance(error, ConflictError):
        return exists("REQUEST_ID_TAKEN", "this request_id was used before")
    return storage_error(error) if isinstance(error, StorageError) else error


def refused_payload(request: Message) -> bytes:
    """Return the payload that records a refused request: a hash of the message as it was received."""
    left_out = {name: getattr(request, name) for name in ("seq", "request_id")}
    for name in left_out:
        request.ClearField(name)
    serialized = serialize(request)  # without a copy of the message, which may be large
    for name, value in left_out.items():
        setattr(request, name, value)
    return digest(serialized, "refused")


def _record_of(request: Request) -> bytes:
    return request.refused_payload or refused_payload(request.raw)


def _check_same(operation: Operation, request: Request, metadata: dict[str, str]) -> None:
    """Raise ServiceError unless the operation has this request's payload, or records the refusal of this request."""
    identity = request.identity or request.payload
    if request.malformed is None and operation.payload_hash == digest(identity, operation.kind.value):
        return
    if operation.payload_hash != digest(_record_of(request), operation.kind.value):
        raise _taken(operation, metadata)


def _check_same_sample(sample: Operation, request: Request) -> None:
    """Raise ServiceError unless the sample has this request's payload, in the present form or the one before it."""
    try:
        _check_same(sample, request, {})
    except ServiceError:
        if sample.payload_hash != digest(unversioned_form(request.payload), sample.kind.value):
            raise


def _restored(adapter_id: str) -> ServiceError:
    return unmet(
        "POOL_RESTORED",
        f"the pool was restored from a backup, which may lack operations of {adapter_id} that were acknowledged since. "
        f"Save the state that it has now (`tinkerpool checkpoint save {adapter_id} NAME`) or choose one of its "
        "checkpoints, and create a training client from that",
    )


def _dropped(name: str, metadata: dict[str, str]) -> ServiceError:
    return unmet("RESULT_DROPPED", f"{name} finished long ago and its result was dropped", metadata=metadata)


def _taken(operation: Operation, metadata: dict[str, str]) -> ServiceError:
    if operation.never_arrived and operation.outcome is not None:
        return exists("SEQ_TAKEN", f"too late: {operation.outcome.error.message}", metadata=metadata)
    return exists(
        "SEQ_TAKEN",
        f"{operation.name} was submitted before with other contents"
        + (f": the next free seq is {metadata['expected_seq']}; is a second client writing?" if metadata else ""),
        metadata=metadata,
    )


def _expected(log: AdapterLog) -> dict[str, str]:
    return {"expected_seq": str(log.next_seq)}

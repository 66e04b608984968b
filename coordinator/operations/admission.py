"""What is let into an order, and at which place. The one way by which operations enter queue, table and log.

A retryable refusal consumes nothing. A permanent refusal of an explicit seq is recorded as a failed operation, so that
what comes after it need not wait for ever. A seq or request id that is known gives the operation it named, if the body
is the same. Acceptance puts the operation into its queue at once, so that a cycle may start while the log is being
synced; the caller is acknowledged only after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError, invalid, not_found
from coordinator.operations.adapter_log import AdapterQueue, window_closed
from coordinator.operations.canonical import digest, serialize
from coordinator.operations.chunks import Chunk
from coordinator.operations.in_flight import OperationTable
from coordinator.operations.operation import Kind, Operation
from coordinator.operations.outcomes import service_error
from coordinator.storage.database import ConflictError, StorageError, StoreBrokenError
from coordinator.storage.rows import NewOperation, OperationRow
from coordinator.storage.store import Store
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2 as ops_pb

RETRY_DELAY_S = 1.0
SAMPLER_SEQ_MAX = 4 * 10**18
"""So that the numbers that the server gives after it still fit everywhere."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A request on its way in: its kind, and how to check it and make its canonical body and chunks."""

    kind: Kind
    request: Message
    """As it came, for the record if it is refused."""
    build: Callable[[], tuple[bytes, tuple[Chunk, ...]]]
    """Must not depend on anything that changes, so that a repeated request is known again."""
    chunk_tokens: int = 0
    check: Callable[[], None] = lambda: None
    """What must hold at admission, and need not when the request is repeated."""


class Admission:
    """Takes operations in."""

    def __init__(self, store: Store, table: OperationTable, limits: Limits) -> None:
        self._store = store
        self._table = table
        self._limits = limits
        self.is_stopping = False

    def check_open(self) -> None:
        """Raise ServiceError UNAVAILABLE once the coordinator is shutting down."""
        if self.is_stopping:
            raise ServiceError(
                Code.UNAVAILABLE, "SHUTTING_DOWN", "the pool is shutting down: try again", retry_delay_s=RETRY_DELAY_S
            )

    async def to_adapter(
        self, adapter: AdapterQueue, seq: int, request_id: str, drafts: Sequence[Draft], touch: Callable[[], None]
    ) -> list[Operation]:
        """Take consecutive operations into an adapter's order, all or none. Returns them once they are durable."""
        is_explicit = seq > 0
        seq = self._place(adapter.adapter_id, seq, request_id, adapter.next_seq)
        existing = [self._find_from(adapter, seq + i) for i in range(len(drafts))]
        if existing[0] is not None:
            return await self._again(adapter, existing, drafts)
        if seq <= adapter.snapshot_seq:
            raise _dropped(f"{adapter.adapter_id}:{seq}", _expected(adapter))
        self._check_room(adapter.tenant_id, adapter.adapter_id, sum(d.request.ByteSize() for d in drafts))
        if seq - adapter.next_seq >= self._limits.pending_operations_max:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "SEQ_TOO_FAR",
                f"seq {seq} is too far ahead: {adapter.adapter_id} goes on with {adapter.next_seq}",
                metadata=_expected(adapter),
            )
        try:
            if taken := next((o for o in existing if o is not None), None):
                raise ServiceError(
                    Code.ALREADY_EXISTS, "SEQ_TAKEN", f"{taken.name} is another operation", metadata=_expected(adapter)
                )
            built = [draft.build() for draft in drafts]
            for draft in drafts:
                draft.check()
            self._check_window(adapter, drafts, built)
        except ServiceError as error:
            if is_explicit and error.code is not Code.ALREADY_EXISTS:
                await self._record_refusal(adapter, seq, drafts, error)
                error.operation = operation_name(adapter.adapter_id, seq)
                touch()
            raise
        operations = [
            self._operation(adapter.tenant_id, adapter.adapter_id, seq + i, request_id if i == 0 else "", draft, *body)
            for i, (draft, body) in enumerate(zip(drafts, built, strict=True))
        ]
        self._take_in(adapter, operations)
        touch()
        try:
            await self._append(operations)
        except ServiceError:
            for operation in operations:
                adapter.retract(operation)
            raise
        return operations

    async def to_sampler(
        self, tenant_id: str, sampler_id: str, seq: int, request_id: str, next_seq: int, draft: Draft
    ) -> tuple[Operation, bool]:
        """Take a sample request in. Returns the durable operation and whether it is new."""
        if seq > SAMPLER_SEQ_MAX:
            raise invalid(f"seq must be at most {SAMPLER_SEQ_MAX}, not {seq}")
        seq = self._place(sampler_id, seq, request_id, next_seq)
        existing = self.find(sampler_id, seq)
        body, chunks = draft.build()
        if existing is not None:
            _check_same(existing, draft, body, {})
            if existing.is_dropped:
                raise _dropped(existing.name, {})
            await self._until_durable([existing])
            return existing, False
        draft.check()
        self._check_room(tenant_id, sampler_id, len(body))
        operation = self._operation(tenant_id, sampler_id, seq, request_id, draft, body, chunks)
        self._table.add(operation)
        await self._append([operation])
        return operation, True

    def find(self, target_id: str, seq: int) -> Operation | None:
        """The operation at a place, finished or not."""
        live = self._table.get(f"{target_id}:{seq}")
        if live is not None:
            return live
        row = self._store.operations.find(target_id, seq)
        return operation_of_row(row) if row is not None else None

    def owner(self, target_id: str, seq: int) -> str | None:
        """The tenant of the operation at a place; None if there is none."""
        if (live := self._table.get(f"{target_id}:{seq}")) is not None:
            return live.tenant_id
        return self._store.operations.owner(target_id, seq)

    def _find_from(self, adapter: AdapterQueue, seq: int) -> Operation | None:
        return self.find(adapter.adapter_id, seq) if seq < adapter.next_seq else None

    def _place(self, target_id: str, seq: int, request_id: str, next_seq: int) -> int:
        if seq < 0:
            raise invalid(f"seq must be 1 or more, or 0 with a request_id, not {seq}")
        if seq > 0:
            return seq
        if not request_id:
            raise invalid("seq is 0 and request_id is empty: set one of them, so that the call is safe to repeat")
        if (live := self._table.of_request(target_id, request_id)) is not None:
            return live.seq
        found = self._store.operations.seq_of_request(target_id, request_id)
        return found if found is not None else next_seq

    async def _again(
        self, adapter: AdapterQueue, existing: Sequence[Operation | None], drafts: Sequence[Draft]
    ) -> list[Operation]:
        """The answer to a repeated request."""
        operations: list[Operation] = []
        refusal: ServiceError | None = None
        for operation, draft in zip(existing, drafts, strict=True):
            if operation is None and operations and operations[-1].seq < adapter.snapshot_seq:
                raise _dropped(f"{adapter.adapter_id}:{operations[-1].seq + 1}", _expected(adapter))
            if operation is None or operation.kind is not draft.kind:
                raise _taken(existing[0] or operation, _expected(adapter))  # type: ignore[arg-type]  # one is there
            body = None
            try:
                body, _ = draft.build()
            except ServiceError as error:
                refusal = refusal or error
            _check_same(operation, draft, body, _expected(adapter))
            if operation.is_dropped:
                raise _dropped(operation.name, _expected(adapter))
            operations.append(operation)
        await self._until_durable(operations)
        if refusal is not None:
            refusal.operation = operations[0].name
            raise refusal
        return operations

    async def _until_durable(self, operations: Sequence[Operation]) -> None:
        """Wait for appends that are under way; raises what their own callers get if those fail."""
        if all(operation.is_durable for operation in operations):
            return
        try:
            await self._store.barrier()  # handed in after their append: done after it
        except StorageError as error:
            raise storage_error(error) from None
        if not all(operation.is_durable for operation in operations):
            raise storage_error("the first attempt failed")

    def _check_room(self, tenant_id: str, target_id: str, num_bytes: int) -> None:
        self.check_open()
        num_unfinished = self._table.num_pending(target_id)
        if num_unfinished >= self._limits.pending_operations_max:
            raise _full(f"{num_unfinished} operations are waiting, at most {self._limits.pending_operations_max}")
        pending = self._table.pending_bytes(tenant_id)
        if pending + num_bytes > self._limits.pending_bytes_max and pending:
            raise _full(f"{pending} bytes of your requests are waiting, at most {self._limits.pending_bytes_max}")

    def _check_window(
        self, adapter: AdapterQueue, drafts: Sequence[Draft], built: Sequence[tuple[bytes, tuple[Chunk, ...]]]
    ) -> None:
        added = sum(len(body) for d, (body, _) in zip(drafts, built, strict=True) if d.kind is Kind.FORWARD_BACKWARD)
        if added and adapter.window_bytes + added > self._limits.window_bytes_max:
            raise ServiceError(
                Code.FAILED_PRECONDITION,
                "WINDOW_TOO_LARGE",
                f"the gradient since the last optim_step comes from {adapter.window_bytes + added} bytes of requests, "
                f"at most {self._limits.window_bytes_max} are kept: take an optim_step first",
            )

    async def _record_refusal(
        self, adapter: AdapterQueue, seq: int, drafts: Sequence[Draft], error: ServiceError
    ) -> None:
        """Let a refused seq count as done, so that the order goes on."""
        failure = service_error(error)
        operations = []
        for i, draft in enumerate(drafts):
            body = _refused_body(draft)
            operation = self._operation(adapter.tenant_id, adapter.adapter_id, seq + i, "", draft, body, ())
            operation.fail(failure if i == 0 else window_closed(failure))
            operations.append(operation)
        self._take_in(adapter, operations)
        try:
            await self._append(operations)
        except ServiceError:
            for operation in operations:
                adapter.retract(operation)
            raise
        for operation in operations:
            self._table.finished(operation)

    def _take_in(self, adapter: AdapterQueue, operations: Sequence[Operation]) -> None:
        """Put operations into queue and table. Append them before anything is awaited: so a deletion that begins after
        this finds them in the queue, and hands in its write behind them.

        Raises ServiceError if the deletion has begun.
        """
        if adapter.is_deleted:
            raise not_found("adapter", adapter.adapter_id)
        for operation in operations:
            adapter.add(operation)
            self._table.add(operation)

    async def _append(self, operations: Sequence[Operation]) -> None:
        try:
            await self._store.operations.append([_row(operation) for operation in operations])
        except ConflictError:
            for operation in operations:
                self._table.remove(operation)
            raise ServiceError(Code.ALREADY_EXISTS, "REQUEST_ID_TAKEN", "this request_id was used before") from None
        except StorageError as error:
            for operation in operations:
                self._table.remove(operation)
            raise storage_error(error) from None
        for operation in operations:
            operation.is_durable = True

    def _operation(
        self,
        tenant_id: str,
        target_id: str,
        seq: int,
        request_id: str,
        draft: Draft,
        body: bytes,
        chunks: tuple[Chunk, ...],
    ) -> Operation:
        return Operation(
            tenant_id=tenant_id,
            target_id=target_id,
            seq=seq,
            kind=draft.kind,
            body=body,
            body_hash=digest(body, draft.kind.value),
            request_id=request_id,
            chunk_tokens=draft.chunk_tokens,
            num_bytes=len(body),
            append_id=self._store.new_append_id(),
            chunks=chunks,
        )


def storage_error(error: object) -> ServiceError:
    """The log did not take it, or nobody knows whether it did. To send the same again is safe either way."""
    if isinstance(error, StoreBrokenError):
        return ServiceError(
            Code.UNAVAILABLE,
            "STORAGE_BROKEN",
            "the server's disk fails and the server ends; whether the request was logged is not known: send it again",
            retry_delay_s=RETRY_DELAY_S,
        )
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "STORAGE",
        f"the server cannot log requests at the moment ({error}): nothing was accepted, try again later",
        retry_delay_s=RETRY_DELAY_S,
    )


def operation_of_row(row: OperationRow) -> Operation:
    """Return an operation as the store has it, without its payload."""
    outcome = row.outcome
    return Operation(
        tenant_id=row.tenant_id,
        target_id=row.target_id,
        seq=row.seq,
        kind=Kind(row.kind),
        body=b"",
        body_hash=row.payload_hash,
        request_id=row.request_id or "",
        chunk_tokens=row.chunk_tokens,
        num_bytes=row.num_bytes,
        append_id=row.append_id,
        is_durable=True,
        is_committed=outcome is not None,
        is_dropped=outcome == b"",
        outcome=ops_pb.Operation.FromString(outcome) if outcome is not None else None,
    )


def _row(operation: Operation) -> NewOperation:
    return NewOperation(
        target_id=operation.target_id,
        seq=operation.seq,
        append_id=operation.append_id,
        tenant_id=operation.tenant_id,
        kind=operation.kind.value,
        request_id=operation.request_id or None,
        payload=operation.body,
        payload_hash=operation.body_hash,
        chunk_tokens=operation.chunk_tokens,
        outcome=serialize(operation.outcome) if operation.outcome is not None else None,
        is_failed=operation.is_failed,
    )


def _refused_body(draft: Draft) -> bytes:
    """What stands in the log for a request that has no canonical body: nothing but its hash matters."""
    raw = type(draft.request)()
    raw.CopyFrom(draft.request)
    for name in ("seq", "request_id"):
        raw.ClearField(name)
    return digest(serialize(raw), "refused")


def _check_same(operation: Operation, draft: Draft, body: bytes | None, metadata: dict[str, str]) -> None:
    """Raise unless the request is the operation's own: by its body, or as it came if it was refused."""
    if body is not None and operation.body_hash == digest(body, operation.kind.value):
        return
    if operation.body_hash != digest(_refused_body(draft), operation.kind.value):
        raise _taken(operation, metadata)


def _dropped(name: str, metadata: dict[str, str]) -> ServiceError:
    return ServiceError(
        Code.FAILED_PRECONDITION,
        "RESULT_DROPPED",
        f"{name} finished long ago and its result was dropped",
        metadata=metadata,
    )


def _taken(operation: Operation, metadata: dict[str, str]) -> ServiceError:
    return ServiceError(
        Code.ALREADY_EXISTS,
        "SEQ_TAKEN",
        f"{operation.name} was submitted before with other contents"
        + (f": the next free seq is {metadata['expected_seq']}; is a second client writing?" if metadata else ""),
        metadata=metadata,
    )


def _expected(adapter: AdapterQueue) -> dict[str, str]:
    return {"expected_seq": str(adapter.next_seq)}


def _full(what: str) -> ServiceError:
    return ServiceError(
        Code.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        f"{what}: wait for some to finish, then try again",
        retry_delay_s=RETRY_DELAY_S,
    )

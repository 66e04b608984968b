"""Operations of all kinds: get, wait, cancel. Does not depend on where they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from coordinator.base.errors import Code, ServiceError, invalid, not_found
from coordinator.operations.operation import Kind, Operation
from coordinator.service.access import UseCases, streamed
from coordinator.tenants.principals import Principal, Role
from tinkerpool.v1 import operations_pb2 as pb

NAMES_AT_ONCE = 100
"""Names that are looked up before other callbacks of the event loop run: a finished one costs a read of the store."""


class OperationUseCases(UseCases):
    """OperationService."""

    async def get_operation(self, principal: Principal, request: pb.GetOperationRequest) -> pb.GetOperationResponse:
        """Return an operation as it is now."""
        operation = self._shown_operation(self._operation(principal, request.name))
        self._note_fetched(principal, operation)
        return pb.GetOperationResponse(operation=operation)

    async def poll_operations(
        self, principal: Principal, request: pb.WaitOperationsRequest
    ) -> AsyncGenerator[pb.WaitOperationsResponse, None]:
        """Yield each operation once, when it is finished. For calls that a door answers early if there are many."""
        limit = self._core.config.limits.wait_names_max
        if not 1 <= len(request.names) <= limit:
            raise invalid(f"{len(request.names)} names to wait for: send 1 to {limit}")
        names = list(dict.fromkeys(request.names))
        for index, name in enumerate(names):
            if index % NAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._core.admission.owner(*_parse(name)) != principal.tenant_id:
                raise not_found("operation", name)
        num_missing = len(names)

        def read_finished(name: str) -> pb.Operation:
            return self._shown_operation(self._operation(principal, name))

        async for operation in self._core.in_flight.wait(names, read_finished):
            yield pb.WaitOperationsResponse(operation=operation)
            self._note_fetched(principal, operation)
            num_missing -= 1
        if num_missing:
            raise ServiceError(
                Code.UNAVAILABLE,
                "SHUTTING_DOWN",
                "the pool is shutting down; unfinished operations resume after its restart: wait again",
                retry_delay_s=1.0,
            )

    wait_operations = streamed(poll_operations)
    """As `poll_operations`, for a call that lasts until the last operation is finished."""

    async def queue_reason(self, principal: Principal, name: str) -> str:
        """Return why an operation waits longer than others, for its owner; empty: it does not."""
        return self._shown_operation(self._operation(principal, name)).queue_reason

    async def cancel_operation(
        self, principal: Principal, request: pb.CancelOperationRequest
    ) -> pb.CancelOperationResponse:
        """Cancel an operation that has not started, or a sample at any time."""
        operation = self._operation(principal, request.name)
        if operation.kind is Kind.SAMPLE:
            self._core.samples.cancel(operation.name)
        else:
            self._cancel_queued(operation)
        return pb.CancelOperationResponse(operation=self._shown_operation(self._operation(principal, request.name)))

    def _note_fetched(self, principal: Principal, operation: pb.Operation) -> None:
        """Let a finished operation's result be dropped soon, unless the caller's key may only read."""
        is_final = operation.state in (pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_STATE_FAILED)
        if is_final and principal.role is not Role.READ_ONLY:
            self._core.store.operations.note_fetched(operation.target_id, operation.seq)

    def _cancel_queued(self, operation: Operation) -> None:
        log = self._core.registry.get(operation.target_id)
        if log is None or not operation.is_undecided or log.has_begun(operation):
            return
        cancelled = f"{operation.name} was cancelled"
        log.fail(operation, pb.OperationError(code=Code.CANCELLED, reason="CANCELLED", message=cancelled))
        group = self._core.registry.group_of(log)
        group.mark_dirty(log)
        group.changed.notify()

    def _shown_operation(self, operation: Operation) -> pb.Operation:
        message = operation.as_message(is_running=self._is_running(operation))
        standing = self._core.probation.standing(operation.tenant_id)
        if standing is not None and message.state == pb.OPERATION_STATE_QUEUED:
            message.queue_reason = str(standing)
        return message

    def _operation(self, principal: Principal, name: str) -> Operation:
        operation = self._core.admission.find(*_parse(name))
        if operation is None or operation.is_dropped or operation.tenant_id != principal.tenant_id:
            raise not_found("operation", name)
        return operation


def _parse(name: str) -> tuple[str, int]:
    """Return target and sequence number of an operation's name; `("", 0)`, which no operation has, for other text."""
    target_id, _, seq = name.rpartition(":")
    is_canonical = seq.isascii() and seq.isdecimal() and seq[0] != "0" and len(seq) < 20 and int(seq) < 1 << 63
    return (target_id, int(seq)) if is_canonical else ("", 0)

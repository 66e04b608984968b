"""Operations of all kinds: get, wait, cancel. Does not depend on where they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext

from google.protobuf.message import Message

from coordinator.base.errors import Code, ServiceError, invalid, not_found, unavailable
from coordinator.limits.results import Room
from coordinator.operations.operation import Kind, Operation
from coordinator.service.access import UseCases, streamed
from coordinator.service.listings import LARGE_LISTS, PAGE_BYTES_MAX
from coordinator.tenants.principals import Principal, Role
from tinkerpool.names import parse_operation_name
from tinkerpool.v1 import operations_pb2 as pb

NAMES_AT_ONCE = 100
"""Names that are looked up before other callbacks of the event loop run: a finished one costs a read of the store."""


class OperationUseCases(UseCases):
    """OperationService."""

    async def get_operation(self, principal: Principal, request: pb.GetOperationRequest) -> pb.GetOperationResponse:
        """Return an operation as it is now."""
        operation = self._shown_operation(self._operation(principal, request.name))
        if operation.state in (pb.OPERATION_STATE_SUCCEEDED, pb.OPERATION_STATE_FAILED):
            self._note_fetched(principal, operation.name)
        return pb.GetOperationResponse(operation=operation)

    async def make_room(self, principal: Principal, request: Message, room: Room) -> None:
        """Take room for the stored result, or the page of a list, that a request asks for, if it asks for one.

        Raises ServiceError CALLS_BUSY, before a read of the store if too many calls of the tenant wait for room.
        """
        if isinstance(request, LARGE_LISTS):
            await room.take(PAGE_BYTES_MAX)
        if not isinstance(request, pb.GetOperationRequest | pb.CancelOperationRequest):
            return
        room.check()
        await room.take(self._core.admission.result_bytes(principal.tenant_id, *parse_operation_name(request.name)))

    @streamed
    async def wait_operations(
        self, principal: Principal, request: pb.WaitOperationsRequest
    ) -> AsyncGenerator[pb.WaitOperationsResponse, None]:
        """Yield each operation once, when it is finished."""
        names = await self._awaited(principal, request.names)
        num_missing = len(names)
        async for finished in self._core.in_flight.wait(names):
            name = _name(finished)
            with self._core.responses.room(principal.tenant_id) as room:
                if isinstance(finished, str):
                    await room.take(self._core.admission.result_bytes(principal.tenant_id, *parse_operation_name(name)))
                yield pb.WaitOperationsResponse(operation=self._of_finished(principal, finished))
            self._note_fetched(principal, name)
            num_missing -= 1
        if num_missing:
            raise _shutting_down()

    async def finished_operations(
        self, principal: Principal, names: Sequence[str], room: Room, *, is_poll: bool
    ) -> list[pb.Operation]:
        """Return these operations once all are finished, and `room`, which has taken nothing yet, holds their results.

        `is_poll`: the call is not one of its tenant's open calls, because its door answers early if there are many.
        Raises ServiceError CALLS_BUSY without room, and as `wait_operations` does.
        """
        with nullcontext() if is_poll else self._core.ceilings.streams.holding(principal.tenant_id):
            unique = await self._awaited(principal, names)
            found = {_name(each): each async for each in self._core.in_flight.wait(unique)}
        if len(found) < len(unique):
            raise _shutting_down()
        stored = [each for each in found.values() if isinstance(each, str)]
        await room.take(
            sum(self._core.admission.result_bytes(principal.tenant_id, *parse_operation_name(name)) for name in stored)
        )
        operations = [self._of_finished(principal, found[name]) for name in names]
        for name in unique:
            self._note_fetched(principal, name)
        return operations

    async def queue_reason(self, principal: Principal, name: str) -> str:
        """Return why an operation waits longer than others, for its owner; empty: it does not."""
        return self._shown_operation(self._operation(principal, name)).queue_reason

    async def cancel_operation(
        self, principal: Principal, request: pb.CancelOperationRequest
    ) -> pb.CancelOperationResponse:
        """Cancel an operation that has not started, or a sample at any time."""
        operation = self._operation(principal, request.name)
        if operation.kind is Kind.SAMPLE:
            self._core.samples.cancel(operation)
        else:
            self._cancel_queued(operation)
        return pb.CancelOperationResponse(operation=self._shown_operation(self._operation(principal, request.name)))

    def _note_fetched(self, principal: Principal, name: str) -> None:
        """Let a finished operation's result be dropped soon, unless the caller's key may only read."""
        if self._core.traces is not None:
            self._core.traces.deliver(name)
        if principal.role is not Role.READ_ONLY:
            self._core.store.operations.note_fetched(*parse_operation_name(name))

    async def _awaited(self, principal: Principal, names: Sequence[str]) -> list[str]:
        """Return the names of a wait without repetitions. Raises ServiceError, also for operations of others."""
        limit = self._core.config.limits.wait_names_max
        if not 1 <= len(names) <= limit:
            raise invalid(f"{len(names)} names to wait for: send 1 to {limit}")
        unique = list(dict.fromkeys(names))
        for index, name in enumerate(unique):
            if index % NAMES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if self._core.admission.owner(*parse_operation_name(name)) != principal.tenant_id:
                raise not_found("operation", name)
        return unique

    def _of_finished(self, principal: Principal, finished: pb.Operation | str) -> pb.Operation:
        """Return a finished operation, which the store has if there is only its name."""
        if isinstance(finished, str):
            return self._shown_operation(self._operation(principal, finished))
        return finished

    def _cancel_queued(self, operation: Operation) -> None:
        log = self._core.registry.get(operation.target_id)
        if log is None or not operation.is_undecided or log.copy.has_begun(operation):
            return
        cancelled = f"{operation.name} was cancelled"
        log.fail(operation, pb.OperationError(code=Code.CANCELLED, reason="CANCELLED", message=cancelled))
        self._core.registry.group_of(log).mark_dirty(log)

    def _shown_operation(self, operation: Operation) -> pb.Operation:
        message = operation.as_message(is_running=self._is_running(operation))
        standing = self._core.probation.standing(operation.tenant_id)
        if standing is not None and message.state == pb.OPERATION_STATE_QUEUED:
            message.queue_reason = str(standing)
        return message

    def _operation(self, principal: Principal, name: str) -> Operation:
        operation = self._core.admission.find(*parse_operation_name(name))
        if operation is None or operation.is_dropped or operation.tenant_id != principal.tenant_id:
            raise not_found("operation", name)
        return operation


def _name(finished: pb.Operation | str) -> str:
    return finished if isinstance(finished, str) else finished.name


def _shutting_down() -> ServiceError:
    return unavailable(
        "SHUTTING_DOWN", "the pool is shutting down; unfinished operations resume after its restart: wait again"
    )

"""Sequence numbers of one adapter on the client's side, and how far ahead of acknowledgements requests are sent.

Sequence numbers are reserved under a lock, so calls from several threads have one order: that in which they got the
lock.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tinkerpool.client.calls.connection import Connection
from tinkerpool.client.calls.futures import APIFuture
from tinkerpool.client.calls.methods import RequestT, ResponseT, Unary
from tinkerpool.client.calls.retry import is_retryable
from tinkerpool.errors import (
    AlreadyExists,
    ApiError,
    ConfigurationError,
    InternalError,
    OrderBroken,
    PermissionDenied,
    Unauthenticated,
    of_operation,
)
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2

T = TypeVar("T")

NOT_RECORDED = ("BASE_MODEL_NOT_SERVED",)
"""Reasons of refusals that the service does not record, and that may end while the client lives. POOL_RESTORED does not
end: no number of this client is accepted again, so no request waits behind a gap."""
WINDOW = 64
"""A request is sent only if its seq is less than this ahead of the first unacknowledged one."""


class SendWindow:
    """Holds requests back until they may be sent. Seqs count up from `first_seq` without a gap; each must `leave` once.

    The service accepts requests in any order, so they are pipelined. Without the window, a request that is refused for
    a full queue could find the queue full of later requests, which cannot run before it.
    """

    def __init__(self, first_seq: int, size: int = WINDOW) -> None:
        self._lowest = first_seq
        self._size = size
        self._left: set[int] = set()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def enter(self, seq: int) -> None:
        """Wait until the request of `seq` may be sent."""
        if seq < self._lowest + self._size:
            return
        may_enter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (seq, may_enter))
        await may_enter

    def leave(self, seq: int, num_seqs: int = 1) -> None:
        """Record that the request of `num_seqs` seqs from `seq` on was acknowledged, or never will be."""
        self._left.update(range(seq, seq + num_seqs))
        while self._lowest in self._left:
            self._left.remove(self._lowest)
            self._lowest += 1
        while self._waiting and self._waiting[0][0] < self._lowest + self._size:
            _, may_enter = heapq.heappop(self._waiting)
            if not may_enter.done():
                may_enter.set_result(None)


class AdapterSequence:
    """Assigns the sequence numbers of one adapter and sends its requests. Users' threads call only `reserve`.

    A refusal that leaves a gap, or shows that another client writes to the adapter, breaks the sequence: later requests
    would wait behind the gap, or mix with the other client's steps.
    """

    def __init__(self, connection: Connection, adapter_id: str, next_seq: int) -> None:
        self._connection = connection
        self._adapter_id = adapter_id
        self._broken_by: ApiError | ConfigurationError | None = None
        self._lock = threading.Lock()
        self._next_seq = next_seq
        self._window = SendWindow(next_seq)

    def reserve(self, num_seqs: int, make: Callable[[int], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Reserve the next `num_seqs` seqs, and start the coroutine that `make` returns for the first of them."""
        with self._lock:
            future = self._connection.start(
                make(self._next_seq),
                label=operation_name(self._adapter_id, self._next_seq),
                operation=operation_name(self._adapter_id, self._next_seq + num_seqs - 1),
            )
            self._next_seq += num_seqs  # not before the start, which may raise
        return future

    @property
    def state(self) -> str:
        """What this client can do now, for people."""
        if self._connection.is_closed:
            return "closed"
        return f"next seq {self._next_seq}" if self._broken_by is None else "broken: use get_training_client"

    async def send(
        self, method: Unary[RequestT, ResponseT], request: RequestT, seq: int, *, num_seqs: int = 1
    ) -> ResponseT:
        """Send one request with its seq until the service has accepted it. Raises ApiError, OrderBroken."""
        request.seq = seq  # type: ignore[attr-defined]  # every request of an adapter has this field
        try:
            await self._window.enter(seq)
            if self._broken_by is not None:
                raise OrderBroken(
                    f"an earlier request was refused without using its sequence number, so operation {seq} cannot run; "
                    f"continue with ServiceClient.get_training_client. The refusal was "
                    f"{type(self._broken_by).__name__}: {self._broken_by}"
                )
            return await self._connection.call(method, request)
        except (ApiError, ConfigurationError) as error:
            if isinstance(error, ConfigurationError) or _leaves_a_gap(error):
                self._broken_by = self._broken_by or error
                raise
            raise of_operation(error, operation_name(self._adapter_id, seq)) from None
        finally:
            self._window.leave(seq, num_seqs)

    async def outcome(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """Wait until an accepted operation has succeeded, and return it. Raises OperationFailed if it failed."""
        return await self._connection.outcome(operation)

    async def run(self, method: Unary[RequestT, ResponseT], request: RequestT, seq: int) -> operations_pb2.Operation:
        """Send one request and wait until its operation has succeeded. Raises ApiError, OperationFailed."""
        response = await self.send(method, request, seq)
        return await self.outcome(response.operation)  # type: ignore[attr-defined]  # every such response has it


def _leaves_a_gap(error: ApiError) -> bool:
    """Return whether the refused seq stays unused, or belongs to another client. Other refusals are recorded there."""
    is_foreign, was_given_up = "expected_seq" in error.metadata, is_retryable(error)
    is_unrecorded = not error.reason or error.reason in NOT_RECORDED  # without a reason it is not the service's
    return (
        is_foreign
        or was_given_up
        or is_unrecorded
        or isinstance(error, AlreadyExists | InternalError | PermissionDenied | Unauthenticated)
    )

"""An adapter's order on the client's side: who gets which place, and how far ahead of the service requests are sent.

Places are taken under a lock, so calls from several threads have one order, the one in which they got the lock.
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
from tinkerpool.errors import AlreadyExists, ApiError, InternalError, OrderBroken, PermissionDenied, Unauthenticated
from tinkerpool.v1 import operations_pb2

T = TypeVar("T")

WINDOW = 64
"""A request is sent only if its seq is less than this ahead of the first one that is not acknowledged."""


class SendWindow:
    """Tells requests when to go. Seqs count up from `first_seq` without a gap; every one must `leave` once.

    The service takes requests in any order, so they are pipelined; the window keeps that live. Were everything sent at
    once, a request that is refused for a full queue could find the queue full of later ones, which in turn wait for it.
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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (seq, turn))
        await turn

    def leave(self, seq: int, num_seqs: int = 1) -> None:
        """The request that took `num_seqs` from `seq` on was acknowledged, or will never be."""
        self._left.update(range(seq, seq + num_seqs))
        while self._lowest in self._left:
            self._left.remove(self._lowest)
            self._lowest += 1
        while self._waiting and self._waiting[0][0] < self._lowest + self._size:
            _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)


class AdapterOrder:
    """Gives out places and sends what takes them. Only `take` is called from the user's threads.

    A refusal that leaves the place open, or shows that another client writes to the adapter, ends it: what came later
    would wait for that place, or be mixed with the other's steps.
    """

    def __init__(self, connection: Connection, next_seq: int) -> None:
        self._connection = connection
        self._broken_by: ApiError | None = None
        self._lock = threading.Lock()
        self._next_seq = next_seq
        self._window = SendWindow(next_seq)

    def take(self, num_seqs: int, make: Callable[[int], Coroutine[Any, Any, T]]) -> APIFuture[T]:
        """Take the next `num_seqs` places and start the coroutine that `make` makes of the first one."""
        with self._lock:
            future = self._connection.start(make(self._next_seq))
            self._next_seq += num_seqs  # not before the start, which may raise
        return future

    async def send(
        self, method: Unary[RequestT, ResponseT], request: RequestT, seq: int, *, num_seqs: int = 1
    ) -> ResponseT:
        """Send one request at its place until the service has taken it. Raises ApiError for a refusal, OrderBroken."""
        request.seq = seq  # type: ignore[attr-defined]  # every request with a place has it
        try:
            await self._window.enter(seq)
            if self._broken_by is not None:
                raise OrderBroken(
                    f"an earlier request was refused and took no place, so that this one, {seq}, cannot follow it; go "
                    f"on with ServiceClient.get_training_client. The refusal was: {self._broken_by}"
                )
            return await self._connection.call(method, request)
        except ApiError as error:
            if _leaves_a_gap(error) and self._broken_by is None:
                self._broken_by = error
            raise
        finally:
            self._window.leave(seq, num_seqs)

    async def outcome(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """An accepted operation when it has succeeded. Raises OperationFailed when it has failed."""
        return await self._connection.outcome(operation)

    async def run(self, method: Unary[RequestT, ResponseT], request: RequestT, seq: int) -> operations_pb2.Operation:
        """Send one request and wait until its operation has succeeded. Raises ApiError, OperationFailed."""
        response = await self.send(method, request, seq)
        return await self.outcome(response.operation)  # type: ignore[attr-defined]  # every such response has it


def _leaves_a_gap(error: ApiError) -> bool:
    """Whether the refused place stays open, or belongs to another client. Other refusals are recorded as failed."""
    is_foreign = "expected_seq" in error.metadata
    return is_foreign or isinstance(error, AlreadyExists | InternalError | PermissionDenied | Unauthenticated)

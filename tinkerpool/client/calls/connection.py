"""The calls of one ServiceClient: transport, retries, the waiter and the background loop.

Does not depend on sessions, adapters or samplers. Its coroutines run on the background loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from tinkerpool.client.calls import futures, methods
from tinkerpool.client.calls.background import shared_loop
from tinkerpool.client.calls.encoding import check_succeeded, is_finished
from tinkerpool.client.calls.futures import APIFuture, BackgroundStream
from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from tinkerpool.client.calls.retry import Backoff, Retries
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport, Transport
from tinkerpool.client.calls.waiter import Waiter
from tinkerpool.errors import ApiError, ClientClosed
from tinkerpool.v1 import operations_pb2

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Deadline of one attempt at a call; after it the call is tried again."""


class Connection:
    """Calls that survive a restart of the service."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._background = shared_loop()
        self._retries = Retries()
        self._waiter = Waiter(self._open_wait, self._retries)
        self._is_closed = False

    @property
    def endpoint(self) -> Endpoint:
        """Address and key of the calls. Raises TypeError for any transport but gRPC."""
        if not isinstance(self._transport, GrpcTransport):
            raise TypeError("a client with a transport of its own cannot be copied to another process")
        return self._transport.endpoint

    def start(self, work: Coroutine[Any, Any, T], *, is_cancellable: bool = False) -> APIFuture[T]:
        """Start a coroutine on the background loop; coroutines begin in the order of these calls."""
        return futures.start(self._background, work, is_cancellable=is_cancellable)

    def stream_of(self, open_stream: Callable[[], AsyncGenerator[T, None]]) -> BackgroundStream[T]:
        """Return a stream that is read on the background loop."""
        return BackgroundStream(self._background, open_stream)

    async def call(
        self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> ResponseT:
        """Call until the service replies. Raises ApiError for a refusal that no retry mends, and ClientClosed."""
        backoff = self.start_retries()
        while True:
            self._check_open()
            try:
                response = await self._transport.call(method, request, timeout_s=timeout_s)
            except ApiError as error:
                await self.pause(backoff, error)
            else:
                self._retries.note_reply()
                return response

    async def call_once(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """Make one attempt, for calls that are repeated anyway or must not block. Raises ApiError."""
        self._check_open()
        return await self._transport.call(method, request, timeout_s=timeout_s)

    async def stream(
        self, method: ServerStream[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """Yield the responses of one attempt at a stream. Raises ApiError."""
        self._check_open()
        async with aclosing(self._transport.stream(method, request)) as responses:
            async for response in responses:
                self._retries.note_reply()
                yield response

    async def outcome(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """Wait until an accepted operation has succeeded, and return it. Raises OperationFailed if it failed."""
        if not is_finished(operation):
            operation = await self._waiter.wait(operation.name)
        return check_succeeded(operation)

    def start_retries(self) -> Backoff:
        """Return the delays of a new call, for `pause`."""
        return self._retries.start()

    async def pause(self, backoff: Backoff, error: ApiError) -> None:
        """Wait before the next attempt. Raises `error` if the call is not to be repeated, or ClientClosed."""
        self._check_open()
        await self._retries.pause(backoff, error)

    async def close(self) -> None:
        """End all waits and calls. Idempotent."""
        self._is_closed = True
        await self._waiter.close()
        await self._transport.close()

    def _open_wait(
        self, request: operations_pb2.WaitOperationsRequest
    ) -> AsyncGenerator[operations_pb2.WaitOperationsResponse, None]:
        return self.stream(methods.WAIT_OPERATIONS, request)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("the client was closed")

"""What all clients of one ServiceClient share: the transport, retries, the waiter and the background loop.

Knows nothing of sessions, adapters or samplers. Its coroutines run on the background loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from tinkerpool.client.calls import futures, methods
from tinkerpool.client.calls.background import BackgroundLoop, shared_loop
from tinkerpool.client.calls.encoding import check_succeeded, is_finished
from tinkerpool.client.calls.futures import APIFuture, BackgroundStream
from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from tinkerpool.client.calls.retry import Backoff, RetryPolicy
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport, Transport
from tinkerpool.client.calls.waiter import Waiter
from tinkerpool.errors import ApiError, ClientClosed
from tinkerpool.v1 import operations_pb2

T = TypeVar("T")
_log = logging.getLogger("tinkerpool")

CALL_TIMEOUT_S = 60.0
"""Deadline of one attempt at a call; then it is tried again."""
COMPLAIN_AFTER_S = 10.0
"""A call that was retried this long says so in the log, and again each time as long."""


class Connection:
    """Calls that survive a restart of the service."""

    def __init__(
        self,
        transport: Transport,
        *,
        policy: RetryPolicy | None = None,
        background: BackgroundLoop | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._transport = transport
        self._policy = policy or RetryPolicy()
        self._background = background or shared_loop()
        self._sleep = sleep
        self._clock = clock
        self._rng = rng or random.Random()
        self._waiter = Waiter(self._open_wait, self.make_backoff, self.pause)
        self._has_connected = False
        self._is_closed = False
        self._complaint_time = -COMPLAIN_AFTER_S

    @property
    def endpoint(self) -> Endpoint:
        """Where the calls go. Raises TypeError if they go through another transport than gRPC."""
        if not isinstance(self._transport, GrpcTransport):
            raise TypeError("a client with a transport of its own cannot be copied to another process")
        return self._transport.endpoint

    def start(self, work: Coroutine[Any, Any, T], *, is_cancellable: bool = False) -> APIFuture[T]:
        """Start a coroutine on the background loop; those started one after another begin in that order."""
        return futures.start(self._background, work, is_cancellable=is_cancellable)

    def stream_of(self, open_stream: Callable[[], AsyncGenerator[T, None]]) -> BackgroundStream[T]:
        """A stream that is read on the background loop."""
        return BackgroundStream(self._background, open_stream)

    async def call(
        self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> ResponseT:
        """Call until it is answered. Raises ApiError for a refusal that waiting does not mend, and ClientClosed."""
        backoff = self.make_backoff()
        while True:
            self._check_open()
            try:
                response = await self._transport.call(method, request, timeout_s=timeout_s)
            except ApiError as error:
                await self.pause(backoff, error)
            else:
                self._has_connected = True
                return response

    async def call_once(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        """One attempt, for what is repeated anyway or must not hold anybody up. Raises ApiError."""
        self._check_open()
        return await self._transport.call(method, request, timeout_s=timeout_s)

    async def stream(
        self, method: ServerStream[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        """The responses of one attempt at a stream. Raises ApiError."""
        self._check_open()
        async with aclosing(self._transport.stream(method, request)) as responses:
            async for response in responses:
                self._has_connected = True
                yield response

    async def outcome(self, operation: operations_pb2.Operation) -> operations_pb2.Operation:
        """An accepted operation when it has succeeded. Raises OperationFailed when it has failed."""
        if not is_finished(operation):
            operation = await self._waiter.wait(operation.name)
        return check_succeeded(operation)

    async def close(self) -> None:
        """Give up everything that still waits. Idempotent."""
        self._is_closed = True
        await self._waiter.close()
        await self._transport.close()

    async def pause(self, backoff: Backoff, error: ApiError) -> None:
        """Wait before the next attempt. Raises `error` if there shall be none, or ClientClosed."""
        self._check_open()
        self._has_connected = self._has_connected or bool(error.reason)
        delay_s = backoff.next_delay_s(error, has_connected=self._has_connected)
        if backoff.elapsed_s > COMPLAIN_AFTER_S and self._clock() - self._complaint_time > COMPLAIN_AFTER_S:
            self._complaint_time = self._clock()
            _log.warning("no answer for %.0f s, still trying: %s", backoff.elapsed_s, error)
        await self._sleep(delay_s)

    def make_backoff(self) -> Backoff:
        """The delays of one call."""
        return Backoff(self._policy, clock=self._clock, rng=self._rng)

    def _open_wait(
        self, request: operations_pb2.WaitOperationsRequest
    ) -> AsyncGenerator[operations_pb2.WaitOperationsResponse, None]:
        return self.stream(methods.WAIT_OPERATIONS, request)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClientClosed("the client was closed")

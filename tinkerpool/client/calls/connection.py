"""The calls of one ServiceClient, which survive a restart of the service: retried calls, streams, waits for outcomes.

Does not depend on sessions, adapters or samplers. Its coroutines run on the background loop. Any number of operations
is waited for over a few streams, without polling and without a thread per operation. Invariant: every pending name is
in `Waiter._new` or in exactly one stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from tinkerpool.client.calls import futures, methods
from tinkerpool.client.calls.encoding import check_succeeded, is_finished
from tinkerpool.client.calls.futures import APIFuture, BackgroundLoop, BackgroundStream, shared_loop
from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from tinkerpool.client.calls.retry import Backoff, Retries, RetryPolicy
from tinkerpool.client.calls.transport import Endpoint, GrpcTransport, Transport
from tinkerpool.errors import ApiError, ClientClosed, Code, NotFound, TinkerpoolError, api_error
from tinkerpool.history import progress_of
from tinkerpool.v1 import history_pb2
from tinkerpool.v1.operations_pb2 import Operation, WaitOperationsRequest, WaitOperationsResponse

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
"""Deadline of one attempt at a call; after it the call is tried again."""
STREAMS_MAX = 64
"""Streams at a time; beyond this, they are merged."""
MERGE_DELAY_S = 0.005
"""How long new names are collected while the limit of streams is reached, in seconds."""
NAMES_MAX = 5_000
"""Names in one stream; the service takes 10,000."""

OpenStream = Callable[[WaitOperationsRequest], AsyncGenerator[WaitOperationsResponse, None]]


@dataclass(eq=False, slots=True)
class _Stream:
    names: set[str]
    """Names that it has not delivered yet."""
    task: asyncio.Task[None] | None = None


class Waiter:
    """Delivers finished operations. All methods run on one loop.

    Names that become pending in the same turn of the loop are sent together. When many streams are open, the stream
    with the fewest names left is replaced by one that also has the new names. A broken stream is opened again with its
    undelivered names.
    """

    def __init__(self, open_stream: OpenStream, retries: Retries) -> None:
        """`open_stream` makes one attempt at a stream."""
        self._open_stream = open_stream
        self._retries = retries
        self._pending: dict[str, asyncio.Future[Operation]] = {}
        self._new: list[str] = []
        self._streams: set[_Stream] = set()
        self._flush_handle: asyncio.Handle | None = None
        self._is_closed = False

    async def wait(self, name: str) -> Operation:
        """Wait until the operation has SUCCEEDED or FAILED, and return it.

        Raises ApiError for an unknown name, ClientClosed once the waiter is closed.
        """
        if self._is_closed:
            raise _client_closed()
        future = self._pending.get(name)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._pending[name] = loop.create_future()
            self._new.append(name)
            if self._flush_handle is None:
                if len(self._streams) < STREAMS_MAX:
                    self._flush_handle = loop.call_soon(self._flush)
                else:
                    self._flush_handle = loop.call_later(MERGE_DELAY_S, self._flush)
        return await asyncio.shield(future)  # a cancelled wait must not cancel the others

    async def close(self) -> None:
        """End every wait with ClientClosed, and refuse later ones."""
        self._is_closed = True
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        tasks = [stream.task for stream in self._streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(list(self._pending), _client_closed())

    def _flush(self) -> None:
        self._flush_handle = None
        names, self._new = self._new, []
        if len(self._streams) >= STREAMS_MAX:
            smallest = min(self._streams, key=lambda stream: len(stream.names))
            names.extend(smallest.names)
            self._drop(smallest)
        for i in range(0, len(names), NAMES_MAX):
            self._open(names[i : i + NAMES_MAX])

    def _open(self, names: Iterable[str]) -> None:
        stream = _Stream(set(names))
        stream.task = asyncio.get_running_loop().create_task(self._follow(stream))
        self._streams.add(stream)

    def _drop(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        if stream.task is not None:
            stream.task.cancel()

    async def _follow(self, stream: _Stream) -> None:
        """Read one stream, reopened after errors, until every name is delivered."""
        backoff = self._retries.start()
        try:
            while stream.names:
                try:
                    await self._read(stream, backoff)
                except NotFound as error:
                    if len(stream.names) == 1:
                        self._fail(stream.names, error)
                    else:
                        self._halve(stream)
                    return
                except ApiError as error:
                    await self._retries.pause(backoff, error)
        except TinkerpoolError as error:
            self._fail(stream.names, error)
        finally:
            self._streams.discard(stream)

    async def _read(self, stream: _Stream, backoff: Backoff) -> None:
        request = WaitOperationsRequest(names=sorted(stream.names))
        async with aclosing(self._open_stream(request)) as responses:
            async for response in responses:
                backoff.reset()
                self._deliver(response.operation, stream)
        if stream.names:
            raise api_error(Code.UNAVAILABLE, "the service ended the stream early")

    def _deliver(self, operation: Operation, stream: _Stream) -> None:
        stream.names.discard(operation.name)
        future = self._pending.pop(operation.name, None)
        if future is not None and not future.done():
            future.set_result(operation)

    def _halve(self, stream: _Stream) -> None:
        """Open two streams with half of the names each: one name is unknown, and then the service streams nothing."""
        names = sorted(stream.names)
        self._open(names[: len(names) // 2])
        self._open(names[len(names) // 2 :])

    def _fail(self, names: Iterable[str], error: Exception) -> None:
        for name in list(names):
            future = self._pending.pop(name, None)
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # marks the error as seen: every wait may have been cancelled


class Connection:
    """Calls that survive a restart of the service. The transport is closed by `close`, or when this is dropped."""

    def __init__(self, transport: Transport, policy: RetryPolicy | None = None) -> None:
        self._transport = transport
        self._background = shared_loop()
        self._retries = Retries(policy)
        self._waiter = Waiter(self._open_wait, self._retries)
        self._is_closed = False
        self._close_if_dropped = weakref.finalize(self, _start_closing, self._background, transport)
        self._close_if_dropped.atexit = False

    @property
    def endpoint(self) -> Endpoint:
        """Address and key of the calls. Raises TypeError for any transport but gRPC."""
        if not isinstance(self._transport, GrpcTransport):
            raise TypeError("a client with a transport of its own cannot be copied to another process")
        return self._transport.endpoint

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed."""
        return self._is_closed

    @property
    def address(self) -> str:
        """The pool's address, for people."""
        return (
            self._transport.endpoint.base_url
            if isinstance(self._transport, GrpcTransport)
            else "a transport of its own"
        )

    def start(
        self, work: Coroutine[Any, Any, T], *, is_cancellable: bool = False, label: str = "", operation: str = ""
    ) -> APIFuture[T]:
        """Start a coroutine on the background loop; coroutines begin in the order of these calls.

        `operation`: the name of the last operation that it waits for, whose progress the future can show.
        """
        describe = functools.partial(self._describe, operation) if operation else None
        return futures.start(self._background, work, is_cancellable=is_cancellable, label=label, describe=describe)

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

    async def outcome(self, operation: Operation) -> Operation:
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
        self._close_if_dropped.detach()
        await self._waiter.close()
        await self._transport.close()

    async def _describe(self, operation: str) -> str:
        """Return where an unfinished operation is; empty if it is finished, or not known. Raises TinkerpoolError."""
        request = history_pb2.GetHistoryEntryRequest(name=operation)
        try:
            response = await self.call_once(methods.GET_HISTORY_ENTRY, request, timeout_s=CALL_TIMEOUT_S)
        except NotFound:
            return f"{operation} has not arrived"
        return progress_of(response.entry)

    def _open_wait(self, request: WaitOperationsRequest) -> AsyncGenerator[WaitOperationsResponse, None]:
        return self.stream(methods.WAIT_OPERATIONS, request)

    def _check_open(self) -> None:
        if self._is_closed:
            raise _client_closed()


def _start_closing(background: BackgroundLoop, transport: Transport) -> None:
    """Close a transport; for the garbage collector, which runs on any thread and must not wait."""
    with contextlib.suppress(ClientClosed):
        background.submit(transport.close())


def _client_closed() -> ClientClosed:
    return ClientClosed("the client was closed")

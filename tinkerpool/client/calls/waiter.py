"""Waits for any number of operations over a few streams. No polling, no thread per operation.

Names that become pending in the same turn of the loop are sent together. When many streams are open, the stream with
the fewest names left is replaced by one that also has the new names. A broken stream is opened again with its
undelivered names. Invariant: every pending name is in `_new` or in exactly one stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from tinkerpool.client.calls.retry import Backoff, Retries
from tinkerpool.errors import ApiError, ClientClosed, Code, NotFound, TinkerpoolError, api_error
from tinkerpool.v1.operations_pb2 import Operation, WaitOperationsRequest, WaitOperationsResponse

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
    """Delivers finished operations. All methods run on one loop."""

    def __init__(self, open_stream: OpenStream, retries: Retries) -> None:
        """`open_stream` makes one attempt at a stream."""
        self._open_stream = open_stream
        self._retries = retries
        self._pending: dict[str, asyncio.Future[Operation]] = {}
        self._new: list[str] = []
        self._streams: set[_Stream] = set()
        self._flush_handle: asyncio.Handle | None = None

    async def wait(self, name: str) -> Operation:
        """Wait until the operation has SUCCEEDED or FAILED, and return it. Raises ApiError for an unknown name."""
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
        """End every wait with ClientClosed."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
        tasks = [stream.task for stream in self._streams if stream.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(list(self._pending), ClientClosed("the client was closed"))

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

"""Futures and streams that both threads and coroutines can wait for.

future = client.forward_backward(data, "cross_entropy")        # returns at once
output = future.result()                                       # a thread waits
output = await future                                          # a coroutine waits, on any loop
future = await client.forward_backward_async(data, ...)        # the SDK's double await:
output = await future                                          # sent, then finished
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import Any, Generic, Self, TypeVar

from tinkerpool.client.calls.background import BackgroundLoop

T = TypeVar("T")
R = TypeVar("R")


class APIFuture(Awaitable[T], Generic[T]):
    """A result that the background loop computes. Waiting again returns the same result."""

    def __init__(
        self, background: BackgroundLoop, future: concurrent.futures.Future[T], *, is_cancellable: bool = False
    ) -> None:
        self._background = background
        self._future = future
        self._is_cancellable = is_cancellable

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, at most `timeout` seconds; None: without limit.

        Raises TimeoutError (the work continues; wait again), any error of the work itself, or RuntimeError on the
        background loop's thread, where the wait would never end.
        """
        if self._background.is_current_thread and not self._future.done():
            raise RuntimeError(
                "result() was called on the client's own thread, which has to do the work: call it from another "
                "thread, or `await` the future"
            )
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109  # the SDK's name
        """Await the result, at most `timeout` seconds; None: without limit. Works on any asyncio loop.

        Raises TimeoutError, or any error of the work itself. Cancelling the wait for a sample cancels the sample;
        training continues, because it has its sequence number in the adapter's log.
        """
        waiter = asyncio.wrap_future(self._future)
        if not self._is_cancellable:
            waiter.add_done_callback(_retrieve)
            waiter = asyncio.shield(waiter)
        return await asyncio.wait_for(waiter, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """Return a standard library future of the result. Its callbacks run on the client's thread: keep them short."""
        return self._future

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._future.done()

    def cancel(self) -> bool:
        """Cancel the work and the wait for it. Returns False, without effect, for training and for finished work."""
        return self._is_cancellable and self._future.cancel()


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def start(background: BackgroundLoop, work: Coroutine[Any, Any, T], *, is_cancellable: bool = False) -> APIFuture[T]:
    """Start a coroutine on the background loop; returns at once."""
    return APIFuture(background, background.submit(work), is_cancellable=is_cancellable)


class Ready:
    """A client that is also a future of itself, as in newer versions of the SDK: `.result()` and `await` return it."""

    def result(self, timeout: float | None = None) -> Self:
        """Return this client."""
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield


class BackgroundStream(Generic[T]):
    """A stream that is read on the background loop, by `for` or `async for`, once.

    As a context manager it is closed at the end of the block.
    """

    def __init__(self, background: BackgroundLoop, open_stream: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._background = background
        self._open_stream = open_stream
        self._items: AsyncGenerator[T, None] | None = None
        self._is_closed = False
        self._reading: asyncio.Task[Any] | None = None
        """The task that reads the next item."""

    def close(self) -> None:
        """Stop reading, and cancel the call at the service. Idempotent."""
        start(self._background, self._close()).result()

    async def aclose(self) -> None:
        """`close`, awaited."""
        await start(self._background, self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _next(self) -> T | _End:
        if self._is_closed:
            return _END
        if self._items is None:
            self._items = self._open_stream()
        self._reading = asyncio.current_task()
        try:
            return await anext(self._items, _END)
        except asyncio.CancelledError:
            if self._is_closed:
                return _END
            raise
        finally:
            self._reading = None

    async def _close(self) -> None:
        self._is_closed = True
        if self._reading is not None:
            self._reading.cancel()  # ends the stream; its reader gets the end
        elif self._items is not None:
            await self._items.aclose()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        item = start(self._background, self._next()).result()
        if isinstance(item, _End):
            raise StopIteration
        return item

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        item = await start(self._background, self._next(), is_cancellable=True)
        if isinstance(item, _End):
            raise StopAsyncIteration
        return item


class _End:
    """Marks the end of a stream, because a future cannot hold StopIteration."""


_END = _End()

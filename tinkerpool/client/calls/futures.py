"""Results that come later, for threads and for coroutines alike.

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
    """A result that the client's background loop works on. Waiting again gives the same result."""

    def __init__(
        self, background: BackgroundLoop, future: concurrent.futures.Future[T], *, is_cancellable: bool = False
    ) -> None:
        self._background = background
        self._future = future
        self._is_cancellable = is_cancellable

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, at most `timeout` seconds; None waits for ever.

        Raises TimeoutError (the work goes on, wait again), what the work itself raised, or RuntimeError where waiting
        would wait for ever.
        """
        if self._background.is_current_thread and not self._future.done():
            raise RuntimeError(
                "result() was called on the client's own thread, which would have to do the work meanwhile: "
                "call it from a thread of yours, or `await` the future"
            )
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109  # the SDK's name
        """Await the result, at most `timeout` seconds; None waits for ever. Works on any asyncio loop.

        Raises TimeoutError, or what the work itself raised. Cancelling the wait of a sample cancels the sample;
        training goes on, because its place in the adapter's order is taken.
        """
        waiter = asyncio.wrap_future(self._future)
        if not self._is_cancellable:
            waiter.add_done_callback(_retrieve)
            waiter = asyncio.shield(waiter)
        return await asyncio.wait_for(waiter, timeout)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """The same result as a standard library future. Its callbacks run on the client's thread: keep them short."""
        return self._future

    def done(self) -> bool:
        """Whether the result is there."""
        return self._future.done()

    def cancel(self) -> bool:
        """Ask for the work to end, and stop waiting for it. False, without effect, for training and what is done."""
        return self._is_cancellable and self._future.cancel()


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def start(background: BackgroundLoop, work: Coroutine[Any, Any, T], *, is_cancellable: bool = False) -> APIFuture[T]:
    """Start a coroutine on the background loop; returns at once."""
    return APIFuture(background, background.submit(work), is_cancellable=is_cancellable)


class Ready:
    """For clients, which the SDK's newer versions return as futures: `.result()` and `await` give the client itself."""

    def result(self, timeout: float | None = None) -> Self:
        """This client."""
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield


class BackgroundStream(Generic[T]):
    """A stream that is read on the background loop, for `for` and `async for` alike. Can be read once.

    As a context manager it is closed at the end of the block.
    """

    def __init__(self, background: BackgroundLoop, open_stream: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._background = background
        self._open_stream = open_stream
        self._items: AsyncGenerator[T, None] | None = None
        self._is_closed = False
        self._reading: asyncio.Task[Any] | None = None
        """Who waits for the next item."""

    def close(self) -> None:
        """Read no more, and let the service know that nobody does. Idempotent."""
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
            self._reading.cancel()  # which ends the stream; whoever waits has its end
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
    """What comes after the last item: StopIteration cannot travel through a future."""


_END = _End()

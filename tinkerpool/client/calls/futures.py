"""Futures and streams that both threads and coroutines can wait for, and the background loop that computes them.

future = client.forward_backward(data, "cross_entropy")        # returns at once
output = future.result()                                       # a thread waits
output = await future                                          # a coroutine waits, on any loop
future = await client.forward_backward_async(data, ...)        # the SDK's double await:
output = await future                                          # sent, then finished

All clients of a process share one daemon thread with one asyncio loop. The user's code never runs there, so it cannot
stall heartbeats, and the user may block on a future from any thread or loop. Neither the thread nor gRPC survives a
fork: a client belongs to the process that created it.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from tinkerpool.errors import ClientClosed, TinkerpoolError

P = ParamSpec("P")
ClientT = TypeVar("ClientT")
T = TypeVar("T")
Describe = Callable[[], Coroutine[Any, Any, str]]
FORKED = (
    "this process was forked from one that had a client of a pool, and gRPC does not survive a fork: start it with "
    "multiprocessing's method spawn or forkserver (multiprocessing.get_context('spawn'))"
)
PROGRESS_S = 1.0
"""Between two questions for the progress of an operation."""


class BackgroundLoop:
    """An asyncio loop on a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="tinkerpool-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is on the loop's own thread, where blocking would never end."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop; coroutines start in the order of these calls. Raises ClientClosed."""
        is_forked = os.getpid() != self._pid
        if is_forked or self.loop.is_closed():
            work.close()
            raise ClientClosed(FORKED if is_forked else "the client was closed, because this process ends")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        """Cancel all tasks, then end the thread. Idempotent."""
        if os.getpid() != self._pid or self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        self._thread.join(timeout=2.0)

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.wait([asyncio.ensure_future(asyncio.gather(*tasks, return_exceptions=True))], timeout=1.0)
        self.loop.stop()


_lock = threading.Lock()
_shared: BackgroundLoop | None = None
_shared_pid = 0


def shared_loop() -> BackgroundLoop:
    """Return the loop of this process; the first call starts it."""
    global _shared, _shared_pid  # one per process, on purpose
    with _lock:
        if _shared is None or _shared_pid != os.getpid():
            _shared, _shared_pid = BackgroundLoop(), os.getpid()
            atexit.register(_shared.stop)
        return _shared


class APIFuture(Awaitable[T], Generic[T]):
    """A result that the background loop computes. Waiting again returns the same result."""

    def __init__(
        self,
        background: BackgroundLoop,
        future: concurrent.futures.Future[T],
        *,
        is_cancellable: bool = False,
        label: str = "",
        describe: Describe | None = None,
    ) -> None:
        self._describe = describe
        self._background = background
        self._future = future
        self._is_cancellable = is_cancellable
        self._label = label

    def __repr__(self) -> str:
        return f"<APIFuture{self._label and ' of '}{self._label}: {self._state()}>"

    def _state(self) -> str:
        if not self._future.done():
            return "running"
        if self._future.cancelled():
            return "cancelled"
        error = self._future.exception()
        return "done" if error is None else f"failed, {type(error).__name__}: {error}"

    def result(self, timeout: float | None = None, *, progress: bool | Callable[[str], None] = False) -> T:
        """Wait for the result, at most `timeout` seconds; None: without limit.

        progress: print to stderr what the operation waits for, how many come before it and about how long it takes,
        when that changes; or a function that gets these lines. Not in the SDK.

        Raises TimeoutError (the work continues; wait again), any error of the work itself, or RuntimeError on the
        background loop's thread, where the wait would never end.
        """
        if self._background.is_current_thread and not self._future.done():
            raise RuntimeError(
                "result() was called on the client's own thread, which has to do the work: call it from another "
                "thread, or `await` the future"
            )
        try:
            if not progress or self._describe is None:
                return self._future.result(timeout)
            return self._result_with_progress(self._describe, timeout, _print if progress is True else progress)
        except TimeoutError:
            if self._future.done():  # the error is the work's own, or the result has come just now
                return self._future.result()
            raise self._running_after(timeout) from None

    def _result_with_progress(self, describe: Describe, timeout: float | None, show: Callable[[str], None]) -> T:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        shown = ""
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._future.result(max(0.0, min(PROGRESS_S, left_s)))
            except TimeoutError:
                if self._future.done() or left_s <= 0:
                    raise
            with contextlib.suppress(TinkerpoolError):  # the wait goes on, whatever becomes of this call
                text = self._background.submit(describe()).result()
                if text and text != shown:
                    show(text)
                shown = text

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109  # the SDK's name
        """Await the result, at most `timeout` seconds; None: without limit. Works on any asyncio loop.

        Raises TimeoutError, or any error of the work itself. A timeout of the wait for a sample, and its cancellation,
        cancel the sample, as in the SDK; after `result(timeout)` it continues. Training continues, because it has its
        sequence number in the adapter's log.
        """
        waiter = asyncio.wrap_future(self._future)
        if self._is_cancellable:
            return await asyncio.wait_for(waiter, timeout)
        waiter.add_done_callback(_retrieve)
        try:
            return await asyncio.wait_for(asyncio.shield(waiter), timeout)
        except TimeoutError:
            if self._future.done():
                return self._future.result()
            raise self._running_after(timeout) from None

    def _running_after(self, timeout_s: float | None) -> TimeoutError:
        what = self._label or "the operation"
        return TimeoutError(f"{what} still runs after {timeout_s} s: call result() again to go on waiting for it")

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

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            hint = "" if name.startswith("_") else ": call .result(), or await this future, for the result"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")


def _retrieve(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def start(
    background: BackgroundLoop,
    work: Coroutine[Any, Any, T],
    *,
    is_cancellable: bool = False,
    label: str = "",
    describe: Describe | None = None,
) -> APIFuture[T]:
    """Start a coroutine on the background loop; returns at once.

    `label`: the name of what it computes, for `repr`. `describe`: returns where that is, in a sentence.
    """
    future = background.submit(work)
    return APIFuture(background, future, is_cancellable=is_cancellable, label=label, describe=describe)


def awaited(
    method: Callable[Concatenate[ClientT, P], APIFuture[T]],
) -> Callable[Concatenate[ClientT, P], Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a method that returns a future. Awaiting the twin waits for the result."""

    async def twin(self: ClientT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)  # by name: a subclass may override it
        return await future

    # Annotations are strings here.
    result = method.__annotations__["return"].removeprefix("APIFuture[").removesuffix("]")
    _name_twin(twin, method, "awaited", result)
    return twin


def submitted(
    method: Callable[Concatenate[ClientT, P], APIFuture[T]],
) -> Callable[Concatenate[ClientT, P], Coroutine[Any, Any, APIFuture[T]]]:
    """Return the `_async` twin of a method that returns a future. Awaiting the twin returns the future."""

    async def twin(self: ClientT, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        future: APIFuture[T] = getattr(self, method.__name__)(*args, **kwargs)
        return future

    _name_twin(twin, method, "as a future", method.__annotations__["return"])
    return twin


def _name_twin(twin: Callable[..., Any], method: Callable[..., Any], how: str, result: str) -> None:
    """Give a twin the name, docstring and signature of a method written out. `result`: its return annotation."""
    functools.update_wrapper(twin, method)
    twin.__name__ += "_async"
    twin.__qualname__ += "_async"
    twin.__doc__ = f"`{method.__name__}`, {how}."
    twin.__annotations__ = method.__annotations__ | {"return": result}
    signature = inspect.signature(method).replace(return_annotation=result)
    setattr(twin, "__signature__", signature)  # noqa: B010  # mypy refuses the assignment


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

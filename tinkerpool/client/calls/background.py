"""The thread for input and output of all clients of a process: one daemon thread with one asyncio loop.

The user's code never runs there, so it cannot stall heartbeats, and the user may block on a future from any thread or
loop. gRPC does not survive a fork: a client belongs to the process that created it, and a child process creates its
own.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tinkerpool.errors import ClientClosed

T = TypeVar("T")


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
        """Start a coroutine on the loop; coroutines start in the order of these calls."""
        if os.getpid() != self._pid or self.loop.is_closed():
            work.close()
            raise ClientClosed("this client belongs to another process: make a new ServiceClient after a fork")
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

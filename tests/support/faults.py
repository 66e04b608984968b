"""Faults and delays, injected by patching the calls to disk, store and workers: these do not fail on demand."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

HELD_S_MAX = 20.0
"""Seconds after which a held call continues, so that a test that fails still ends."""
DISK_FULL = OSError(errno.ENOSPC, "No space left on device")


@dataclass(frozen=True, slots=True)
class Held:
    """Calls of a method that wait until `may_go` is set before they run."""

    has_begun: threading.Event = field(default_factory=threading.Event)
    """Set by the first call."""
    may_go: threading.Event = field(default_factory=threading.Event)
    """Lets the calls continue. Set at the end of the block at the latest."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.may_go.set()

    async def until_begun(self) -> None:
        """Wait for a call."""
        assert await asyncio.to_thread(self.has_begun.wait, HELD_S_MAX), "the held method was not called"


@contextmanager
def held(owner: object, method: str, calls: Held | None = None) -> Iterator[Held]:
    """Hold the calls of a method that the core calls in a thread.

    With `calls`, they are released together with those of another method.
    """
    calls, real = calls or Held(), getattr(owner, method)

    def hold(*args: Any) -> Any:
        calls.has_begun.set()
        calls.may_go.wait(HELD_S_MAX)
        return real(*args)

    with mock.patch.object(owner, method, hold), calls:
        yield calls


@contextmanager
def held_task(owner: object, method: str) -> Iterator[Held]:
    """Hold the calls of a method that the core awaits."""
    calls, real = Held(), getattr(owner, method)

    async def hold(*args: Any) -> Any:
        calls.has_begun.set()
        await asyncio.to_thread(calls.may_go.wait, HELD_S_MAX)
        return await real(*args)

    with mock.patch.object(owner, method, hold), calls:
        yield calls


@contextmanager
def failing(owner: object, method: str, error: BaseException, *, times: int | None = None) -> Iterator[list[Any]]:
    """Let the calls of a method fail, all or the first ones. Yields the arguments of the calls that failed."""
    failed: list[Any] = []
    real = getattr(owner, method)

    def fail(*args: Any) -> Any:
        if times is not None and len(failed) == times:
            return real(*args)
        failed.append(args)
        raise error

    with mock.patch.object(owner, method, fail):
        yield failed

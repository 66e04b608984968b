"""Owns the coordinator's background tasks and the running use cases. Does not depend on their purpose.

Main invariant: a task that fails reports a fatal error and cancels no other task, because a cycle must not be cut off
in its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from coordinator.base.errors import Failure, ServiceError
from coordinator.operations.admission import storage_error
from coordinator.storage.sqlite import StorageError

T = TypeVar("T")


class Tasks:
    """Tasks that `stop` ends: background tasks are cancelled, use cases are awaited."""

    def __init__(self, failure: Failure) -> None:
        self._failure = failure
        self._background: set[asyncio.Task[None]] = set()
        self._use_cases: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run a background task; its failure is fatal."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    async def uninterrupted(self, use_case: Coroutine[Any, Any, T]) -> T:
        """Run a use case to its end even if its caller is cancelled: memory and log would differ after a part of it.

        Raises ServiceError if the log refuses its writes.
        """
        task = asyncio.get_running_loop().create_task(use_case)
        self._use_cases.add(task)
        task.add_done_callback(self._use_case_done)
        try:
            return await asyncio.shield(task)
        except StorageError as error:
            refusal: ServiceError = storage_error(error)
            raise refusal from None

    async def stop(self) -> None:
        """Cancel the background tasks; wait for them and for the use cases."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, *self._use_cases, return_exceptions=True)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure.report(error)

    def _use_case_done(self, task: asyncio.Task[Any]) -> None:
        self._use_cases.discard(task)
        if not task.cancelled():
            task.exception()  # mark it retrieved: the caller may have been cancelled

"""Fatal errors: the ones after which the coordinator must stop.

Any part may report such an error; the code that runs the coordinator waits for the first one and then stops it. Main
invariant: the first reported error is the one that is raised.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

logger = logging.getLogger(__name__)


class Failure:
    """The first fatal error of an incarnation of the coordinator, if there is one."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._is_reported = asyncio.Event()

    @property
    def is_reported(self) -> bool:
        """Whether a fatal error was reported."""
        return self._error is not None

    def report(self, error: BaseException) -> None:
        """Record that the coordinator must stop. The first error wins; every error is logged."""
        logger.critical("fatal error: the coordinator stops", exc_info=error)
        if self._error is None:
            self._error = error
            self._is_reported.set()

    async def wait(self) -> NoReturn:
        """Wait for a fatal error and raise it."""
        await self._is_reported.wait()
        assert self._error is not None
        raise self._error

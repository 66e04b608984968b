"""Terminal behaviour of the scripts that start a pool: short paths, and a clean stop at Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside it."""
    with contextlib.suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


def interrupt_at_sigterm() -> None:
    """Handle SIGTERM as Ctrl-C, so that the pool is stopped."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C until the block ends, so that stopping a pool is not interrupted."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

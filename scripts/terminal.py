"""What the scripts that start a pool share at a terminal: paths as a reader wants them, and a clean end at Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType


def shown_path(path: Path) -> str:
    """A path as it is shortest from here."""
    with contextlib.suppress(ValueError):
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)


def interrupt_at_sigterm() -> None:
    """From now on SIGTERM is like Ctrl-C: what was started is stopped."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """While inside, another Ctrl-C does not keep the pool from being stopped."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt

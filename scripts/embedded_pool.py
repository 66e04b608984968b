"""A pool in a child process, on free ports, with a data directory that is removed with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from scripts.pool_process import PoolEnded, PoolProcess
from scripts.terminal import interrupt_at_sigterm, uninterrupted

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


class EmbeddedPool(PoolProcess):
    """A pool that no program of the harness kills."""

    def check(self) -> None:
        """Raise PoolEnded if the pool has ended: clients would retry forever."""
        if self.exit_code is not None:
            raise PoolEnded(f"the pool has ended; the end of its log:\n{self.log_tail()}")


@contextlib.contextmanager
def embedded_pool(
    serve_arguments: Sequence[str], on_line: Callable[[str], None] | None = None
) -> Iterator[EmbeddedPool]:
    """Run `tinkerpool serve` with these arguments until the block ends. Raises PoolEnded if it does not start.

    `on_line` is called with each line of its log until the pool is ready. SIGTERM stops it as Ctrl-C does.
    """
    interrupt_at_sigterm()
    with tempfile.TemporaryDirectory(prefix="tinkerpool-") as folder:
        os.environ["TINKERPOOL_HOME"] = folder  # do not overwrite the credentials of this user's other pools
        pool = EmbeddedPool(Path(folder))
        pool.begin("--port", "0", *serve_arguments)
        try:
            pool.wait_ready(START_TIMEOUT_S, on_line)
            yield pool
        finally:
            with uninterrupted():
                if pool.exit_code is None and pool.stop(STOP_TIMEOUT_S) is None:
                    raise PoolEnded(f"the pool had not stopped after {STOP_TIMEOUT_S:g} s and was killed")

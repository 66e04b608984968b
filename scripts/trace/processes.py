"""A pool whose processes can be recorded: the coordinator that this module runs, and the worker that it engages.

    python -m scripts.trace.processes serve ...      # `tinkerpool serve ...` with a recorder

The product has no code for it: the coordinator's process installs the recorder before it runs the command line, and
the worker's process installs it when Ray's actor asks `engine_factory` for its engine.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.pool_process import PoolProcess
from scripts.trace.recorder import RemoteRecorder, answer_in
from tinkerpool.serving import Serving

if TYPE_CHECKING:
    from workers.contract.protocols import EngineFactory
    from workers.contract.settings import EngineSettings

FOLDER = "TINKERPOOL_TRACE_FOLDER"
"""Environment variable: the folder of the recorders' sockets."""
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPool:
    """A pool with one worker in Ray; three processes with the client."""

    serving: Serving
    admin_key: str
    coordinator: RemoteRecorder
    worker: RemoteRecorder


@contextlib.contextmanager
def traced_pool() -> Iterator[TracedPool]:
    """Start a pool on the shipped model, and stop it at the end. Raises PoolEnded if it does not start."""
    with tempfile.TemporaryDirectory(prefix="tinkerpool-trace-") as name:
        pool = PoolProcess(Path(name))
        arguments = ("--port", "0", "--engine", "scripts.trace.processes:engine_factory")
        pool.begin(*arguments, module="scripts.trace.processes", **{FOLDER: name})
        try:
            serving = pool.wait_ready()
            [coordinator], [worker] = pool.folder.glob("coordinator-*.sock"), pool.folder.glob("worker-*.sock")
            yield TracedPool(
                serving=serving,
                admin_key=pool.admin_key,
                coordinator=RemoteRecorder(coordinator),
                worker=RemoteRecorder(worker),
            )
        finally:
            pool.stop(STOP_TIMEOUT_S)


def engine_factory(settings: EngineSettings) -> EngineFactory:
    """Return the real engine's factory, with a recorder in its process."""
    from workers.engine import engine_factory as real_factory

    answer_in(Path(os.environ[FOLDER]), "worker")
    return real_factory(settings)


def main() -> None:
    """Run the `tinkerpool` command with a recorder."""
    from tinkerpool.cli.main import main as run

    answer_in(Path(os.environ[FOLDER]), "coordinator")
    run()


if __name__ == "__main__":
    main()

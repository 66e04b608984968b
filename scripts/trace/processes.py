"""A pool whose processes can be recorded: the coordinator that this module runs, and the worker that it engages.

    python -m scripts.trace.processes serve ...      # `tinkerpool serve ...` with a recorder

The product has no code for it: the coordinator's process installs the recorder before it runs the command line, and
the worker's process installs it when Ray's actor asks `engine_factory` for its engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.trace.recorder import ROOT, RemoteRecorder, answer_in
from tinkerpool.serving import Serving

if TYPE_CHECKING:
    from workers.contract.protocols import EngineFactory
    from workers.contract.settings import EngineSettings

FOLDER = "TINKERPOOL_TRACE_FOLDER"
"""Environment variable: the folder of the recorders' sockets."""
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPool:
    """A pool with one worker in Ray; three processes with the client."""

    serving: Serving
    admin_key: str
    coordinator: RemoteRecorder
    worker: RemoteRecorder


@contextlib.contextmanager
def traced_pool() -> Iterator[TracedPool]:
    """Start a pool on the shipped model, and stop it at the end. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory(prefix="tinkerpool-trace-") as name:
        folder = Path(name)
        ready, log = folder / "ready.json", folder / "serve.log"
        command = [
            sys.executable,
            "-m",
            "scripts.trace.processes",
            "serve",
            "--port",
            "0",
            "--data-dir",
            f"{name}/pool",
        ]
        command += ["--ready-file", str(ready), "--engine", "scripts.trace.processes:engine_factory"]
        environment = os.environ | {"TINKERPOOL_HOME": name, FOLDER: name, "PYTHONPATH": str(ROOT)}
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while (serving := Serving.read(ready)) is None:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the pool did not start:\n{log.read_text()[-2000:]}")
                time.sleep(POLL_S)
            [coordinator], [worker] = folder.glob("coordinator-*.sock"), folder.glob("worker-*.sock")
            key = json.loads((folder / "credentials.json").read_text())["api_key"]
            yield TracedPool(
                serving=serving,
                admin_key=key,
                coordinator=RemoteRecorder(coordinator),
                worker=RemoteRecorder(worker),
            )
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


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

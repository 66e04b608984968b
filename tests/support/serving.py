"""Runs the `tinkerpool` command in separate processes, as an operator does at a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tinkerpool
from scripts.pool_process import ROOT, PoolProcess
from tinkerpool.serving import Serving

TOY = ("--pool", "local", "--engine", "tests.support.toy_engine:toy_factory", "--port", "0")
"""Options of a pool without torch."""
TOY_ON_RAY = ("--engine", "tests.support.toy_engine:toy_factory", "--port", "0", "--cpus", "0.5")
"""Options of such a pool with its workers in Ray."""


@dataclass(frozen=True)
class Terminal:
    """An operator's terminal, with a home directory of its own."""

    home: Path

    @property
    def log(self) -> Path:
        """Output of the pools that `serve` ran."""
        return self.home / "serve.log"

    @property
    def data_dir(self) -> Path:
        return self.home / "pool"

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKERPOOL_")}
        return inherited | {"TINKERPOOL_HOME": str(self.home), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def run(self, *arguments: str, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `tinkerpool <arguments>` to its end. `variables`: more environment variables."""
        return self.python("-m", "tinkerpool.cli", *arguments, timeout_s=timeout_s, **variables)

    def python(self, *arguments: str, timeout_s: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python <arguments>` to its end."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def credentials(self) -> dict[str, str]:
        """Return the URL and the key that the pool wrote for this user."""
        found: dict[str, str] = json.loads((self.home / "credentials.json").read_text())
        return found

    def client(self) -> tinkerpool.ServiceClient:
        """Return a client of the running pool."""
        found = self.credentials()
        return tinkerpool.ServiceClient(base_url=found["url"], api_key=found["api_key"])

    def train(self, timeout_s: float = 60) -> None:
        """Train a new adapter for one step, on a worker of the running pool."""
        datum = tinkerpool.Datum(tinkerpool.ModelInput.from_ints([1]), {"target_tokens": [2], "weights": [1.0]})
        with self.client() as service:
            service.create_lora_training_client(rank=4).train_step([datum], "cross_entropy").result(timeout_s)

    @contextmanager
    def serve(self, *arguments: str, timeout_s: float = 60) -> Iterator[tuple[subprocess.Popen[bytes], Serving]]:
        """Run `tinkerpool serve <arguments>` until the block ends. The block begins when the pool is ready."""
        self.home.mkdir(parents=True, exist_ok=True)
        pool = PoolProcess(self.home)
        pool.begin(*arguments)
        try:
            serving = pool.wait_ready(timeout_s)
            yield pool.process, serving
        finally:
            if pool.exit_code is None:
                assert pool.stop(60) is not None, "the pool did not stop"

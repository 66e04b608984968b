"""Pools in processes of their own: a full disk, and a second pool on the same data directory."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.database import query
from tests.support.serving import TOY, Terminal
from tinkerpool import TrainingClient, types
from tinkerpool.serving import Serving

NUM_FILLS = 6
UNFINISHED_MAX = 100
"""Operations that wait for a result at a time: on a busy machine, more would queue than it can finish."""
FINISH_S = 300.0


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path / "home")


def a_datum(length: int = 8) -> types.Datum:
    tokens = list(range(1, length + 1))
    return types.Datum(types.ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": [1.0] * length})


def step(training: TrainingClient) -> None:
    passed, stepped = training.forward_backward([a_datum()], "cross_entropy"), training.optim_step(types.AdamParams())
    passed.result(60)
    stepped.result(60)


@pytest.fixture
def toy_pool(terminal: Terminal) -> Iterator[tuple[subprocess.Popen[bytes], Serving]]:
    with terminal.serve(*TOY) as served:
        yield served


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 8 s on a quiet machine
def test_a_repeatedly_full_disk_loses_no_operation_and_the_pool_continues_without_a_restart(
    terminal: Terminal, toy_pool: tuple[subprocess.Popen[bytes], Serving]
) -> None:
    """The full disk is a limit on the size of files (RLIMIT_FSIZE) at the present size of the log."""
    process, _ = toy_pool
    unlimited = resource.RLIM_INFINITY
    output = terminal.log
    with terminal.client() as service:
        training = service.create_lora_training_client(rank=8).result()
        step(training)
        for fill in range(NUM_FILLS):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (log_size(terminal) + fill % 3 * 4096, unlimited))
            futures: list[Any] = []
            while output.read_text().count("the disk is full") <= fill:
                if sum(not future.done() for future in futures) < UNFINISHED_MAX:
                    futures.append(training.forward_backward([a_datum()] * (1 + fill % 5), "cross_entropy"))
                    futures.append(training.optim_step(types.AdamParams()))
                time.sleep(0.01)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
            for future in futures:
                future.result(FINISH_S)
    assert process.poll() is None
    assert query(terminal.data_dir, "PRAGMA integrity_check")[0][0] == "ok"
    assert query(terminal.data_dir, "SELECT * FROM operations WHERE outcome_bytes IS NULL OR is_failed") == []


def log_size(terminal: Terminal) -> int:
    return max(path.stat().st_size for path in terminal.data_dir.glob("tinkerpool.db*"))


@pytest.mark.slow
def test_a_paused_coordinator_continues_and_keeps_its_data_directory_and_port(
    terminal: Terminal, toy_pool: tuple[subprocess.Popen[bytes], Serving]
) -> None:
    process, serving = toy_pool
    with terminal.client() as service:
        training = service.create_lora_training_client(rank=8).result()
        step(training)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            on_data = terminal.run("serve", *TOY, "--data-dir", str(terminal.data_dir))
            port = serving.url.rpartition(":")[2]
            on_port = terminal.run("serve", *TOY[:-1], port, "--data-dir", str(terminal.home / "other"))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        step(training)
    assert on_data.returncode != 0
    assert f"a pool is already running at {serving.url} on" in on_data.stderr
    assert f"(process {process.pid})" in on_data.stderr
    assert on_port.returncode != 0
    assert f"cannot listen on port {port}" in on_port.stderr
    assert "Traceback" not in on_data.stderr + on_port.stderr

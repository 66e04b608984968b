"""Pools whose disk is full when they start: they serve reads, results and deletions, and take work once there is room.

The data directory is on a file system of 80 MB; the rest of the pool, Ray's folder included, has its files elsewhere.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tinkerpool
from tests.support.database import query
from tests.support.serving import TOY, TOY_ON_RAY, Terminal
from tests.support.small_disk import FOREIGN_FILE, fill, small_disk
from tests.support.waiting import wait_until
from tinkerpool import types
from tinkerpool.serving import Serving
from tinkerpool.v1 import sessions_pb2, sessions_pb2_grpc

DISK_BYTES = 80_000_000
METADATA = {"notes": "x" * 15_000}
"""Of one session: almost as much as it may have."""
NUM_SESSIONS = 200
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_BYTES) as folder:
        yield folder


class Pool:
    """A pool on the small disk, and calls of its users."""

    def __init__(self, terminal: Terminal, serving: Serving, process: subprocess.Popen[bytes]) -> None:
        self.terminal = terminal
        self.serving = serving
        self.process = process
        self._channel = grpc.insecure_channel(serving.url.removeprefix("http://"))

    def close(self) -> None:
        self._channel.close()

    def health(self) -> int:
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        return int(stub.Check(health_pb2.HealthCheckRequest()).status)

    def create_session(self) -> str:
        request = sessions_pb2.CreateSessionRequest(user_metadata=METADATA)
        return str(self._sessions().CreateSession(request, metadata=self._key()).session.session_id)

    def finish_session(self, session_id: str) -> None:
        request = sessions_pb2.FinishSessionRequest(session_id=session_id)
        self._sessions().FinishSession(request, metadata=self._key())

    def num_sessions(self) -> int:
        return int(self._sessions().ListSessions(sessions_pb2.ListSessionsRequest(), metadata=self._key()).total_size)

    def output(self) -> str:
        return self.terminal.log.read_text()

    def _sessions(self) -> Any:
        return sessions_pb2_grpc.SessionServiceStub(self._channel)

    def _key(self) -> list[tuple[str, str]]:
        return [("authorization", f"Bearer {self.terminal.credentials()['api_key']}")]


@contextmanager
def served(terminal: Terminal, disk: Path, options: tuple[str, ...] = TOY) -> Iterator[Pool]:
    with terminal.serve(*options, "--data-dir", str(disk / "pool"), "--disk-free-min", "0") as (process, serving):
        pool = Pool(terminal, serving, process)
        try:
            yield pool
        finally:
            pool.close()


def step(training: tinkerpool.TrainingClient) -> None:
    datum = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
    training.train_step([datum], "cross_entropy").result(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "options"),
    [pytest.param(signal.SIGKILL, TOY_ON_RAY, marks=[pytest.mark.ray, pytest.mark.long]), (signal.SIGTERM, TOY)],
    ids=["killed, on Ray", "stopped"],
)
def test_a_pool_that_ended_on_a_full_disk_starts_again_and_takes_work_once_there_is_room(
    tmp_path: Path, disk: Path, end: signal.Signals, options: tuple[str, ...]
) -> None:
    terminal = Terminal(tmp_path / "home")
    with served(terminal, disk, options) as pool:
        path = trained_and_saved(terminal)
        fill(disk, left_bytes=1 << 20)
        session_ids: list[str] = []
        with suppress(grpc.RpcError):
            session_ids += (pool.create_session() for _ in range(NUM_SESSIONS))
        assert len(session_ids) < NUM_SESSIONS
        fill(disk)
        wait_until(lambda: pool.health() != SERVING)
        pool.process.send_signal(end)
        pool.process.wait(60)
    check_start(terminal, disk, path, session_ids, options)


@pytest.mark.slow
@pytest.mark.long  # as one that ended on a full disk, in each run
def test_a_pool_whose_disk_was_filled_while_it_was_stopped_starts_again(tmp_path: Path, disk: Path) -> None:
    terminal = Terminal(tmp_path / "home")
    with served(terminal, disk) as pool:
        path = trained_and_saved(terminal)
        session_ids = [pool.create_session() for _ in range(NUM_SESSIONS)]
        pool.process.kill()
        pool.process.wait(60)
    fill(disk)
    check_start(terminal, disk, path, session_ids)


def trained_and_saved(terminal: Terminal) -> str:
    """Train an adapter for a step; return the path of its checkpoint."""
    with terminal.client() as service:
        training = service.create_lora_training_client(rank=8).result()
        step(training)
        return training.save_state("first").result(60).path


def check_start(
    terminal: Terminal, disk: Path, path: str, session_ids: list[str], options: tuple[str, ...] = TOY
) -> None:
    """Check that a pool starts on the full disk, deletes, and takes work once the foreign file is removed."""
    with served(terminal, disk, options) as pool:
        assert "MB free: only reads, results and deletions are served" in pool.output()
        assert pool.health() != SERVING
        assert "Problem: The pool's disk has" in terminal.run("status").stdout
        assert pool.num_sessions() >= len(session_ids)
        with pytest.raises(grpc.RpcError, match="only reads, results and deletions are served"):
            pool.create_session()
        for session_id in session_ids[:20]:
            pool.finish_session(session_id)
        with terminal.client() as service:
            service.create_rest_client().delete_checkpoint_from_tinker_path(path).result(60)
            (disk / FOREIGN_FILE).unlink()
            wait_until(lambda: pool.health() == SERVING)
            step(service.create_lora_training_client(rank=8).result())
    assert query(disk / "pool", "PRAGMA integrity_check")[0][0] == "ok"

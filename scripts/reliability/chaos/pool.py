"""A pool of processes for the chaos run: `tinkerpool serve` as an operator starts it, ended by `kill -9`.

Does not depend on the tenants or on the schedule of kills. Signals no other process than the coordinator that it
started and the workers that this coordinator reported. Each coordinator removes the processes and files of a killed
predecessor; the last `stop` checks this through a TMPDIR that only this pool uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tinkerpool.serving import READY_FILE, Serving
from tinkerpool.v1 import admin_pb2, admin_pb2_grpc, pool_pb2, pool_pb2_grpc
from workers.contract.failpoints import ENVIRONMENT, POINTS

ROOT = Path(__file__).resolve().parents[3]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 5.0
POLL_S = 0.05
LEFTOVERS_S = 10.0
"""Timeout for the processes of a stopping pool to end."""
PORTS = range(20_000, 30_000)
"""Below the kernel's ephemeral ports, so that no process takes ours between two coordinators."""


class Violation(Exception):
    """A promise is broken; the message describes how."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of a worker."""

    worker_id: str
    incarnation: str
    pid: int


class ServedPool:
    """One data directory, and the coordinators that serve it one after another."""

    def __init__(self, folder: Path, serve_arguments: Sequence[str]) -> None:
        self.folder = folder
        self.data_dir = folder / "pool"
        self.log = folder / "serve.log"
        self.failpoints = folder / "failpoints"
        self._arguments = list(serve_arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: grpc.Channel | None = None
        # Outside the run's folder: Ray's sockets are in it, and a socket's path has at most 107 bytes.
        name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._temp_dir = Path("/tmp") / f"tp-{name}"
        folder.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()

    @property
    def url(self) -> str:
        """Address of the gRPC door, the same for every coordinator."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_key(self) -> str:
        """The administrator's key; it exists once the pool has been ready."""
        return str(json.loads((self.folder / "credentials.json").read_text())["api_key"])

    def begin(self) -> None:
        """Start a coordinator without waiting for it."""
        assert self._process is None, "a coordinator runs already"
        self._temp_dir.mkdir(mode=0o700, exist_ok=True)
        self.failpoints.mkdir(exist_ok=True)
        for file in self.failpoints.iterdir():
            file.unlink()
        (self.data_dir / READY_FILE).unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKERPOOL_")}
        environment |= {
            "TINKERPOOL_HOME": str(self.folder.absolute()),
            "TMPDIR": str(self._temp_dir),
            ENVIRONMENT: str(self.failpoints.absolute()),
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            sys.executable,
            "-m",
            "tinkerpool.cli",
            "serve",
            "--port",
            str(self.port),
            "--no-http",
            *self._arguments,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self.data_dir.absolute())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal goes to this program only
            )

    def is_ready(self) -> bool:
        """Return whether the coordinator serves. Raises Violation if it has ended without a kill."""
        self.check()
        serving = Serving.read(self.data_dir / READY_FILE)
        return self._process is not None and serving is not None and serving.pid == self._process.pid

    def wait_ready(self) -> None:
        """Wait until the coordinator serves. Raises Violation after a timeout."""
        if not wait_until(self.is_ready, START_TIMEOUT_S):
            raise Violation(f"the coordinator was not ready after {START_TIMEOUT_S:g} s:\n{self.log_tail()}")

    def check(self) -> None:
        """Raise Violation if the coordinator has ended without a kill."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise Violation(f"the coordinator ended by itself, with exit code {code}:\n{self.log_tail()}")

    def kill(self) -> None:
        """`kill -9` the coordinator."""
        self.check()
        assert self._process is not None
        self._process.kill()
        self.reap()

    def reap(self) -> None:
        """Wait for the end of a coordinator that was killed."""
        assert self._process is not None
        code = self._process.wait(STOP_TIMEOUT_S)
        if code != -signal.SIGKILL:
            raise Violation(f"the coordinator ended by itself, with exit code {code}:\n{self.log_tail()}")
        self._process = None

    def has_ended(self) -> bool:
        """Return whether the coordinator has ended and is not reaped yet."""
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        """Stop the pool as an operator does, and remove temporary files. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise Violation(f"the coordinator had not stopped after {STOP_TIMEOUT_S:g} s") from None
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if process is not None:
            self._check_nothing_left()
        shutil.rmtree(self._temp_dir, ignore_errors=True)

    def workers(self) -> list[Worker]:
        """Return the live workers that the coordinator reports; none while it does not reply."""
        try:
            return [Worker(w.worker_id, w.incarnation, w.pid) for w in self._status().workers if w.is_live]
        except grpc.RpcError:
            return []

    def epoch(self) -> int:
        """Return the epoch: the number of coordinators that have run on the data directory."""
        return self._status().epoch

    def create_key(self, tenant: str) -> str:
        """Create a key for a tenant."""
        request = admin_pb2.CreateApiKeyRequest(tenant=tenant)
        stub = admin_pb2_grpc.AdminServiceStub(self.channel())
        return str(stub.CreateApiKey(request, metadata=self.metadata(), timeout=CALL_TIMEOUT_S).key)

    def usage(self) -> list[pool_pb2.UsageRow]:
        """Return the charges of every tenant."""
        rows = self._pool_stub().GetUsage(pool_pb2.GetUsageRequest(), metadata=self.metadata(), timeout=CALL_TIMEOUT_S)
        return list(rows.rows)

    def channel(self) -> grpc.Channel:
        """Return this harness's channel to the pool."""
        if self._channel is None:
            options = [("grpc.max_reconnect_backoff_ms", 500), ("grpc.max_receive_message_length", 1 << 28)]
            self._channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options)
        return self._channel

    def metadata(self, key: str = "") -> tuple[tuple[str, str], ...]:
        """Return a call's metadata with this key; default: the administrator's."""
        return (("authorization", f"Bearer {key or self.admin_key}"),)

    def arm(self, point: str) -> None:
        """Arm a failpoint: the next process that reaches it kills itself."""
        assert point in POINTS
        (self.failpoints / point).touch()

    def disarm(self, point: str) -> bool:
        """Disarm a failpoint; return False if a process has reached it."""
        try:
            (self.failpoints / point).unlink()
        except FileNotFoundError:
            return False
        return True

    def was_hit(self, point: str) -> bool:
        """Return whether a process has reached the failpoint since it was armed."""
        return (self.failpoints / f"{point}.hit").exists()

    def log_tail(self) -> str:
        """Return the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  {line}" for line in lines[-25:])

    def tracebacks(self) -> int:
        """Return the number of tracebacks in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def _status(self) -> pool_pb2.GetPoolStatusResponse:
        request = pool_pb2.GetPoolStatusRequest(num_cycles=1)
        return self._pool_stub().GetPoolStatus(request, metadata=self.metadata(), timeout=CALL_TIMEOUT_S)

    def _pool_stub(self) -> pool_pb2_grpc.PoolServiceStub:
        return pool_pb2_grpc.PoolServiceStub(self.channel())

    def _check_nothing_left(self) -> None:
        """Raise Violation if a process or folder of the pool is left after the last coordinator has stopped."""
        wait_until(lambda: not any(self._processes()), LEFTOVERS_S)
        if left := sorted(f"{name} ({pid})" for pid, name in self._processes()):
            raise Violation(f"the pool has stopped and left processes behind: {', '.join(left)}")
        if folders := [path.name for path in self._temp_dir.iterdir() if path.name.startswith("tinkerpool-")]:
            raise Violation(f"the pool has stopped and left folders behind in {self._temp_dir}: {', '.join(folders)}")

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yield pid and name of every process with our TMPDIR in its environment."""
        mark = f"TMPDIR={self._temp_dir}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "comm").read_text().strip()


class ProcessHandle:
    """A handle on the process that has this pid now; it stays valid if another process gets the pid later."""

    def __init__(self, pid: int) -> None:
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):  # the process has ended
            self._pidfd = os.pidfd_open(pid)

    def send(self, signum: signal.Signals) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait at most this long for the process to end; return whether it has."""
        return self._pidfd is None or bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def close(self) -> None:
        """Release the handle."""
        if self._pidfd is not None:
            os.close(self._pidfd)


def wait_until(condition: Callable[[], bool], timeout_s: float, poll_s: float = POLL_S) -> bool:
    """Poll the condition; return whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def _free_port() -> int:
    start = os.getpid() % len(PORTS)
    for i in range(len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", PORTS[(start + i) % len(PORTS)]))
            return int(probe.getsockname()[1])
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop}")

"""A pool of processes for the chaos run: `tinkerpool serve` as an operator starts it, ended by `kill -9`.

Does not depend on the tenants or on the schedule of kills. Signals no other process than the coordinator that it
started and the workers that this coordinator reported. Each coordinator removes the processes and files of a killed
predecessor; the last `stop` checks this through a TMPDIR that only this pool uses.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from scripts.pool_process import POLL_S, PoolProcess, free_port
from workers.contract.failpoints import ENVIRONMENT, POINTS

STOP_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 5.0
LEFTOVERS_S = 10.0
"""Timeout for the processes of a stopping pool to end."""


class Violation(Exception):
    """A promise is broken; the message describes how."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One incarnation of a worker."""

    incarnation: str
    pid: int


class ServedPool(PoolProcess):
    """One data directory, and the coordinators that serve it one after another, all on the same port."""

    call_timeout_s = CALL_TIMEOUT_S

    def __init__(self, folder: Path, serve_arguments: Sequence[str]) -> None:
        # Outside the run's folder: Ray's sockets are in it, and a socket's path has at most 107 bytes.
        name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]
        self._temp = Path("/tmp") / f"tp-{name}"
        super().__init__(folder, temp_dir=self._temp)
        self.failpoints = self.folder / "failpoints"
        self._channel: grpc.Channel | None = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._arguments = ["--port", str(free_port()), "--no-http", *serve_arguments]

    def start(self) -> None:
        """Start a coordinator without waiting for it."""
        assert self._process is None, "a coordinator runs already"
        self._temp.mkdir(mode=0o700, exist_ok=True)
        self.failpoints.mkdir(exist_ok=True)
        for file in self.failpoints.iterdir():
            file.unlink()
        self.begin(*self._arguments, **{ENVIRONMENT: str(self.failpoints)})

    def is_ready(self) -> bool:
        """Return whether the coordinator serves. Raises Violation if it has ended without a kill."""
        self.check()
        return super().is_ready()

    def check(self) -> None:
        """Raise Violation if the coordinator has ended without a kill."""
        if self._process is not None and (code := self._process.poll()) is not None:
            raise Violation(f"the coordinator ended by itself, with exit code {code}:\n{self.log_tail()}")

    def kill(self) -> None:
        """`kill -9` the coordinator."""
        self.check()
        super().kill()
        self.reap()

    def reap(self) -> None:
        """Wait for the end of a coordinator that was killed."""
        code = self.process.wait(STOP_TIMEOUT_S)
        if code != -signal.SIGKILL:
            raise Violation(f"the coordinator ended by itself, with exit code {code}:\n{self.log_tail()}")
        self._process = None

    def has_ended(self) -> bool:
        """Return whether the coordinator has ended and is not reaped yet."""
        return self._process is not None and self._process.poll() is not None

    def end(self) -> None:
        """Stop the pool as an operator does, and remove temporary files. Idempotent."""
        if self._process is not None and self.stop(STOP_TIMEOUT_S) is None:
            raise Violation(f"the coordinator had not stopped after {STOP_TIMEOUT_S:g} s")
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process = None
            self._check_nothing_left()
        shutil.rmtree(self._temp, ignore_errors=True)

    def workers(self) -> list[Worker]:
        """Return the live workers that the coordinator reports; none while it does not reply."""
        try:
            return [Worker(w.incarnation, w.pid) for w in self.status().workers if w.is_live]
        except grpc.RpcError:
            return []

    def epoch(self) -> int:
        """Return the epoch: the number of coordinators that have run on the data directory."""
        return self.status().epoch

    def channel(self) -> grpc.Channel:
        """Return this harness's channel to the pool."""
        if self._channel is None:
            options = (("grpc.max_reconnect_backoff_ms", 500), ("grpc.max_receive_message_length", 1 << 28))
            self._channel = self.new_channel(*options)
        return self._channel

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

    def tracebacks(self) -> int:
        """Return the number of tracebacks in the log."""
        return self.log_text().count("Traceback (most recent call last)")

    def _check_nothing_left(self) -> None:
        """Raise Violation if a process or folder of the pool is left after the last coordinator has stopped."""
        wait_until(lambda: not any(self.processes()), LEFTOVERS_S)
        if left := sorted(f"{name} ({pid})" for pid, name in self.processes()):
            raise Violation(f"the pool has stopped and left processes behind: {', '.join(left)}")
        if folders := [path.name for path in self._temp.iterdir() if path.name.startswith("tinkerpool-")]:
            raise Violation(f"the pool has stopped and left folders behind in {self._temp}: {', '.join(folders)}")


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

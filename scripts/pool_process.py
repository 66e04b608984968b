"""A pool in a process of its own that a harness starts, signals and starts again: `tinkerpool serve`, or a like module.

Signals no other process than the coordinator that it started. `scripts.embedded_pool` starts a pool for a program that
only uses it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc

from tinkerpool.serving import Serving
from tinkerpool.v1 import admin_pb2, admin_pb2_grpc, pool_pb2, pool_pb2_grpc

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0
POLL_S = 0.05
PORTS = range(20_000, 30_000)
"""Below the kernel's ephemeral ports, so that no process takes ours between two coordinators."""
COORDINATOR_PORTS = 10
"""At least those that a coordinator takes: the ports after its own have its other doors."""
_FOUND = itertools.count()


def free_port() -> int:
    """Return a port of the loopback that is free, and stays free while a coordinator is started again.

    The next call in this process returns another one, so that two coordinators can run at the same time.
    """
    start = os.getpid() + COORDINATOR_PORTS * next(_FOUND)
    for i in range(len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", PORTS[(start + i) % len(PORTS)]))
            return int(probe.getsockname()[1])
    raise RuntimeError(f"no free port from {PORTS.start} to {PORTS.stop}")


class PoolEnded(Exception):
    """The coordinator has ended, or did not start; the message has the end of its log."""


class PoolProcess:
    """One folder with a data directory, and the coordinators that serve it one after another."""

    call_timeout_s = 30.0
    """Timeout of the harness's own calls."""

    def __init__(self, folder: Path, temp_dir: Path | None = None) -> None:
        """`temp_dir`: a TMPDIR that only this pool uses, so that `processes` finds its processes."""
        self.folder = folder.absolute()
        self.log = self.folder / "serve.log"
        """Output of all coordinators."""
        self.serving: Serving | None = None
        """Addresses of the coordinator that was ready last."""
        self._temp_dir = temp_dir
        self._ready_file = self.folder / "ready.json"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def data_dir(self) -> Path:
        """The pool's data directory."""
        return self.folder / "pool"

    @property
    def url(self) -> str:
        """URL of the gRPC door."""
        assert self.serving is not None
        return self.serving.url

    @property
    def http_url(self) -> str:
        """URL of the HTTP door; empty if that door is closed."""
        assert self.serving is not None
        return self.serving.http_url

    @property
    def certificate(self) -> bytes | None:
        """The certificate (PEM) that clients trust; None without TLS."""
        return None

    @property
    def admin_key(self) -> str:
        """The administrator's key; it exists once the pool has been ready."""
        return str(json.loads((self.folder / "credentials.json").read_text(encoding="utf-8"))["api_key"])

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The coordinator that was started last."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        """The coordinator's process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """The coordinator's exit code; None while it runs."""
        return self.process.poll()

    def begin(self, *arguments: str, module: str = "tinkerpool.cli", **variables: str) -> None:
        """Start `python -m <module> serve <arguments>` without waiting for it.

        `variables`: more environment variables. No other variable of TinkerPool is inherited. This checkout comes
        before what an inherited PYTHONPATH names.
        """
        self._ready_file.unlink(missing_ok=True)  # of a coordinator that was killed
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKERPOOL_")}
        path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
        environment |= {"TINKERPOOL_HOME": str(self.folder), "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        if self._temp_dir is not None:
            environment["TMPDIR"] = str(self._temp_dir)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "serve", *arguments, "--ready-file", str(self._ready_file)],
                env=environment | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal goes to this program only
            )

    def is_ready(self) -> bool:
        """Return whether the coordinator serves."""
        serving = Serving.read(self._ready_file)
        if serving is None or self._process is None or serving.pid != self._process.pid:
            return False
        self.serving = serving
        return True

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, on_line: Callable[[str], None] | None = None) -> Serving:
        """Wait until the coordinator serves; return its addresses. Raises PoolEnded if it ends, or after a timeout.

        `on_line` is called with each line of the log.
        """
        deadline, num_lines = time.monotonic() + timeout_s, 0
        while not self.is_ready():
            if self.exit_code is not None:
                raise PoolEnded(f"the pool ended while it started (exit code {self.exit_code}):\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise PoolEnded(f"the pool was not ready after {timeout_s:g} s:\n{self.log_tail()}")
            if on_line is not None:
                for line in (lines := self.log_text().splitlines())[num_lines:]:
                    on_line(line)
                num_lines = len(lines)
            time.sleep(POLL_S)
        assert self.serving is not None
        return self.serving

    def stop(self, timeout_s: float) -> float | None:
        """Send SIGTERM; return the seconds until the coordinator's end, None if it did not end and was killed."""
        begin = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        return time.monotonic() - begin

    def kill(self) -> None:
        """`kill -9` the coordinator."""
        self.process.kill()
        self.process.wait()

    def new_channel(self, *options: tuple[str, int]) -> grpc.Channel:
        """Return a new channel to the gRPC door, with connections of its own."""
        address, all_options = self.url.partition("://")[2], [("grpc.use_local_subchannel_pool", 1), *options]
        if (certificate := self.certificate) is not None:
            return grpc.secure_channel(address, grpc.ssl_channel_credentials(certificate), options=all_options)
        return grpc.insecure_channel(address, options=all_options)

    def metadata(self, key: str = "") -> tuple[tuple[str, str], ...]:
        """Return a call's metadata with this key; default: the administrator's."""
        return (("authorization", f"Bearer {key or self.admin_key}"),)

    def create_key(self, tenant: str, *, role: admin_pb2.Role.ValueType = admin_pb2.ROLE_MEMBER) -> str:
        """Create a key for a tenant; a member's, unless `role` says otherwise."""
        request = admin_pb2.CreateApiKeyRequest(tenant=tenant, role=role)
        with self.new_channel() as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return str(stub.CreateApiKey(request, metadata=self.metadata(), timeout=self.call_timeout_s).key)

    def status(self, num_cycles: int = 0) -> pool_pb2.GetPoolStatusResponse:
        """Return the pool's status with its last cycles."""
        request = pool_pb2.GetPoolStatusRequest(num_cycles=num_cycles)
        with self.new_channel() as channel:
            stub = pool_pb2_grpc.PoolServiceStub(channel)
            return stub.GetPoolStatus(request, metadata=self.metadata(), timeout=self.call_timeout_s)

    def usage_rows(self) -> list[pool_pb2.UsageRow]:
        """Return the charges of every tenant."""
        with self.new_channel() as channel:
            stub = pool_pb2_grpc.PoolServiceStub(channel)
            request = pool_pb2.GetUsageRequest()
            return list(stub.GetUsage(request, metadata=self.metadata(), timeout=self.call_timeout_s).rows)

    def log_text(self) -> str:
        """Return the whole log; it is empty before the first start."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        """Return the last 25 lines of the log."""
        return "\n".join(f"  {line}" for line in self.log_text().splitlines()[-25:])

    def processes(self) -> Iterator[tuple[int, str]]:
        """Yield pid and name of every process with the pool's TMPDIR in its environment."""
        assert self._temp_dir is not None
        mark = f"TMPDIR={self._temp_dir}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    yield int(folder.name), (folder / "comm").read_text().strip()

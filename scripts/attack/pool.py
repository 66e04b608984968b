"""The attacked pool: `tinkerpool serve` in a process of its own, with a probe, on free ports of the loopback.

Signals no other processes than the coordinator that it started, the workers that this coordinator reported, and what a
killed coordinator left: processes with a TMPDIR that only this pool uses.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from scripts.attack.probe import RemoteProbe
from scripts.attack.probed import SOCKET
from tinkerpool.serving import Serving
from tinkerpool.v1 import admin_pb2, admin_pb2_grpc, pool_pb2, pool_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 180.0
CALL_TIMEOUT_S = 30.0
STOP_LIMIT_S = 15.0
"""A stop in time: `stop_s_max`, and the grace of the doors for calls that have been told to end."""
STOP_TIMEOUT_S = 40.0
"""Then the coordinator is killed."""
LEFTOVERS_S = 10.0
POLL_S = 0.05
CERTIFICATE = "cert.pem"


class PoolEnded(Exception):
    """The coordinator has ended, or did not start; the message has the end of its log."""


class AttackedPool:
    """One pool with both doors. Use it as a context."""

    def __init__(
        self,
        serve_arguments: Sequence[str],
        files_max: int | None,
        *,
        is_tls: bool = False,
        disk_bytes: int | None = None,
    ) -> None:
        """`files_max`: file descriptors that the coordinator may open. None: as many as this program.

        `disk_bytes`: the size of a file system of its own for the data directory, which takes the rights to mount it.
        """
        self._arguments = list(serve_arguments)
        self._is_tls = is_tls
        self._files_max = files_max
        self._disk_bytes = disk_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="tpa-", dir="/tmp"))
        self._log = self._folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._probe: RemoteProbe | None = None
        self.log_bytes_at_start = 0

    def __enter__(self) -> Self:
        try:
            if self._disk_bytes is not None:
                self._disk.mkdir()
                options = f"size={self._disk_bytes}"
                subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._disk)], check=True)
            self._start()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._remove()

    @property
    def certificate(self) -> bytes | None:
        """The certificate (PEM) that clients trust; None without TLS."""
        return (self._folder / CERTIFICATE).read_bytes() if self._is_tls else None

    @property
    def probe(self) -> RemoteProbe:
        """The probe of the coordinator's event loop."""
        assert self._probe is not None
        return self._probe

    @property
    def pid(self) -> int:
        """The coordinator."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The coordinator's exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def data_dir(self) -> Path:
        """The pool's data directory."""
        return (self._folder if self._disk_bytes is None else self._disk) / "pool"

    @property
    def _disk(self) -> Path:
        return self._folder / "disk"

    @property
    def log_bytes(self) -> int:
        """Bytes that the coordinator has logged since its start."""
        return self._log.stat().st_size - self.log_bytes_at_start

    def memory_bytes(self) -> int:
        """Return the resident memory of the coordinator; 0 if it has ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return 0
        return pages * resource.getpagesize()

    def channel(self) -> grpc.Channel:
        """Return a new channel, with connections of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if (certificate := self.certificate) is not None:
            return grpc.secure_channel(self.grpc, grpc.ssl_channel_credentials(certificate), options=options)
        return grpc.insecure_channel(self.grpc, options=options)

    def http_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a new connection to the HTTP door."""
        if (certificate := self.certificate) is not None:
            context = ssl.create_default_context(cadata=certificate.decode())
            return http.client.HTTPSConnection(self.http, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.http, timeout=timeout_s)

    def worker_pids(self) -> list[int]:
        """Return the processes of live workers; none if the workers are in the coordinator's process."""
        with self.channel() as channel:
            stub = pool_pb2_grpc.PoolServiceStub(channel)
            status = stub.GetPoolStatus(
                pool_pb2.GetPoolStatusRequest(), metadata=self._metadata(), timeout=CALL_TIMEOUT_S
            )
        return [worker.pid for worker in status.workers if worker.is_live and worker.pid not in (0, self.pid)]

    def create_key(self, tenant: str, *, role: admin_pb2.Role.ValueType = admin_pb2.ROLE_MEMBER) -> str:
        """Create a key for a tenant; a member's, unless `role` says otherwise."""
        with self.channel() as channel:
            request = admin_pb2.CreateApiKeyRequest(tenant=tenant, role=role)
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            return str(stub.CreateApiKey(request, metadata=self._metadata(), timeout=CALL_TIMEOUT_S).key)

    def stop(self) -> float | None:
        """Send SIGTERM; return the seconds until the coordinator's end, None if it did not end and was killed."""
        assert self._process is not None
        begin = time.monotonic()
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None
        return time.monotonic() - begin

    def kill(self) -> None:
        """`kill -9` the coordinator."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def fill_disk(self) -> None:
        """Fill the pool's own file system with a foreign file."""
        with contextlib.suppress(OSError), (self._disk / "foreign").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def start_again(self) -> float:
        """Start a coordinator that was killed; return the seconds until it serves."""
        begin = time.monotonic()
        (self._folder / "ready.json").unlink(missing_ok=True)
        (self._folder / "probe.sock").unlink(missing_ok=True)
        self._start()
        return time.monotonic() - begin

    def problem(self) -> str:
        """Return why the pool refuses new work."""
        with self.channel() as channel:
            stub = pool_pb2_grpc.PoolServiceStub(channel)
            request = pool_pb2.GetPoolStatusRequest()
            return str(stub.GetPoolStatus(request, metadata=self._metadata(), timeout=CALL_TIMEOUT_S).problem)

    def log_text(self) -> str:
        """Return the whole log."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def log_tail(self, num_lines: int = 25) -> str:
        """Return the end of the log."""
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - 20_000))
            return "\n".join(f"  {line}" for line in file.read().decode(errors="replace").splitlines()[-num_lines:])

    def _start(self) -> None:
        ready, socket = self._folder / "ready.json", self._folder / "probe.sock"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TINKERPOOL_")}
        environment = inherited | {
            "TINKERPOOL_HOME": str(self._folder),
            "TMPDIR": str(self._folder),
            "PYTHONPATH": str(ROOT),
            SOCKET: str(socket),
        }
        command = [sys.executable, "-m", "scripts.attack.probed", "serve", "--port", "0", *self._arguments]
        if self._is_tls:
            command += make_certificate(self._folder)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self.data_dir), "--ready-file", str(ready)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal goes to this program only
            )
        if self._files_max is not None:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (self._files_max, self._files_max))
        deadline = time.monotonic() + START_TIMEOUT_S
        while (serving := Serving.read(ready)) is None:
            if self.exit_code is not None or time.monotonic() > deadline:
                raise PoolEnded(f"the pool did not start:\n{self.log_tail()}")
            time.sleep(POLL_S)
        self.model = serving.models[0]
        self.url = serving.url
        self.grpc, self.http = (url.partition("://")[2] for url in (serving.url, serving.http_url))
        self._probe = RemoteProbe(socket)
        self.log_bytes_at_start = self._log.stat().st_size

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        key = json.loads((self._folder / "credentials.json").read_text(encoding="utf-8"))["api_key"]
        return (("authorization", f"Bearer {key}"),)

    def _remove(self) -> None:
        """End what still runs, and remove the pool's folder."""
        if self._probe is not None:
            self._probe.close()
        if self._process is not None and self.exit_code is None:
            self.stop()
        deadline = time.monotonic() + LEFTOVERS_S
        while (left := list(self._left())) and time.monotonic() < deadline:
            if self._process is not None and self.exit_code == -signal.SIGKILL:
                break  # nobody else will end them
            time.sleep(POLL_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._disk_bytes is not None:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _left(self) -> Iterator[int]:
        """Yield every process with our TMPDIR in its environment."""
        mark = f"TMPDIR={self._folder}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    yield int(folder.name)


def make_certificate(folder: Path) -> list[str]:
    """Make a self-signed certificate for the loopback; return the options that serve it. Needs the openssl command."""
    certificate, key = folder / CERTIFICATE, folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
    )
    return ["--tls-cert", str(certificate), "--tls-key", str(key)]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

"""The attacked pool: `tinkerpool serve` in a process of its own, with a probe, on free ports of the loopback.

Signals no other processes than the coordinator that it started, the workers that this coordinator reported, and what a
killed coordinator left: processes with a TMPDIR that only this pool uses.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from scripts.attack.probe import RemoteProbe
from scripts.attack.probed import SOCKET
from scripts.pool_process import POLL_S, PoolProcess

STOP_LIMIT_S = 15.0
"""A stop in time: `stop_s_max`, and the grace of the doors for calls that have been told to end."""
STOP_TIMEOUT_S = 40.0
"""Then the coordinator is killed."""
LEFTOVERS_S = 10.0
CERTIFICATE = "cert.pem"


class AttackedPool(PoolProcess):
    """One pool with both doors. Use it as a context."""

    def __init__(
        self,
        serve_arguments: Sequence[str],
        files_max: int | None,
        *,
        is_tls: bool = False,
        disk_bytes: int | None = None,
        is_probed: bool = True,
    ) -> None:
        """`files_max`: file descriptors that the coordinator may open. None: as many as this program.

        `disk_bytes`: the size of a file system of its own for the data directory, which takes the rights to mount it.
        `is_probed`: whether the event loop is measured, which slows each of its callbacks.
        """
        self._arguments = list(serve_arguments)
        self._is_tls = is_tls
        self._files_max = files_max
        self._disk_bytes = disk_bytes
        self._is_probed = is_probed
        folder = Path(tempfile.mkdtemp(prefix="tpa-", dir="/tmp"))
        super().__init__(folder, temp_dir=folder)
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

    def __exit__(self, *exception: object) -> None:
        self._remove()

    @property
    def certificate(self) -> bytes | None:
        """The certificate (PEM) that clients trust; None without TLS."""
        return (self.folder / CERTIFICATE).read_bytes() if self._is_tls else None

    @property
    def probe(self) -> RemoteProbe:
        """The probe of the coordinator's event loop."""
        assert self._probe is not None
        return self._probe

    @property
    def data_dir(self) -> Path:
        """The pool's data directory."""
        return (self.folder if self._disk_bytes is None else self._disk) / "pool"

    @property
    def _disk(self) -> Path:
        return self.folder / "disk"

    @property
    def log_bytes(self) -> int:
        """Bytes that the coordinator has logged since its start."""
        return self.log.stat().st_size - self.log_bytes_at_start

    def memory_bytes(self) -> int:
        """Return the resident memory of the coordinator; 0 if it has ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return 0
        return pages * resource.getpagesize()

    def http_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a new connection to the HTTP door."""
        if (certificate := self.certificate) is not None:
            context = ssl.create_default_context(cadata=certificate.decode())
            return http.client.HTTPSConnection(self.http, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.http, timeout=timeout_s)

    def worker_pids(self) -> list[int]:
        """Return the processes of live workers; none if the workers are in the coordinator's process."""
        return [each.pid for each in self.status().workers if each.is_live and each.pid not in (0, self.pid)]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> float | None:
        """See PoolProcess."""
        return super().stop(timeout_s)

    def fill_disk(self) -> None:
        """Fill the pool's own file system with a foreign file."""
        with contextlib.suppress(OSError), (self._disk / "foreign").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    def start_again(self) -> float:
        """Start a coordinator that was killed; return the seconds until it serves."""
        begin = time.monotonic()
        (self.folder / "probe.sock").unlink(missing_ok=True)
        self._start()
        return time.monotonic() - begin

    def _start(self) -> None:
        socket = self.folder / "probe.sock"
        arguments = ["--port", "0", *self._arguments, "--data-dir", str(self.data_dir)]
        if self._is_tls:
            certificate, key = make_certificate(self.folder, "IP:127.0.0.1")
            arguments += ["--tls-cert", str(certificate), "--tls-key", str(key)]
        if self._is_probed:
            self.begin(*arguments, module="scripts.attack.probed", **{SOCKET: str(socket)})
        else:
            self.begin(*arguments)
        if self._files_max is not None:
            resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (self._files_max, self._files_max))
        serving = self.wait_ready()
        self.model = serving.models[0]
        self.grpc, self.http = (url.partition("://")[2] for url in (serving.url, serving.http_url))
        self._probe = RemoteProbe(socket) if self._is_probed else None
        self.log_bytes_at_start = self.log.stat().st_size

    def _remove(self) -> None:
        """End what still runs, and remove the pool's folder."""
        if self._probe is not None:
            self._probe.close()
        if self._process is not None and self.exit_code is None:
            self.stop()
        deadline = time.monotonic() + LEFTOVERS_S
        while (left := [pid for pid, _ in self.processes()]) and time.monotonic() < deadline:
            if self._process is not None and self.exit_code == -signal.SIGKILL:
                break  # nobody else will end them
            time.sleep(POLL_S)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._disk_bytes is not None:
            subprocess.run(["umount", "--lazy", str(self._disk)], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def make_certificate(folder: Path, names: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for `names`; return it and its key, in PEM. Needs the openssl command."""
    certificate, key = folder / CERTIFICATE, folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", f"subjectAltName={names}", "-out", certificate, "-keyout", key],
        check=True,
        capture_output=True,
    )
    return certificate, key


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process until the block ends."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

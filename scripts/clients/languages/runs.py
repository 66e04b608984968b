"""The programs at one pool at the same time, and a restart of the pool that none of them can miss.

Each program sends its steps last first, so that none can finish, and prints a line when it has sent most of them: there
it is halted (SIGSTOP). When all are halted, the pool is told to end, and the programs go on without one. When each has
lost its stream and a call, the pool starts again. So the restart is always in the middle of the training, however fast
or slow a program is. Signals no other process than the pool and the programs that it started.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.attack.pool import make_certificate
from scripts.clients.languages.toolchains import Language
from scripts.pool_process import POLL_S, PoolProcess, free_port
from tinkerpool.v1 import limits_pb2, limits_pb2_grpc

PHASE_S = 300.0
"""Seconds that a start of the pool may take, and all programs together up to the stop, to notice it, and after it."""
STOP_S = 60.0
HALTS_AT = "sent 6 steps\n"
LIMITS = {"operations_per_s": "1"}
"""Ten operations at once, then one a second: each program is refused with a delay while it sends its steps."""
REFUSED = re.compile(r"^TrainStep: RATE_LIMITED; again", re.MULTILINE)
LOST = (
    re.compile(r"^WaitOperations: (UNAVAILABLE|CANCELLED|INTERNAL|SHUTTING_DOWN); again", re.MULTILINE),
    re.compile(r"^TrainStep: (UNAVAILABLE|CANCELLED|INTERNAL|SHUTTING_DOWN); again", re.MULTILINE),
)
"""What a program says on its standard error when its stream broke, and when a call had no pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a program did."""

    language: str
    output: str
    """Its standard output."""
    errors: str
    """Its standard error."""
    fault: str = ""
    """What went wrong; empty: nothing."""


class RestartedPool(PoolProcess):
    """A pool, with TLS or without, that is started twice on one port and one data directory."""

    def __init__(self, folder: Path, *, is_tls: bool) -> None:
        super().__init__(folder)
        self.certificate_file: Path | None = None
        self._arguments = ["--port", str(free_port()), "--no-http"]
        if is_tls:
            self.certificate_file, key = make_certificate(folder, "DNS:localhost,IP:127.0.0.1")
            self._arguments += ["--tls-cert", str(self.certificate_file), "--tls-key", str(key)]

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the programs trust."""
        return self.certificate_file.read_bytes() if self.certificate_file is not None else None

    def start(self) -> None:
        """Start, on the same port as before."""
        self.begin(*self._arguments)
        self.wait_ready(PHASE_S)

    def new_tenant(self, tenant: str) -> str:
        """Return the key of a new tenant that soon has to wait."""
        key = self.create_key(tenant)
        request = limits_pb2.SetTenantLimitsRequest(tenant=tenant, limits=LIMITS)
        with self.new_channel() as channel:
            stub = limits_pb2_grpc.LimitServiceStub(channel)
            stub.SetTenantLimits(request, metadata=self.metadata(), timeout=self.call_timeout_s)
        return key


class _Program:
    """A running program with its output."""

    def __init__(self, language: Language, pool: RestartedPool) -> None:
        self.language = language
        self.is_halted = False
        """Whether it was halted at its line."""
        self._output = pool.folder / f"{language.name}.out"
        self._errors = pool.folder / f"{language.name}.err"
        variables = {"TINKERPOOL_BASE_URL": pool.url, "TINKERPOOL_API_KEY": pool.new_tenant(language.name)}
        if pool.certificate_file is not None:
            variables["TINKERPOOL_CERTIFICATE"] = str(pool.certificate_file)
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                language.command,
                cwd=pool.folder,
                env=os.environ | dict(language.environment) | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    @property
    def has_ended(self) -> bool:
        """Whether the program has ended."""
        return self._process.poll() is not None

    @property
    def output(self) -> str:
        """Its standard output so far."""
        return self._output.read_text(encoding="utf-8", errors="replace")

    @property
    def errors(self) -> str:
        """Its standard error so far."""
        return self._errors.read_text(encoding="utf-8", errors="replace")

    @property
    def has_lost(self) -> bool:
        """Whether its stream broke, and a call had no pool."""
        return all(line.search(self.errors) for line in LOST)

    def halt_at_the_line(self) -> None:
        """Halt the process if it has come to its line."""
        if not self.is_halted and HALTS_AT in self.output:
            self._process.send_signal(signal.SIGSTOP)
            self.is_halted = True

    def go_on(self) -> None:
        """Let a halted process go on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()
        self._process.wait()

    def result(self) -> Run:
        """Return what the program did."""
        fault = ""
        if (code := self._process.poll()) is None:
            fault = f"it had not ended after {PHASE_S:g} s"
        elif code != 0:
            fault = f"it ended with {code}"
        elif REFUSED.search(self.errors) is None:
            fault = "no refusal with a delay came: expected RATE_LIMITED while it sent its steps"
        elif not self.has_lost:
            fault = "the restart of the pool broke neither its stream nor a call: expected both"
        return Run(language=self.language.name, output=self.output, errors=self.errors, fault=fault)


def run(languages: Sequence[Language], folder: Path, *, is_tls: bool, is_killed: bool) -> list[Run]:
    """Run the programs at one pool, and restart it: after a `kill -9`, or after a SIGTERM.

    Raises PoolEnded if the pool does not start, TimeoutExpired if it does not stop.
    """
    folder.mkdir()
    pool = RestartedPool(folder, is_tls=is_tls)
    programs: list[_Program] = []
    try:
        pool.start()
        programs += [_Program(language, pool) for language in languages]

        def halt_at_the_line() -> bool:
            for program in programs:
                program.halt_at_the_line()
            return all(program.is_halted or program.has_ended for program in programs)

        _wait_until(halt_at_the_line)
        pool.process.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
        for program in programs:
            program.go_on()  # a connection that does not answer would hold up the stop
        pool.process.wait(STOP_S)
        _wait_until(lambda: all(program.has_lost or program.has_ended for program in programs))
        pool.start()
        _wait_until(lambda: all(program.has_ended for program in programs))
        return [program.result() for program in programs]
    finally:
        for program in programs:
            program.end()
        if pool.exit_code is None:
            pool.stop(STOP_S)


def _wait_until(is_done: Callable[[], bool]) -> None:
    """Wait until something is done, or for as long as a phase may take: then the programs have failed."""
    deadline = time.monotonic() + PHASE_S
    while not is_done() and time.monotonic() < deadline:
        time.sleep(POLL_S)

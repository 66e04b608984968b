"""The process of a pool in the background: start it, stop it, read its log."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from coordinator.cli.options import RAY_FILE
from tinkerpool.cli.show import CliError
from tinkerpool.serving import READY_FILE, Serving, running_pid
from workers.pool.factory import remove_leftovers

LOG_FILE = "serve.log"
LOG_BYTES_MAX = 16 << 20
"""A start renames a log that is longer."""
POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
"""How long a pool that did not become ready may take to stop."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start(data_dir: Path, serve_arguments: Sequence[str], on_line: Callable[[str], None], timeout_s: float) -> Serving:
    """Start `tinkerpool serve` in a session of its own and wait until it is ready. Raises CliError.

    No pool runs on the data directory. While it waits, it calls `on_line` with each new line of the log. A signal ends
    the wait, and the pool with it.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(
            f"cannot make the folder {data_dir} ({error.strerror}): give another data directory with --data-dir"
        ) from None
    ready_file = data_dir / READY_FILE
    ready_file.unlink(missing_ok=True)
    log_file = _fresh_log(data_dir)
    log_start = log_file.stat().st_size if log_file.exists() else 0
    with _counted_signals() as num_signals:
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tinkerpool.cli", "serve", "--data-dir", str(data_dir), *serve_arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        lines = _lines_from(log_file, log_start)
        try:
            while time.monotonic() < deadline and not num_signals():
                for line in next(lines):
                    on_line(line)
                if (serving := Serving.read(ready_file)) is not None and serving.pid == process.pid:
                    return serving
                if process.poll() is not None:
                    raise CliError(_start_failure(log_file, log_start, process.returncode))
                time.sleep(POLL_S)
        except BaseException:
            _end(process, data_dir, num_signals)
            raise
        _end(process, data_dir, num_signals)
        if num_signals():
            raise CliError("interrupted: the pool that was starting was stopped")
    raise CliError(f"the pool was not ready after {timeout_s:.0f} s and was stopped; its log is {log_file}")


def stop(data_dir: Path, timeout_s: float) -> int | None:
    """Stop the pool on a data directory and wait until it has ended; return its process id. Raises CliError.

    Returns None if no pool runs there. One that is stopping already is only waited for.
    """
    pid = running_pid(data_dir)
    if pid is None:
        return None
    must_signal = True
    deadline = time.monotonic() + timeout_s
    while running_pid(data_dir) == pid or _is_alive(pid):
        if must_signal and _catches(pid, signal.SIGINT):
            must_signal = False
            try:
                os.kill(pid, signal.SIGINT)  # SIGTERM may leave workers for the next coordinator
            except PermissionError:
                raise CliError(f"the pool on {data_dir} (process {pid}) belongs to another user") from None
            except ProcessLookupError:
                pass
        if time.monotonic() > deadline:
            raise CliError(
                f"the pool (process {pid}) has not stopped after {timeout_s:.0f} s; it may still be finishing a cycle. "
                f"`tinkerpool logs` shows more; `kill -9 {pid}` ends it at once, and no acknowledged operation is lost"
            )
        time.sleep(POLL_S)
    return pid


def tail(data_dir: Path, num_lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last lines of the log and then, with `follow`, each new line without end. Raises CliError."""
    path = data_dir / LOG_FILE
    try:
        log = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise CliError(
            f"there is no log at {path}: only `tinkerpool up` writes one; `tinkerpool serve` logs to its own terminal"
        ) from None
    with log:
        yield from deque(log, maxlen=num_lines)
        while follow:
            if line := log.readline():
                yield line
            else:
                time.sleep(POLL_S)


def _fresh_log(data_dir: Path) -> Path:
    """Return the path of the log. A long log is renamed first, and replaces the one renamed before it."""
    path = data_dir / LOG_FILE
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.rename(path.with_suffix(".log.1"))
    return path


def _lines_from(log_file: Path, start: int) -> Iterator[list[str]]:
    """Yield, each time, the whole lines that the log has got since the last time, without empty ones."""
    with log_file.open(encoding="utf-8", errors="replace") as log:
        log.seek(start)
        rest = ""
        while True:
            *lines, rest = (rest + log.read()).split("\n")
            yield [line.strip() for line in lines if line.strip()]


def _start_failure(log_file: Path, start: int, returncode: int) -> str:
    """Return the message for a pool that ended while it started: the end of its log."""
    lines = [line for line in _text_from(log_file, start).split("\n") if line.strip()]
    ending = "\n".join(f"  {line}" for line in lines[-12:])
    return f"the pool ended while it started (exit code {returncode}). The end of its log, {log_file}:\n{ending}"


def _text_from(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def _catches(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process handles a signal, or the system does not tell.

    A pool that is stopping handles none, so that the next one ends it at once.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return True
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "")
    return not caught or bool(int(caught, 16) >> (signum - 1) & 1)


def _is_alive(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z")
    except PermissionError:
        return True
    except (OSError, IndexError):
        return False


@contextlib.contextmanager
def _counted_signals() -> Iterator[Callable[[], int]]:
    """Count signals that would end this process, instead of ending it; yield a function that returns their number."""
    seen: list[int] = []
    previous = {signum: signal.signal(signum, lambda signum, _: seen.append(signum)) for signum in _SIGNALS}
    try:
        yield lambda: len(seen)
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _end(process: subprocess.Popen[bytes], data_dir: Path, num_signals: Callable[[], int]) -> None:
    """Stop a pool that is starting; after a while, or at the second signal, kill it and its Ray."""
    process.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline and num_signals() < 2:
        time.sleep(POLL_S)
    if process.poll() is None:
        process.kill()
        process.wait()
        remove_leftovers(data_dir / RAY_FILE)

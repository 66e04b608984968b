"""A pool in the background: start it, find it, end it, read its log. Knows processes and files, not what a pool does.

Whether a pool runs on a data directory is known by the lock that its coordinator holds for life, never by a process id
that may be somebody else's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOG_FILE = "serve.log"
LOG_BYTES_MAX = 16 << 20
READY_FILE = "serving.json"
POLL_S = 0.1


class BackgroundError(Exception):
    """What was asked cannot be done; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a pool that is ready says of itself."""

    url: str
    pid: int
    data_dir: str
    models: tuple[str, ...]
    http_url: str = ""
    """Where the Tinker SDK finds it; empty if there is no such door."""

    def write(self, path: Path) -> None:
        """Write it so that a reader sees all of it or nothing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{self.pid}")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.rename(path)

    @classmethod
    def read(cls, path: Path) -> Serving | None:
        """What is there, None if nothing or nothing of ours."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**fields, "models": tuple(fields["models"])})
        except (OSError, ValueError, KeyError, TypeError):
            return None


def running_pid(data_dir: Path) -> int | None:
    """Process id of the coordinator on a data directory; None if there is none."""
    try:
        with (data_dir / "lock").open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(lock.read().strip() or 0) or None
    except (FileNotFoundError, ValueError):
        pass
    return None


def start(data_dir: Path, serve_arguments: Sequence[str], on_wait: Callable[[str], None], timeout_s: float) -> Serving:
    """Start `tinkerpool serve` in a session of its own and wait until it is ready. Raises BackgroundError.

    `on_wait` is called all the while with the last line of the log.
    """
    if (pid := running_pid(data_dir)) is not None:
        serving = Serving.read(data_dir / READY_FILE)
        where = f"at {serving.url} " if serving else ""
        raise BackgroundError(
            f"a pool is already running {where}on {data_dir} (process {pid}); stop it with `tinkerpool down`, or give "
            "another --data-dir and --port"
        )
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    ready_file = data_dir / READY_FILE
    ready_file.unlink(missing_ok=True)
    log_file = _fresh_log(data_dir)
    log_start = log_file.stat().st_size if log_file.exists() else 0
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinkerpool.cli", "serve", "--data-dir", str(data_dir), *serve_arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            if (serving := Serving.read(ready_file)) is not None and serving.pid == process.pid:
                return serving
            if process.poll() is not None:
                raise BackgroundError(_last_words(log_file, log_start, process.returncode))
            on_wait(_last_line(log_file, log_start))
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        _end(process)
        raise
    _end(process)
    raise BackgroundError(f"the pool was not ready after {timeout_s:.0f} s and was stopped; its log is {log_file}")


def stop(data_dir: Path, timeout_s: float) -> int:
    """End the pool on a data directory and wait for it; returns its process id. Raises BackgroundError."""
    pid = running_pid(data_dir)
    if pid is None:
        raise BackgroundError(f"no pool is running on {data_dir}; `tinkerpool up` starts one")
    try:
        os.kill(pid, signal.SIGTERM)
    except PermissionError:
        raise BackgroundError(f"the pool on {data_dir} (process {pid}) belongs to another user") from None
    except ProcessLookupError:
        pass
    deadline = time.monotonic() + timeout_s
    while running_pid(data_dir) == pid or _is_alive(pid):
        if time.monotonic() > deadline:
            raise BackgroundError(
                f"the pool (process {pid}) has not stopped after {timeout_s:.0f} s; it may still be finishing a cycle. "
                f"`tinkerpool logs` says more; `kill -9 {pid}` ends it at once, and nothing acknowledged is lost"
            )
        time.sleep(POLL_S)
    return pid


def tail(data_dir: Path, num_lines: int, *, follow: bool) -> Iterator[str]:
    """The last lines of the log, then, if asked to follow, each new one for ever. Raises BackgroundError."""
    path = data_dir / LOG_FILE
    try:
        log = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise BackgroundError(
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
    """The log file; a long one is put aside first, and the one put aside before it dropped."""
    path = data_dir / LOG_FILE
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.rename(path.with_suffix(".log.1"))
    return path


def _last_line(log_file: Path, start: int) -> str:
    lines = _text_from(log_file, start).split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _last_words(log_file: Path, start: int, returncode: int) -> str:
    """Why a pool that ended while starting did so: the end of what it said."""
    lines = [line for line in _text_from(log_file, start).split("\n") if line.strip()]
    ending = "\n".join(f"  {line}" for line in lines[-12:])
    return f"the pool ended while it started (exit code {returncode}). The end of its log, {log_file}:\n{ending}"


def _text_from(path: Path, start: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


def _is_alive(pid: int) -> bool:
    """Whether the process is there and not merely a zombie of a parent that does not wait for it."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z")
    except PermissionError:
        return True
    except (OSError, IndexError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""Processes that we may have to end: held so that nobody else is meant, and found again by a mark that they inherit.

A pid goes to another process once its own has ended, and whose parent was killed is nobody's child. So a process is
held by a pidfd, which stays with it; and those that belong together carry a mark, a variable of their environment with
a value that was never used before.

Main invariant: a signal reaches only what was checked while it was held. Linux only; elsewhere nothing is held or
found.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "TINKERPOOL_RAY_OWNER"
"""Its value, in the environment of every process of one private Ray, is that Ray's mark."""
STARTING_S = 0.05
"""How long a process may take from its fork to its own program; microseconds, where cores are free."""


class Process:
    """One process, and no other that gets its pid later. Close it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    @classmethod
    def hold(cls, pid: int) -> Process | None:
        """None where there is no such process, or no such handle."""
        with suppress(AttributeError, OSError):
            return cls(pid, os.pidfd_open(pid))
        return None

    @property
    def name(self) -> str:
        """What its program is called, cut to 15 characters; empty when it has ended."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether it ends within that time."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Send SIGKILL; nothing happens if it has ended, or is somebody else's."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._pidfd)


def find_marked(mark: str) -> list[Process]:
    """Hold every process with the mark that we may look into, but for this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        # Looked at twice: most processes need no handle, and what has none yet may give its pid away.
        if pid != os.getpid() and _is_marked(pid, mark) and (process := Process.hold(pid)) is not None:
            if _is_marked(pid, mark):
                found.append(process)
            else:
                process.close()
    return found


def kill_marked(mark: str, timeout_s: float) -> tuple[int, int]:
    """Kill every process with the mark and what they start meanwhile; returns how many ended, and how many did not."""
    deadline = time.monotonic() + timeout_s
    ended: set[int] = set()
    while found := find_marked(mark) or _find_again(mark):
        for process in found:
            process.kill()
        for process in found:
            if process.has_ended(max(0.0, deadline - time.monotonic())):
                ended.add(process.pid)
            process.close()
        if time.monotonic() >= deadline:
            break
    return len(ended), len({process.pid for process in found} - ended)


def _find_again(mark: str) -> list[Process]:
    """A process that is just being started has no environment to look at, for an instant."""
    time.sleep(STARTING_S)
    return find_marked(mark)


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False

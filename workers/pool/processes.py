"""Holds processes, so that a signal reaches no other, and finds them by a mark that they inherit.

A pid is used again after its process has ended, and a process whose parent was killed belongs to no parent. So a
process is held by a pidfd, which never refers to another process; and processes that belong together have a mark: a
variable of their environment with a unique value.

Main invariant: a signal goes only to a process that was checked while it was held. Linux only; on other systems no
process is held or found.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK_VARIABLE = "TINKERPOOL_RAY_OWNER"
"""The variable whose value is the mark of one private Ray."""
STARTING_S = 0.05
"""Most seconds from a process's fork to its own program; microseconds on a quiet machine."""


class Process:
    """A handle of one process, never of a later one with the same pid. Close it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    @classmethod
    def hold(cls, pid: int) -> Process | None:
        """Return a handle of the process; None if there is no such process, or the system has no such handles."""
        with suppress(AttributeError, OSError):
            return cls(pid, os.pidfd_open(pid))
        return None

    @property
    def name(self) -> str:
        """The program's name, cut to 15 characters; empty after the end."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
        return ""

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s` for the end; return whether it came."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def kill(self) -> None:
        """Send SIGKILL. Does nothing after the end, or to another user's process."""
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Release the handle."""
        os.close(self._pidfd)


def find_marked(mark: str) -> list[Process]:
    """Hold every other process with the mark that this user may inspect."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        # Checked twice: most processes need no handle, and before it is held a process may end and its pid be reused.
        if pid != os.getpid() and _is_marked(pid, mark) and (process := Process.hold(pid)) is not None:
            if _is_marked(pid, mark):
                found.append(process)
            else:
                process.close()
    return found


def kill_marked(mark: str, timeout_s: float) -> tuple[int, int]:
    """Kill every process with the mark, and those they start meanwhile; return how many ended, and how many did not."""
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
    """Search again after a pause: a process that is just being started has no environment yet."""
    time.sleep(STARTING_S)
    return find_marked(mark)


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK_VARIABLE}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False

"""Processes with a mark are found, also orphans, and killed; no other process is."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from workers.pool import processes
from workers.pool.processes import MARK_VARIABLE, Process, find_marked, kill_marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd_open of Linux")

START_AND_LEAVE = """
import subprocess, sys
print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""
Start = Callable[[str | None], subprocess.Popen[bytes]]


@pytest.fixture
def mark() -> Iterator[str]:
    mark = secrets.token_hex(8)
    yield mark
    kill_marked(mark, 5.0)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_one(mark: str | None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["cat"], env=environment(mark), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"!")
        process.stdin.flush()
        assert process.stdout.read(1) == b"!", "the process has not started its program"
        return process

    yield start_one
    for process in started:
        with process:
            process.kill()


def environment(mark: str | None) -> dict[str, str]:
    return {**os.environ, **({MARK_VARIABLE: mark} if mark else {})}


def pids(found: list[Process]) -> set[int]:
    for process in found:
        process.close()
    return {process.pid for process in found}


def test_marked_processes_and_orphans_are_killed_and_no_others(mark: str, start: Start) -> None:
    marked = start(mark)
    others = [start(None), start(mark + "0"), start(mark[:-1])]
    done = subprocess.run(
        [sys.executable, "-c", START_AND_LEAVE], env=environment(mark), capture_output=True, text=True, check=True
    )
    orphan = int(done.stdout)
    assert pids(find_marked(mark)) == {marked.pid, orphan}
    assert kill_marked(mark, 5.0) == (2, 0)
    assert marked.wait(60) == -9
    assert pids(find_marked(mark)) == set()
    assert [process.poll() for process in others] == [None] * 3
    assert kill_marked(mark, 5.0) == (0, 0)


def test_this_process_never_finds_itself(mark: str) -> None:
    # A process finds its own mark in /proc only if it was started with it.
    program = "import sys; from workers.pool.processes import kill_marked; print(kill_marked(sys.argv[1], 5.0))"
    command = [sys.executable, "-c", program, mark]
    done = subprocess.run(command, env=environment(mark), capture_output=True, text=True, check=True)
    assert done.stdout == "(0, 0)\n"


def test_reused_pid_is_not_killed(mark: str, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    marked, other = start(mark), start(None)
    # Patched: the marked process ends, and another process gets its pid, after the read of /proc and before the handle.
    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", lambda pid: pidfd_open(other.pid if pid == marked.pid else pid))
    is_marked, reads = processes._is_marked, []

    def read(pid: int, mark: str) -> bool:
        reads.append(pid)
        return is_marked(other.pid if reads.count(pid) > 1 else pid, mark)

    monkeypatch.setattr(processes, "_is_marked", read)
    assert kill_marked(mark, 0.5)[0] == 0
    assert other.poll() is None


def test_held_process_is_safe_to_use_after_its_end(start: Start) -> None:
    started = start(None)
    process = Process.hold(started.pid)
    assert process is not None
    assert process.name == "cat"
    assert not process.has_ended()
    process.kill()
    assert process.has_ended(5.0)
    started.wait(60)
    process.kill()
    assert process.name == ""
    process.close()
    assert Process.hold(started.pid) is None

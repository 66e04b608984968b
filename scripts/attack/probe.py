"""A probe in the coordinator's process: the costs of its event loop's callbacks, and how late its timers are.

The product has no code for it: the probe replaces `asyncio.Handle._run`. Processor time is that of the loop's thread,
so that other processes on the machine do not count.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

BEAT_S = 0.005
"""Interval of the timer whose lateness is measured."""


@dataclass(slots=True)
class LoopFigures:
    """Measurements since the last reset, in milliseconds."""

    longest_cpu_ms: float = 0.0
    """Processor time of the longest callback."""
    longest_name: str = ""
    """That callback."""
    longest_collection_ms: float = 0.0
    """Processor time of the longest garbage collection; the callback in which it fell includes it."""
    longest_wall_ms: float = 0.0
    """Wall time of the callback that took longest by the clock."""
    late_ms: list[float] = field(default_factory=list)
    """How late each beat of a timer was."""


class Probe:
    """Measures the event loop of the main thread."""

    def __init__(self) -> None:
        self.figures = LoopFigures()
        self._main = threading.get_ident()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: tuple[Any, int, int] | None = None
        self._collection_ns = 0

    def install(self) -> None:
        """Measure every callback from now on."""
        handle_type: Any = asyncio.Handle
        run_handle = handle_type._run

        def run(handle: Any) -> None:
            if threading.get_ident() != self._main:
                run_handle(handle)
                return
            wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
            self._running = (handle, cpu_ns, wall_ns)
            try:
                run_handle(handle)
            finally:
                self._running = None
                self._note(handle, time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns)
                if handle._loop is not self._loop:
                    self._loop = handle._loop
                    self._beat(handle._loop, handle._loop.time())

        handle_type._run = run
        gc.callbacks.append(self._collecting)

    def take(self) -> LoopFigures:
        """Return the measurements since the last call; a callback that runs now counts with what it has used."""
        if (running := self._running) is not None:
            handle, cpu_ns, wall_ns = running
            used_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(self._main)) - cpu_ns
            self._note(handle, used_ns, time.perf_counter_ns() - wall_ns)
        figures, self.figures = self.figures, LoopFigures()
        return figures

    def _note(self, handle: Any, cpu_ns: int, wall_ns: int) -> None:
        figures = self.figures
        if cpu_ns > figures.longest_cpu_ms * 1e6:
            figures.longest_cpu_ms, figures.longest_name = cpu_ns / 1e6, _name_of(handle)
        figures.longest_wall_ms = max(figures.longest_wall_ms, wall_ns / 1e6)

    def _collecting(self, phase: str, _info: dict[str, int]) -> None:
        """Measure a garbage collection, which the callback in which it falls pays for."""
        if threading.get_ident() != self._main:
            return
        if phase == "start":
            self._collection_ns = time.thread_time_ns()
        else:
            used_ms = (time.thread_time_ns() - self._collection_ns) / 1e6
            self.figures.longest_collection_ms = max(self.figures.longest_collection_ms, used_ms)

    def _beat(self, loop: asyncio.AbstractEventLoop, expected: float) -> None:
        now = loop.time()
        self.figures.late_ms.append((now - expected) * 1e3)
        loop.call_later(BEAT_S, self._beat, loop, now + BEAT_S)


def _name_of(handle: Any) -> str:
    """Return the name of a callback; for a task the coroutine, and the innermost one that it awaits."""
    callback = handle._callback
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    outer: Any = owner.get_coro()
    inner = outer
    while (awaited := getattr(inner, "cr_await", None)) is not None and hasattr(awaited, "cr_code"):
        inner = awaited
    names = dict.fromkeys(str(getattr(each, "__qualname__", each)) for each in (outer, inner))
    return " > ".join(names)


class RemoteProbe:
    """The probe of another process."""

    def __init__(self, path: Path) -> None:
        self._connection = Client(str(path), family="AF_UNIX")

    def reset(self) -> None:
        """Begin new measurements."""
        self.read()

    def read(self) -> LoopFigures:
        """Return the measurements since the last call, and begin new ones. Raises EOFError if the process ended."""
        self._connection.send("read")
        figures: LoopFigures = self._connection.recv()
        return figures

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def answer_at(path: str, probe: Probe) -> None:
    """Let a `RemoteProbe` read this process's measurements at a socket, on a thread."""
    listener = Listener(path, family="AF_UNIX")
    threading.Thread(target=_answer, args=(listener, probe), name="probe", daemon=True).start()


def _answer(listener: Listener, probe: Probe) -> None:
    with listener:
        connection = listener.accept()
    while True:
        try:
            connection.recv()
            connection.send(probe.take())
        except (EOFError, OSError):
            return

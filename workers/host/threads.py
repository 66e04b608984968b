"""How many threads the next pass or decode step runs with: as many as there are cores that no other process uses.

Threads that synchronize after every operation go at the pace of the slowest. If another process holds one of two cores,
a pass on two threads takes several times as long as on one. So passes give up such cores, and take them back when they
are free. Use it only where bits do not depend on the number of threads; `selftest.thread_invariance` tries that.

Depends on processor time; not on what the threads compute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.host.free_memory import read_kernel_file

PROC_STAT = Path("/proc/stat")
NUM_CORES, CORE_BYTES = os.cpu_count() or 1, 256
"""Of the machine, and how long a core's line in that file may be: ten numbers of 64 bits."""
WINDOW_S = 0.25
"""Length of passes over which the cores are watched before deciding. The kernel counts in hundredths of a second."""
MARGIN_DOWN, MARGIN_UP = 0.4, 0.2
"""In cores: other processes may use so much of a thread's core before the thread is given up, and only so much when it
is taken back. Two margins, so that a load between them does not make the number swing."""


@dataclass(frozen=True, slots=True)
class CoreTimes:
    """Seconds since the machine, or this process, started."""

    wall_s: float
    used_s: float
    """By all processes, on the cores that this process may use, summed over them."""
    own_s: float
    """By this process, all threads."""


def read_core_times() -> CoreTimes | None:
    """Return the present state; None where the system does not tell."""
    try:
        lines = read_kernel_file(PROC_STAT, (NUM_CORES + 1) * CORE_BYTES).split("\n")
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = 0
    for line in lines[1:]:  # the first is of all cores
        name, *fields = line.split(" ")
        if not name.startswith("cpu"):
            break
        if name in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return CoreTimes(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time())


class ThreadChoice:
    """Chooses the number of threads for one engine. One thread only."""

    def __init__(
        self, num_threads: int, num_cores: int, read: Callable[[], CoreTimes | None] = read_core_times
    ) -> None:
        """Choose at most `num_threads`, on a machine that gives this process `num_cores`; `read` measures them."""
        self.num_threads = num_threads
        self._num_threads_max = num_threads
        self._num_cores = num_cores
        self._read = read
        self._wall_s = self._foreign_s = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run a pass with the chosen number of threads; restore the number afterwards."""
        if self._num_threads_max == 1:
            yield
            return
        before, num_before = self._read(), torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(num_before)
            after = self._read()
            if before is not None and after is not None:
                self._observe(before, after)

    def _observe(self, before: CoreTimes, after: CoreTimes) -> None:
        """Add a pass to the window, and decide at the window's end."""
        self._wall_s += after.wall_s - before.wall_s
        self._foreign_s += (after.used_s - before.used_s) - (after.own_s - before.own_s)
        if self._wall_s < WINDOW_S:
            return
        num_free = self._num_cores - self._foreign_s / self._wall_s
        num_kept, num_taken = int(num_free + MARGIN_DOWN), int(num_free + MARGIN_UP)
        chosen = max(num_taken, min(num_kept, self.num_threads))
        self.num_threads = max(1, min(chosen, self._num_threads_max))
        self._wall_s = self._foreign_s = 0.0

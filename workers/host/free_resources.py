"""What other processes leave to this one now: memory (the machine's, its control groups', a device's), and cores.

Both are measured around every pass, because other processes come and go. Threads that synchronize after every operation
go at the pace of the slowest: if another process holds one of two cores, a pass on two threads takes several times as
long as on one. So passes give up such cores, and take them back when they are free. Use `ThreadChoice` only where bits
do not depend on the number of threads; `selftest.thread_invariance` tries that.

Depends on the system's files and on processor time; not on what memory and threads are for.

Main invariant: a missing limit, or a missing or unreadable file, limits nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from workers.host.allocator import kept_bytes

READ_BYTES = 1 << 14
PLENTY_BYTES = 1 << 33
"""If this much is free, the library's free blocks are not counted: that takes as long as a small pass's products."""
UNLIMITED_BYTES = 1 << 60
"""In version 1 of control groups a limit above this number means no limit."""
PROC_STAT = Path("/proc/stat")
NUM_CORES, CORE_BYTES = os.cpu_count() or 1, 256
"""Of the machine, and how long a core's line in that file may be: ten numbers of 64 bits."""
WINDOW_S = 0.25
"""Length of passes over which the cores are watched before deciding. The kernel counts in hundredths of a second."""
MARGIN_DOWN, MARGIN_UP = 0.4, 0.2
"""In cores: other processes may use so much of a thread's core before the thread is given up, and only so much when it
is taken back. Two margins, so that a load between them does not make the number swing."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of files in a version of control groups."""

    root: str
    limit: str
    usage: str
    reclaimable: str
    """Key in `memory.stat` of cached files, which the kernel drops when memory is short."""


_VERSION_1 = _Files("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process may still allocate on a device, with the library's free blocks."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    free = free_host_bytes()
    if free >= PLENTY_BYTES:
        return free
    return min(free + kept_bytes(), PLENTY_BYTES)


class MemoryShare:
    """The part of a device's free memory that one engine may take."""

    def __init__(
        self, device: torch.device, share: float = 1.0, measure: Callable[[torch.device], int] = free_bytes
    ) -> None:
        """Take `share`, above 0 and at most 1, of the bytes that `measure` finds free."""
        self._device = device
        self._share = share
        self._measure = measure
        self._promised_bytes = 0

    def promise(self, num_bytes: int) -> None:
        """Keep this much free from now on, instead of the last promise: memory that the engine takes by and by."""
        self._promised_bytes = num_bytes

    def free_bytes(self) -> int:
        """Return the bytes that the engine may still allocate, measured now, without those that are promised."""
        return int(self._share * self._measure(self._device)) - self._promised_bytes


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the bytes available on the machine and in every control group of this process. `root` has proc and sys."""
    left = (_left_in(folder, files) for folder, files in _limited_groups(root))
    return max(0, min([_available_bytes(root), *(num_bytes for num_bytes in left if num_bytes is not None)]))


def _available_bytes(root: Path) -> int:
    """Return the bytes that can be taken without swapping; all of the machine's memory if unknown (not Linux)."""
    try:
        lines = read_kernel_file(root / "proc/meminfo").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def _limited_groups(root: Path) -> tuple[tuple[Path, _Files], ...]:
    """Return the control groups with a limit, from the process's own outwards. Cached, for the search is slow."""
    groups: dict[Path, _Files] = {}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        top = root / files.root
        group = top / path.lstrip("/")
        # In a container the path may be the host's; the container's own group is then at the top.
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and _left_in(folder, files) is not None:
                groups[folder] = files
    return tuple(groups.items())


def _left_in(folder: Path, files: _Files) -> int | None:
    """Return the bytes left in one group; None without a limit."""
    try:
        limit = read_kernel_file(folder / files.limit).strip()
        if limit == "max" or int(limit) > UNLIMITED_BYTES:
            return None
        usage, stat = int(read_kernel_file(folder / files.usage)), read_kernel_file(folder / "memory.stat").split()
    except OSError:
        return None
    statistics = dict(zip(stat[::2], stat[1::2], strict=True))
    return int(limit) - usage + int(statistics.get(files.reclaimable, 0))


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


def read_kernel_file(path: Path, num_bytes: int = READ_BYTES) -> str:
    """Return the first bytes of a file with the kernel's state as it is now, from `/proc` or a control group.

    The file stays open: it is read around every pass and decode step, and opening takes several times as long as
    reading. Raises OSError if the file does not exist, or not any more.
    """
    return os.pread(_opened(path), num_bytes, 0).decode()


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

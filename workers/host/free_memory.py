"""How much memory this process may still allocate: on the machine, in its control groups, on a device.

Measured around every pass, because other processes come and go. Depends on the system's files; not on what the memory
is for. Main invariant: a missing limit, or a missing or unreadable file, limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
        return int(free + library_bytes("reserved_bytes", device) - library_bytes("allocated_bytes", device))
    free = free_host_bytes()
    if free >= PLENTY_BYTES:
        return free
    return min(free + kept_bytes(), PLENTY_BYTES)


def library_bytes(name: str, device: torch.device) -> int:
    """Return the bytes of a GPU in one of the library's statistics.

    The library's functions for one number flatten and sort all of them first, which takes as long as many launches.
    """
    statistics = torch.cuda.memory_stats_as_nested_dict(device)  # empty until the process has used a GPU
    return int(statistics[name]["all"]["current"]) if statistics else 0


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


def read_kernel_file(path: Path, num_bytes: int = READ_BYTES) -> str:
    """Return the first bytes of a file with the kernel's state as it is now, from `/proc` or a control group.

    The file stays open: it is read around every pass and decode step, and opening takes several times as long as
    reading. Raises OSError if the file does not exist, or not any more.
    """
    return os.pread(_opened(path), num_bytes, 0).decode()


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

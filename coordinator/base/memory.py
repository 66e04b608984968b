"""How the coordinator's process keeps its memory small and its garbage collections short.

Does not depend on what is in memory. Main invariants: a large request's blocks go back to the system when it is done;
a collection walks over what was made since the last full one, and not over everything.
"""

from __future__ import annotations

import ctypes
import gc
import platform

_MMAP_THRESHOLD = -3
"""A parameter of glibc's `mallopt`."""
_MAPPED_BYTES_MIN = 1 << 20
"""Blocks from this size on are mapped one by one and returned when freed. Without a fixed limit the library raises it
with each larger block that is freed, up to 32 MiB: then the pieces of large requests leave holes in the heap."""

LEFT_OUT_QUIET_MAX = 50_000
"""Objects that are left out of collections until a quiet moment; walking over them takes 10 ms."""
LEFT_OUT_MAX = 2_000_000
"""Objects that are left out until the next sweep, whatever goes on: a gigabyte of cycles would be too much."""
_OLDEST = 2
"""The generation of a full collection."""


def return_large_blocks() -> None:
    """Let the C library return large blocks to the system when they are freed. Does nothing without glibc.

    Call this before an engine starts in this process: it keeps its memory, and decides after us.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)


class Collections:
    """Keeps garbage collections short: objects that survive a full one are left out of those that follow.

    The collector would walk over all of them, in the middle of some callback: 110 ms for those of a new pool, 300 ms
    for thousands of open calls. Objects without cycles are freed at once, also when they are left out; cycles among
    those left out are found by `sweep`, in a quiet moment.
    """

    def __init__(self) -> None:
        """Leave out everything that exists now, for it stays until the end."""
        self._is_frozen_by_others = gc.get_freeze_count() > 0
        gc.collect()
        gc.freeze()
        self._num_permanent = gc.get_freeze_count()
        gc.callbacks.append(self._collected)

    def sweep(self, *, is_quiet: bool) -> None:
        """Collect the objects that were left out, if there are many: in a quiet moment, or far too many."""
        num_left_out = gc.get_freeze_count() - self._num_permanent
        if num_left_out > (LEFT_OUT_QUIET_MAX if is_quiet else LEFT_OUT_MAX):
            gc.unfreeze()
            gc.collect()  # `_collected` leaves out what remains
            self._num_permanent = gc.get_freeze_count()

    def close(self) -> None:
        """Collect as usual again.

        If this process left out objects before, all of them stay left out: they are not told apart.
        """
        gc.callbacks.remove(self._collected)
        if not self._is_frozen_by_others:
            gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == _OLDEST:
            gc.freeze()

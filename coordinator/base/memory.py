"""How the coordinator's process keeps its memory small and its garbage collections short.

Does not depend on what is in memory. Main invariant: a large request's blocks go back to the system when it is done.
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


def return_large_blocks() -> None:
    """Let the C library return large blocks to the system when they are freed. Does nothing without glibc.

    Call this before an engine starts in this process: it keeps its memory, and decides after us.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES_MIN)


def keep_out_of_collections() -> None:
    """Exclude the objects that exist now from garbage collections, for they stay until the end.

    The collector would walk over all of them, for 110 ms in the middle of some callback, again and again.
    """
    gc.collect()
    gc.freeze()

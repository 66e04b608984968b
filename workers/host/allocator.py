"""Keeps the memory of one pass for the next, unless memory is short.

The C library returns freed memory to the system when much of it is at the end of the heap. A pass frees all of its
memory, and the next pass would fault in every page again, zeroed: some 25,000 page faults, a tenth of a small model's
pass. The cost of keeping it is fragmentation: half as much memory again for a pass that recomputes its layers.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""
KEPT_BYTES = 1 << 29
"""Freed memory at the end of the heap that stays with the process."""
MAPPED_BYTES_MIN = 1 << 25
"""Allocations from this size on are mapped one by one and returned when freed: the library's own upper limit."""
SHORT_MAPPED_BYTES_MIN = 1 << 17
"""The same limit while memory is short: the library's own lower limit."""


def keep_freed_memory() -> None:
    """Tell the C library of this process to keep freed memory, if it is glibc."""
    if _set(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN):
        _set(M_TRIM_THRESHOLD, KEPT_BYTES)


@contextmanager
def without_holes() -> Iterator[None]:
    """Let the heap grow for small allocations only: larger ones are returned to the system when they are freed."""
    is_set = _set(M_MMAP_THRESHOLD, SHORT_MAPPED_BYTES_MIN)
    try:
        yield
    finally:
        if is_set:
            _set(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)


OUT_OF_MEMORY_SIGNS = ("allocate memory", "CUDA error: out of memory")
"""Of errors without a class of their own: on a CPU; of pinned memory, and of whatever else CUDA allocates."""


def _set(parameter: int, value: int) -> bool:
    """Set a parameter of the C library; return whether it has the parameter and took the value."""
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(parameter, value))


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error means that memory ran out, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten counts of type `size_t`."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


FREE_BLOCKS = "field8"
"""`fordblks`: bytes in free blocks of the heap."""


def kept_bytes() -> int:
    """Return the bytes of freed memory that the C library keeps for later allocations; 0 if unknown."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(getattr(mallinfo(), FREE_BLOCKS))

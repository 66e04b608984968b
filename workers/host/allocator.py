"""Keeps the memory of one pass for the next, unless memory is short.

The C library gives freed memory back to the system when much of it is at the end of the heap. A pass frees all it
took, and the next would get every page anew, zeroed: some 25,000 page faults, a tenth of a small model's pass. The
price are holes between what is still in use; half as much again for a pass that runs its layers twice.
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
"""Single allocations from this size on are mapped and given back at once, as is the library's own upper limit."""
SHORT_MAPPED_BYTES_MIN = 1 << 17
"""The same while memory is short: the library's own lower limit."""


def keep_freed_memory() -> bool:
    """Tell the C library of this process to keep freed memory; returns whether it is one that understands."""
    return _set(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN) and _set(M_TRIM_THRESHOLD, KEPT_BYTES)


@contextmanager
def without_holes() -> Iterator[None]:
    """Meanwhile the heap grows for small things alone: what finds no place in it is given back when it is freed."""
    is_set = _set(M_MMAP_THRESHOLD, SHORT_MAPPED_BYTES_MIN)
    try:
        yield
    finally:
        if is_set:
            _set(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)


def _set(parameter: int, value: int) -> bool:
    """Whether the C library of this process has such a parameter, and took the value."""
    return platform.libc_ver()[0] == "glibc" and bool(ctypes.CDLL(None).mallopt(parameter, value))


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is how a library says that it got no memory, of whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten counts of type `size_t`."""

    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]


FREE_BLOCKS = "field8"
"""`fordblks`: bytes in free blocks of the heap."""


def kept_bytes() -> int:
    """Freed memory that the C library of this process keeps for the next allocations; 0 if it does not tell."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallInfo
    return int(getattr(mallinfo(), FREE_BLOCKS))

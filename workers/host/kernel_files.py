"""Reads small files with the kernel's state, in `/proc` and in control groups.

The files stay open: they are read around every pass and decode step, and opening takes several times as long as
reading.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

READ_BYTES = 1 << 14


def read_kernel_file(path: Path, num_bytes: int = READ_BYTES) -> str:
    """Return the first bytes of a file as it is now. Raises OSError if the file does not exist, or not any more."""
    return os.pread(_opened(path), num_bytes, 0).decode()


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

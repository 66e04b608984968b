"""Reads small files in which the kernel tells its state: of `/proc`, of control groups.

They are read around every pass and every decode step, and opening takes several times as long as reading, so they stay
open. Knows no file's contents.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

READ_BYTES = 1 << 14


def read_kernel_file(path: Path, num_bytes: int = READ_BYTES) -> str:
    """The first bytes of a file as it is now. Raises OSError where there is no such file, or not any more."""
    return os.pread(_opened(path), num_bytes, 0).decode()


@cache
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

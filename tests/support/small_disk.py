"""A small file system of its own, in memory, for tests that fill a disk."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOREIGN_FILE = "a file of others"


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a file system of this size at a new folder, until the block ends. Skips the test where that is refused."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this user may not mount a file system: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, left_bytes: int = 0) -> Path:
    """Fill the disk of a folder with a foreign file, but for some bytes; return the file."""
    path = folder / FOREIGN_FILE
    free = shutil.disk_usage(folder).free - left_bytes
    with path.open("ab") as file:
        while free > 0:
            piece = min(free, 1 << 20)
            try:
                file.write(bytes(piece))
                file.flush()
            except OSError:
                break
            free -= piece
    return path

"""The disk below state folders: a seam, so that a simulation can implement it and lose power.

Main invariant: a change is durable only after `sync`. A file's content is durable after the sync of the file, its name
after the sync of the folder that holds it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Folders of files. Every method raises OSError if the operation fails."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, and its parents, unless it exists."""

    def write(self, path: Path, content: bytes) -> None:
        """Make a file with this content."""

    def sync(self, path: Path) -> None:
        """Make a file's content durable, or a folder's names."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name."""

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""

    def read(self, path: Path) -> bytes:
        """Return a file's content."""

    def size(self, path: Path) -> int:
        """Return the number of bytes in a file."""

    def read_piece(self, path: Path, start: int, num_bytes: int) -> bytes:
        """Return at most `num_bytes` bytes of a file, from byte `start` on; fewer only at its end."""

    def remove(self, folder: Path) -> None:
        """Remove a folder with its content, as far as possible."""


class RealDisk:
    """The machine's disk."""

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """See `Disk`."""
        path.write_bytes(content)

    def sync(self, path: Path) -> None:
        """See `Disk`."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        old.rename(new)

    def names(self, folder: Path) -> list[str]:
        """See `Disk`."""
        return [path.name for path in folder.iterdir()]

    def read(self, path: Path) -> bytes:
        """See `Disk`."""
        return path.read_bytes()

    def size(self, path: Path) -> int:
        """See `Disk`."""
        return path.stat().st_size

    def read_piece(self, path: Path, start: int, num_bytes: int) -> bytes:
        """See `Disk`."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def remove(self, folder: Path) -> None:
        """See `Disk`."""
        shutil.rmtree(folder, ignore_errors=True)

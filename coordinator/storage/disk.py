"""The disk below state folders: a seam, so that a simulation can implement it and lose power.

Main invariant: a change is durable only after `sync`. A file's content is durable after the sync of the file, its name
after the sync of the folder that holds it.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO, Protocol

from workers.contract.contents import LARGE_BYTES, Content, FileContent

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
REMOVING = ".removing-"
"""Prefix of the name of a folder that is being removed."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk, or of a quota."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""The rights of users other than the owner."""
RESERVE_BYTES = 8 << 20
"""Size of the reserve: half for one deletion, which changes about a thousand pages of 4 KiB at most; half to copy the
write-ahead log into the database, so that the next deletion begins the log again."""
RESERVE_FILE = ".room"
logger = logging.getLogger(__name__)


class Disk(Protocol):
    """Folders of files. Every method raises OSError if the operation fails."""

    def make_folder(self, path: Path) -> None:
        """Make a folder, and its parents, unless it exists."""

    def write(self, path: Path, content: bytes) -> None:
        """Make a file with this content."""

    def write_piece(self, path: Path, start: int, content: bytes) -> None:
        """Write into a file from byte `start` on, at most its end; make the file unless it exists."""

    def sync(self, path: Path) -> None:
        """Make a file's content durable, or a folder's names."""

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name."""

    def names(self, folder: Path) -> list[str]:
        """Return the names in a folder."""

    def read(self, path: Path) -> bytes:
        """Return a file's content."""

    def content(self, path: Path) -> Content:
        """Return a file's content: in memory, or the open file if it is large."""

    def size(self, path: Path) -> int:
        """Return the number of bytes in a file."""

    def read_piece(self, path: Path, start: int, num_bytes: int) -> bytes:
        """Return at most `num_bytes` bytes of a file, from byte `start` on; fewer only at its end."""

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its content, as far as possible."""

    def free(self, folder: Path) -> int:
        """Return the bytes that this process may still write on the disk of a folder."""

    def restrict(self, folder: Path, patterns: Sequence[str]) -> None:
        """Take the rights of other users from a folder, and from what is in it by these patterns of names.

        As far as possible, and idempotent. A state folder that other users cannot open is not entered: its files were
        made, or restricted, before.
        """


class Reserve:
    """Room on the disk that only deletions may use: a file, which is removed when a deletion finds the disk full.

    Main invariant: while the reserve is not held, the database takes deletions only; so nothing else uses its room.
    """

    def __init__(self, folder: Path, disk: Disk, floor_bytes: int = 0) -> None:
        """`folder`: its own folder. `floor_bytes`: see `is_low`."""
        self.is_held = False
        """Whether the file is on the disk."""
        self.floor_bytes = floor_bytes
        self._folder = folder
        self._disk = disk

    def take(self) -> bool:
        """Make the file unless it is there; return whether it is held. Does not raise if the disk has no room.

        It is made only where as much room is left beside it, for the small files of a start.
        """
        if self.is_held:
            return True
        path = self._folder / RESERVE_FILE
        try:
            self._disk.make_folder(self._folder)
            if RESERVE_FILE not in self._disk.names(self._folder) or self._disk.size(path) != RESERVE_BYTES:
                if self.free() < 2 * RESERVE_BYTES:
                    return False
                # Bytes that no file system compresses.
                self._disk.write(path, hashlib.shake_256(b"reserve").digest(RESERVE_BYTES))
                for each in (path, self._folder, self._folder.parent):
                    self._disk.sync(each)
        except OSError:
            self._disk.remove(self._folder)
            return False
        self.is_held = True
        return True

    def release(self) -> bool:
        """Remove the file, also one of an earlier start; return whether there was one."""
        was_there = self.is_held or self.is_on_disk()
        self.is_held = False
        if was_there:
            self._disk.remove(self._folder)
        return was_there

    def make_room(self, num_bytes: int) -> bool:
        """Return whether the disk takes this many bytes, and then still a deletion. Release the reserve for that."""
        needed = num_bytes + RESERVE_BYTES // 2
        return self.free() >= needed or (self.release() and self.free() >= needed)

    def free(self) -> int:
        """Return the free bytes of the disk, without those of the reserve."""
        return self._disk.free(self._folder.parent)

    def is_low(self) -> bool:
        """Return whether the disk has less room than `floor_bytes`, so that new work is refused before it is full."""
        return self.free() < self.floor_bytes

    def is_on_disk(self) -> bool:
        """Return whether the file is there, also without being held."""
        try:
            return RESERVE_FILE in self._disk.names(self._folder)
        except OSError:
            return False


class FailedSync:
    """The note that a sync of the database failed: a file, which stays until the next start has emptied the log.

    After a failed sync the write-ahead log may have holes on the disk that the page cache hides. The page cache shows
    the note as well, so the note needs no sync: after a restart of the machine neither hides a hole.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk

    def note(self) -> None:
        """Make the file, as far as the failing disk allows it."""
        try:
            self._disk.write(self._path, b"")
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)

    def is_noted(self) -> bool:
        """Return whether the file is there. Raises OSError."""
        return self._path.name in self._disk.names(self._path.parent)

    def clear(self) -> None:
        """Remove the file."""
        self._disk.remove(self._path)


class RealDisk:
    """The machine's disk."""

    def make_folder(self, path: Path) -> None:
        """See `Disk`."""
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """See `Disk`."""
        with open_private(path) as file:
            file.write(content)

    def write_piece(self, path: Path, start: int, content: bytes) -> None:
        """See `Disk`."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE_FILE), "wb") as file:
            file.seek(start)
            file.write(content)

    def sync(self, path: Path) -> None:
        """See `Disk`."""
        sync_path(path)

    def rename(self, old: Path, new: Path) -> None:
        """See `Disk`."""
        old.rename(new)

    def names(self, folder: Path) -> list[str]:
        """See `Disk`."""
        return [path.name for path in folder.iterdir()]

    def read(self, path: Path) -> bytes:
        """See `Disk`."""
        return path.read_bytes()

    def content(self, path: Path) -> Content:
        """See `Disk`."""
        return self.read(path) if self.size(path) <= LARGE_BYTES else FileContent(path.open("rb"))

    def size(self, path: Path) -> int:
        """See `Disk`."""
        return path.stat().st_size

    def read_piece(self, path: Path, start: int, num_bytes: int) -> bytes:
        """See `Disk`."""
        with path.open("rb") as file:
            file.seek(start)
            return file.read(num_bytes)

    def remove(self, path: Path) -> None:
        """See `Disk`. Renames a folder first, so that no other process, such as a backup, finds a part of it."""
        if path.is_file():
            with suppress(OSError):
                path.unlink()
            return
        doomed = path.with_name(f"{REMOVING}{path.name}")
        with suppress(OSError):
            path.rename(doomed)
        for each in (doomed, path):
            shutil.rmtree(each, ignore_errors=True)

    def free(self, folder: Path) -> int:
        """See `Disk`."""
        return shutil.disk_usage(folder).free

    def restrict(self, folder: Path, patterns: Sequence[str]) -> None:
        """See `Disk`."""
        for path in folder.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in patterns):
                _restrict(path, is_entered=True)
        if folder.stat().st_mode & stat.S_ISVTX:  # as /tmp: it belongs to all users
            logger.warning("%s is shared with other users: choose a data directory of its own below it", folder)
        else:
            _restrict(folder, is_entered=None)


def _restrict(path: Path, *, is_entered: bool | None) -> None:
    """Take the rights of other users from a path, last of all, so that an interrupted call is repeated.

    `is_entered`: whether a folder's content is restricted, too, though it is closed already; None: never.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode) and (is_entered or (is_entered is not None and mode & OTHERS)):
            for inner in path.iterdir():
                if not inner.is_symlink():
                    _restrict(inner, is_entered=False)
        if mode & OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~OTHERS)
    except OSError as error:
        logger.warning("other users may have access to %s: %s", path, error)


def sync_path(path: Path) -> None:
    """Make a file's content durable, or a folder's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_private(path: Path) -> BinaryIO:
    """Open a new file for writing that only its owner may read; an old file of this name is emptied. Raises OSError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "wb")

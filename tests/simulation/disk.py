"""The disk of state folders, in memory: a power cut loses unsynced writes, and the disk can be full or fail.

A file's content is durable after its own sync, a name in a folder after the sync of that folder. A power cut draws
separately for each name and each content: a rename may survive under both names or under one. It survives under none
only if the old name was not durable either: file systems with a journal (ext4, XFS, btrfs) log a rename as one change.
Does not depend on what is stored.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NoReturn

from coordinator.storage.identity import QUARANTINE

NAME_BYTES = 64
"""Room that a new name in a folder takes."""


@dataclass(slots=True, eq=False)
class _File:
    content: bytes
    durable: bytes = b""


@dataclass(slots=True, eq=False)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)


class SimDisk:
    """Implements `coordinator.storage.disk.Disk` below one folder, which exists and is durable."""

    def __init__(self, root: Path, random: Random, on_operation: Callable[[str, str], None]) -> None:
        """`on_operation` is called before each change and sync; it may raise an error of a disk, or `Crash`."""
        self.is_full = False
        self.on_room: Callable[[int], None] = lambda num_bytes: None
        """Called with the bytes that the full disk gains by a removed folder; negative: it loses them by a new file."""
        self.room: Callable[[], int] = lambda: 0
        """Returns the free bytes of the full disk."""
        self._random = random
        self._root_path = root
        self._root = _Folder()
        self._on_operation = on_operation
        self._renamed: list[tuple[_Folder, str, _Folder, str]] = []
        """Renames since the last power cut, by the folders of the old and the new name."""

    def make_folder(self, path: Path) -> None:
        folder = self._root
        for name in path.relative_to(self._root_path).parts:
            if name not in folder.names:
                self._change("make_folder", path)
                folder.names[name] = _Folder()
            inner = folder.names[name]
            if not isinstance(inner, _Folder):
                raise FileExistsError(errno.EEXIST, "a file of that name exists")
            folder = inner

    def write(self, path: Path, content: bytes) -> None:
        self._on_operation("write", path.name)
        folder = self._folder(path.parent)
        if not self._take_room(len(content)):
            folder.names[path.name] = _File(content[: self._random.randrange(len(content) + 1)])
            _full()
        folder.names[path.name] = _File(content)

    def write_piece(self, path: Path, start: int, content: bytes) -> None:
        self._on_operation("write", path.name)
        folder = self._folder(path.parent)
        if self.is_full:
            _full()
        file = folder.names.setdefault(path.name, _File(b""))
        assert isinstance(file, _File)
        assert start <= len(file.content)
        file.content = file.content[:start] + content + file.content[start + len(content) :]

    def sync(self, path: Path) -> None:
        self._on_operation("sync", path.name)
        node = self._root if path == self._root_path else self._node(path)
        if isinstance(node, _Folder):
            node.durable = dict(node.names)
        else:
            node.durable = node.content

    def rename(self, old: Path, new: Path) -> None:
        node = self._node(old)
        self._change("rename", new)
        before, after = self._folder(old.parent), self._folder(new.parent)
        after.names[new.name] = node
        del before.names[old.name]
        self._renamed.append((before, old.name, after, new.name))

    def names(self, folder: Path) -> list[str]:
        return list(self._folder(folder).names)

    def read(self, path: Path) -> bytes:
        node = self._node(path)
        if isinstance(node, _Folder):
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        return node.content

    def content(self, path: Path) -> bytes:
        return self.read(path)

    def size(self, path: Path) -> int:
        return len(self.read(path))

    def read_piece(self, path: Path, start: int, num_bytes: int) -> bytes:
        return self.read(path)[start : start + num_bytes]

    def free(self, folder: Path) -> int:
        return self.room() if self.is_full else 1 << 40

    def remove(self, path: Path) -> None:
        self._on_operation("remove", path.name)
        try:
            removed = self._folder(path.parent).names.pop(path.name, None)
        except FileNotFoundError:
            return
        if isinstance(removed, _Folder):
            self.on_room(sum(len(file.content) for file in removed.names.values() if isinstance(file, _File)))

    def restrict(self, folder: Path, patterns: Sequence[str]) -> None:
        """Do nothing: there are no other users."""

    def power_cut(self, keep: float) -> None:
        """Drop unsynced changes, except for a share of about `keep`."""
        lasting = [
            (before, old, after, new, before.durable[old])
            for before, old, after, new in self._renamed
            if old in before.durable and after.names.get(new) is before.durable[old]
        ]
        self._renamed.clear()
        self._drop_unsynced(self._root, keep)
        for before, old, after, new, node in lasting:
            if node not in (before.names.get(old), after.names.get(new)):
                folder, name = self._random.choice(((before, old), (after, new)))
                folder.names[name] = folder.durable[name] = node

    def named_folders(self) -> set[tuple[str, str]]:
        """Return root and name of all folders that hold a whole state, without quarantined ones."""
        return {
            (root, name)
            for root, folder in self._root.names.items()
            if isinstance(folder, _Folder) and root != QUARANTINE
            for name in folder.names
            if not name.startswith(".")
        }

    def state_folders(self) -> set[str]:
        """Return the unique ends of the names of all folders that hold a whole state, quarantined ones included."""
        return {
            name.rpartition("-")[2]
            for root in self._root.names.values()
            if isinstance(root, _Folder)
            for name in root.names
            if not name.startswith(".")
        }

    def _drop_unsynced(self, folder: _Folder, keep: float) -> None:
        survivors: dict[str, _File | _Folder] = {}
        for name in folder.names | folder.durable:
            now, durable = folder.names.get(name), folder.durable.get(name)
            node = now if now is durable or self._random.random() < keep else durable
            if isinstance(node, _Folder):
                self._drop_unsynced(node, keep)
            elif node is not None and node.content != node.durable:
                length = self._random.randrange(len(node.content) + 1)
                node.content = node.content if self._random.random() < keep else node.content[:length]
            if node is not None:
                survivors[name] = node
        folder.names, folder.durable = survivors, dict(survivors)

    def _change(self, operation: str, path: Path) -> None:
        self._on_operation(operation, path.name)
        if not self._take_room(NAME_BYTES):
            _full()

    def _take_room(self, num_bytes: int) -> bool:
        """Take room of a full disk; return whether it has so much."""
        if self.is_full and num_bytes > self.room():
            return False
        if self.is_full:
            self.on_room(-num_bytes)
        return True

    def _node(self, path: Path) -> _File | _Folder:
        try:
            return self._folder(path.parent).names[path.name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file or folder") from None

    def _folder(self, path: Path) -> _Folder:
        folder = self._root
        for name in path.relative_to(self._root_path).parts:
            inner = folder.names.get(name)
            if not isinstance(inner, _Folder):
                raise FileNotFoundError(errno.ENOENT, "no such folder")
            folder = inner
        return folder


def _full() -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")

"""A disk below SQLite that loses unsynced writes: a virtual file system of apsw over real files, which tracks syncs.

A write is durable after the next `xSync` of its file, a file's name after the sync of its folder (SQLite syncs that
with the first sync of a new log or journal). `power_cut` drops a random part of the writes that are not durable: each
write by itself, some torn between sectors of 512 bytes. After `kill` every write fails: closing a connection leaves the
files as they are, as a killed process does. The writes before `kill` are kept, and are still not durable.

The writes that a failed sync should have made durable are never synced again by the same process, as on Linux.
Not modelled: writes that tear bytes outside themselves (SQLite assumes the same), and a failed sync of which the next
process gets no error.

The shared memory of SQLite's WAL mode is the real one, so several connections can be open. Counts syncs.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import apsw

SECTOR = 512
_LOGS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL
_Change = tuple[int, bytes] | int
"""A write (offset, data), or the size to which the file was cut."""


@dataclass(slots=True, eq=False)
class _Content:
    """A file's contents, under any name."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[_Change] = field(default_factory=list)
    lost: list[_Change] = field(default_factory=list)
    """Writes of a failed sync; no later sync makes them durable."""
    needs_folder_sync: bool = False


class LossyVfs(apsw.VFS):
    """Give its `name` to connections. One process at a time: `kill`, close the connections, then `restart`."""

    def __init__(self, name: str, random: Random) -> None:
        super().__init__(name, "unix")
        self.name = name
        self.random = random
        self.is_full = False
        """Files cannot grow, except by `room` bytes."""
        self.room = 0
        self.on_operation: Callable[[str, str], None] = lambda operation, file: None
        """Called before each write and sync of a file; may raise a disk's error, or call `kill`."""
        self.num_operations: Counter[str] = Counter()
        """"write", "sync" and "sync folder"."""
        self._is_killed = False
        self._names: dict[Path, _Content] = {}
        self._durable_names: dict[Path, _Content] = {}

    def kill(self) -> None:
        """Fail every later write, sync and deletion, as if the process was killed."""
        self._is_killed = True

    def restart(self) -> None:
        """Begin the next process. The connections of the last one must be closed."""
        self._is_killed = False
        for content in self._names.values():
            content.pending, content.lost = content.lost + content.pending, []

    def power_cut(self, keep: float) -> None:
        """Drop what is not durable, except for a share of about `keep`. Connections must be closed."""
        survivors: dict[Path, _Content] = {}
        for path in self._names | self._durable_names:
            now, durable = self._names.get(path), self._durable_names.get(path)
            survivor = now if now is durable or self.random.random() < keep else durable
            path.unlink(missing_ok=True)
            path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
            if survivor is not None:
                survivors[path] = self._torn(survivor, keep)
                path.write_bytes(survivors[path].durable)
        self._names, self._durable_names = survivors, dict(survivors)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """See apsw."""
        if name is None:
            return apsw.VFSFile("unix", name, flags)
        self.check_running()
        path = Path(name.filename() if isinstance(name, apsw.URIFilename) else name)
        is_new = not path.exists()
        file = _LossyFile(self, name, flags, path)
        if path not in self._names:
            content = _Content(bytearray(path.read_bytes() if not is_new else b""))
            content.needs_folder_sync = is_new and bool(flags[0] & _LOGS)
            self._names[path] = content
            if not is_new:
                self._durable_names[path] = content
        file.content = self._names[path]
        return file

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802
        """See apsw."""
        self.check_running()
        super().xDelete(name, syncdir)
        self._names.pop(Path(name), None)
        if syncdir:
            self.sync_folder()

    def check_running(self) -> None:
        """Raise apsw.IOError after `kill`."""
        if self._is_killed:
            raise apsw.exception_for(apsw.SQLITE_IOERR)

    def about_to(self, operation: str, path: Path) -> None:
        """Count a write or sync, and call `on_operation`."""
        self.check_running()
        self.num_operations[operation] += 1
        self.on_operation(operation, path.name)
        self.check_running()

    def sync_folder(self) -> None:
        """Make the names durable."""
        self.num_operations["sync folder"] += 1
        self._durable_names = dict(self._names)

    def _torn(self, content: _Content, keep: float) -> _Content:
        for change in content.lost + content.pending:
            if self.random.random() < keep:
                _apply(content.durable, change)
            elif not isinstance(change, int) and self.random.random() < keep:
                offset, data = change
                for start in range(0, len(data), SECTOR):
                    if self.random.random() < keep:
                        _apply(content.durable, (offset + start, data[start : start + SECTOR]))
        return _Content(content.durable)


class _LossyFile(apsw.VFSFile):
    content: _Content

    def __init__(self, vfs: LossyVfs, name: str | apsw.URIFilename, flags: list[int], path: Path) -> None:
        super().__init__("unix", name, flags)
        self._vfs = vfs
        self._path = path

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._vfs.about_to("write", self._path)
        if self._vfs.is_full and (num_bytes := offset + len(data) - self.xFileSize()) > 0:
            if num_bytes > self._vfs.room:
                raise apsw.exception_for(apsw.SQLITE_FULL)
            self._vfs.room -= num_bytes
        super().xWrite(data, offset)
        self.content.pending.append((offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._vfs.check_running()
        super().xTruncate(newsize)
        self.content.pending.append(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        content = self.content
        try:
            self._vfs.about_to("sync", self._path)
        except apsw.IOError:
            content.lost, content.pending = content.lost + content.pending, []
            raise
        for change in content.pending:
            _apply(content.durable, change)
        content.pending = []
        if content.needs_folder_sync:
            content.needs_folder_sync = False
            self._vfs.sync_folder()

    def excepthook(self, *error: Any) -> bool:
        """Do not print errors that SQLite ignores, such as those of closing."""
        return True


def sync_error() -> Exception:
    """Return an error that `on_operation` may raise for a sync that fails."""
    return apsw.exception_for(apsw.SQLITE_IOERR_FSYNC)


def _apply(content: bytearray, change: _Change) -> None:
    if isinstance(change, int):
        del content[change:]
        content.extend(bytes(change - len(content)))
        return
    offset, data = change
    content.extend(bytes(max(0, offset - len(content))))
    content[offset : offset + len(data)] = data


def close_quietly(connection: Any) -> None:
    """Close a connection after `kill`."""
    with contextlib.suppress(Exception):
        connection.close()

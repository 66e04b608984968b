"""The content of a file of a state: in memory, or if it is large in an open file, or made as it is read.

So a process through which states only pass has a piece of them in memory at a time, however large an adapter is. Does
not depend on what a content means. Main invariant: a content never changes, and a `FileContent` can be read as long as
the object exists, whatever becomes of the file's name.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

LARGE_BYTES = 8 << 20
"""Contents of more bytes are large: a coordinator does not have them in memory, but for a piece."""
PIECE_BYTES = 512 << 10
"""Bytes of a piece of a large content. Ray frees the shared memory of what it moved when a hundred pieces have come, so
that pieces twice as large take twice the memory."""


class LargeContent(Protocol):
    """A content that is not in memory as it is."""

    def __len__(self) -> int:
        """Return the number of its bytes."""

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return so many bytes from byte `start` on. Raises OSError."""


Content = bytes | LargeContent


class FileContent:
    """Implements `LargeContent` by an open file."""

    def __init__(self, file: BinaryIO) -> None:
        """Take a file whose content is complete; it is closed when this object is garbage."""
        self._file = file
        weakref.finalize(self, file.close)
        self._num_bytes = os.fstat(file.fileno()).st_size

    def __len__(self) -> int:
        return self._num_bytes

    def read(self, start: int, num_bytes: int) -> bytes:
        """See `LargeContent`."""
        piece = os.pread(self._file.fileno(), num_bytes, start)
        if len(piece) != num_bytes:
            raise OSError(errno.EIO, "a state's file is shorter than it was")
        return piece


class Spool:
    """A file without a name, which is gone with the process, for a content that arrives piece by piece."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is on the disk that takes it; None: the one for temporary files. Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by the next line
        self._closing = weakref.finalize(self, self._file.close)

    def append(self, piece: bytes) -> None:
        """Write the next bytes. Raises OSError."""
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]

    def content(self) -> FileContent:
        """Return what was written; the last call."""
        self._closing.detach()
        return FileContent(self._file)


def pieces_of(content: Content, piece_bytes: int = PIECE_BYTES, start: int = 0) -> Iterator[bytes]:
    """Yield a content from byte `start` on, in pieces of at most so many bytes. Raises OSError."""
    for begin in range(start, len(content), piece_bytes):
        yield piece_of(content, begin, piece_bytes)


def piece_of(content: Content, start: int, num_bytes: int) -> bytes:
    """Return the bytes of a content from `start` on, at most so many. Raises OSError."""
    num_bytes = min(num_bytes, len(content) - start)
    return content[start : start + num_bytes] if isinstance(content, bytes) else content.read(start, num_bytes)


def whole(content: Content) -> bytes:
    """Return a content in memory. Raises OSError."""
    return content if isinstance(content, bytes) else content.read(0, len(content))

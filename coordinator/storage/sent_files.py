"""What leaves a state folder: its size, any range of its bytes, and the digests that its bytes are compared with.

Does not depend on what a file means. Main invariant: `Blocks` returns a byte only after the whole block that has it was
compared with the digest that was made when the file was written.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.base.errors import Code, ServiceError
from coordinator.storage.disk import Disk
from workers.contract.contents import Content, pieces_of

BLOCKS = "blocks.json"
"""File of a folder: by the name of another one, the SHA-256 of all its blocks, one behind the other."""
BLOCK_BYTES = 256 << 10
"""Bytes of a block. What is read of a file is read in whole blocks, so a block is in memory at a time."""
_DIGITS = 64
"""Of a digest."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an export."""

    data: bytes
    """What the client gets; empty: nothing, the files are being verified."""
    num_read: int = 0
    """Bytes that were read from the disk for it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that follow each other in an export."""

    num_bytes: int
    pieces: Callable[[int], Iterator[Piece]]
    """Yields the bytes from this place on. Raises OSError and ServiceError DATA_LOSS."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A file or an archive as it is sent."""

    parts: Sequence[Part]
    verify: Callable[[], Iterable[Piece]]
    """Yields pieces without data while it verifies what the parts do not verify as they are read."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return sum(part.num_bytes for part in self.parts)

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[Piece]:
        """Yield the bytes from `start` up to `stop`, without it; None: to the end. First verify what is not yet.

        Raises OSError, and ServiceError if the files are damaged or cannot be read now.
        """
        yield from self.verify()
        left = (self.num_bytes if stop is None else stop) - start
        for part in self.parts:
            if start < part.num_bytes and left > 0:
                for piece in part.pieces(start):
                    data = piece.data[:left]
                    left -= len(data)
                    yield Piece(data, piece.num_read)
                    if not left:
                        return
            start = max(0, start - part.num_bytes)


class Blocks:
    """A file that is verified as it is read."""

    def __init__(self, path: Path, digests: str, disk: Disk) -> None:
        """Raises ServiceError DATA_LOSS if the file has not as many blocks as `digests`, and OSError."""
        self.num_bytes = disk.size(path)
        if len(digests) != -(-self.num_bytes // BLOCK_BYTES) * _DIGITS:
            raise damaged()
        self._path, self._digests, self._disk = path, digests, disk

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes from `start` on; fewer only at the end of the file. Raises ServiceError DATA_LOSS, OSError."""
        first = start // BLOCK_BYTES
        stop = min(start + num_bytes, self.num_bytes)
        read = b"".join(self._block(number) for number in range(first, -(-stop // BLOCK_BYTES)))
        return read[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _block(self, number: int) -> bytes:
        block = self._disk.read_piece(self._path, number * BLOCK_BYTES, BLOCK_BYTES)
        if hashlib.sha256(block).hexdigest() != self._digests[number * _DIGITS : (number + 1) * _DIGITS]:
            raise damaged()
        return block


def dump_blocks(files: Mapping[str, Content]) -> bytes:
    """Return the content of `BLOCKS` for these files. Raises OSError."""
    digests = {
        name: "".join(hashlib.sha256(block).hexdigest() for block in pieces_of(content, BLOCK_BYTES))
        for name, content in files.items()
    }
    return json.dumps(digests, sort_keys=True).encode() + b"\n"


def load_blocks(content: bytes) -> dict[str, str]:
    """Return the digests that `dump_blocks` wrote, by file. Raises ServiceError DATA_LOSS."""
    try:
        digests: dict[str, str] = json.loads(content)
    except ValueError:
        raise damaged() from None
    return digests


def in_memory(data: bytes, piece_bytes: int) -> Part:
    """Return a part that is in memory."""
    return Part(
        len(data),
        lambda start: (Piece(data[at : at + piece_bytes]) for at in range(start, len(data), piece_bytes)),
    )


def in_file(
    read: Callable[[int, int], bytes], begin: int, num_bytes: int, piece_bytes: int, *, in_blocks: bool
) -> Part:
    """Return the bytes of a file from `begin` to its end; `num_bytes` is the size of the whole file.

    A piece ends with a block at the latest, so that no block is read for two pieces of its size. `in_blocks`: whether a
    whole block is read for a piece.
    """

    def pieces(start: int) -> Iterator[Piece]:
        start += begin
        while start < num_bytes:
            if not (data := read(start, min(piece_bytes, BLOCK_BYTES - start % BLOCK_BYTES))):
                return
            of_block = min(BLOCK_BYTES, num_bytes - start // BLOCK_BYTES * BLOCK_BYTES)
            yield Piece(data, of_block if in_blocks else len(data))
            start += len(data)

    return Part(num_bytes - begin, pieces)


def in_order(num_bytes: int, pieces: Callable[[], Iterator[Piece]]) -> Part:
    """Return a part whose bytes are made in order from the first: those before the requested place are dropped."""

    def from_place(start: int) -> Iterator[Piece]:
        for piece in pieces():
            yield Piece(piece.data[start:], piece.num_read)
            start = max(0, start - len(piece.data))

    return Part(num_bytes, from_place)


def tar(members: Iterable[tuple[str, Sequence[Part]]], piece_bytes: int) -> list[Part]:
    """Return a tar archive of these files."""
    archive: list[Part] = []
    for name, parts in members:
        member = tarfile.TarInfo(name)
        member.size = sum(part.num_bytes for part in parts)
        padding = bytes(-member.size % tarfile.BLOCKSIZE)
        archive += [in_memory(member.tobuf(), piece_bytes), *parts, in_memory(padding, piece_bytes)]
    return [*archive, in_memory(bytes(2 * tarfile.BLOCKSIZE), piece_bytes)]


def damaged() -> ServiceError:
    """Return the refusal of a read of damaged files."""
    return ServiceError(
        Code.DATA_LOSS,
        "CHECKSUM_MISMATCH",
        "the stored state does not match its checksum and was not loaded: its files were damaged on disk; "
        "use another checkpoint",
    )

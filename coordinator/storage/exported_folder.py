"""The files of a state folder in the forms in which they leave the pool: Tinker's, and PEFT's. Reads the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from coordinator.storage.disk import Disk
from coordinator.storage.exports import ENCRYPTED, LENGTH_BYTES, head_bytes, tinkers_head
from coordinator.storage.joined_exports import Joined, JoinedWeights, joined_config, load_joined
from coordinator.storage.sent_files import BLOCKS, Blocks, Part, Piece, in_file, in_memory, in_order, load_blocks, tar

WEIGHTS, CONFIG, OPTIMIZER, GRADIENT, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "gradient.safetensors",
    "state.json",
)
HEAD_BYTES_MAX = 32 << 20
"""Of the header of weights. A matrix takes some 170 bytes of it, a mixture has up to 37,000; the length of a file that
is not verified yet may be any number."""
EXPORTED = (CONFIG, WEIGHTS)
"""The files of a PEFT directory."""
Read = Callable[[int, int], bytes]
"""Returns at most so many bytes of a file from a place on; fewer only at its end."""


class ExportedFolder:
    """The PEFT files of a folder. Every method raises OSError, and ServiceError DATA_LOSS for what it has verified."""

    def __init__(self, folder: Path, disk: Disk, piece_bytes: int, *, for_tinker: bool) -> None:
        """With `for_tinker` the tensors have the names of the Tinker service, else those of PEFT."""
        self._folder, self._disk, self._piece_bytes, self._for_tinker = folder, disk, piece_bytes, for_tinker
        self._names = disk.names(folder)
        self._digests = load_blocks(disk.read(folder / BLOCKS)) if BLOCKS in self._names else None
        self._joined: Joined = {}
        """Where transformers has the modules that it joins, if PEFT is to read them."""
        if not for_tinker:
            self._joined = load_joined(json.loads(self._whole(STATE)).get("joined", {}))
        self.is_verified = self._digests is not None and not self._joined
        """Whether all that is read is verified. An earlier version made no `BLOCKS`; joined matrices are read in so
        small pieces that a block would be read for each of many."""

    def file(self, name: str) -> list[Part]:
        """Return a file as it is sent."""
        num_bytes, read = self._opened(name)
        if name == WEIGHTS and self._for_tinker:
            stored = _head(read, num_bytes)
            return [self._in_memory(tinkers_head(stored)), self._in_file(read, len(stored), num_bytes)]
        if name == WEIGHTS and self._joined:
            weights = JoinedWeights(_head(read, num_bytes), self._joined)
            plain = partial(self._disk.read_piece, self._folder / name)

            def pieces() -> Iterator[Piece]:
                return (Piece(*piece) for piece in weights.pieces(plain, self._piece_bytes))

            return [in_order(weights.num_bytes, pieces)]
        if name == CONFIG and self._joined:
            config = joined_config(json.loads(self._whole(name)), self._joined)
            return [self._in_memory(json_file(config))]
        return [self._in_file(read, 0, num_bytes)]

    def archive(self) -> list[Part]:
        """Return all files as a tar archive."""
        return tar([(name, self.file(name)) for name in exported(self._names)], self._piece_bytes)

    def _opened(self, name: str) -> tuple[int, Read]:
        """Return the size of a stored file, and what reads it."""
        path = self._folder / name
        if self._digests is None:
            return self._disk.size(path), partial(self._disk.read_piece, path)
        blocks = Blocks(path, self._digests.get(name, ""), self._disk)
        return blocks.num_bytes, blocks.read

    def _whole(self, name: str) -> bytes:
        num_bytes, read = self._opened(name)
        return read(0, num_bytes)

    def _in_memory(self, data: bytes) -> Part:
        return in_memory(data, self._piece_bytes)

    def _in_file(self, read: Read, begin: int, num_bytes: int) -> Part:
        return in_file(read, begin, num_bytes, self._piece_bytes, in_blocks=self._digests is not None)


def exported(names: Collection[str]) -> list[str]:
    """Return the names of the files that leave the pool, of those in a folder."""
    return [name for file in EXPORTED for name in (file, file + ENCRYPTED) if name in names]


def json_file(value: object) -> bytes:
    """Return the content of a JSON file of a folder."""
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _head(read: Read, num_bytes: int) -> bytes:
    """Return the length and header of weights in a file of so many bytes. Raises ValueError for a length of none."""
    num_head = head_bytes(read(0, LENGTH_BYTES))
    if num_head > min(HEAD_BYTES_MAX, num_bytes):
        raise ValueError(f"a header of {num_head} bytes in a file of {num_bytes}")
    return read(0, num_head)

"""State folders on disk: written atomically, read only if they match their checksum.

Does not depend on the database; every access to the disk goes through `disk`.

A folder holds `adapter_model.safetensors` and `adapter_config.json` (together a PEFT directory, but for the modules of
`joined_exports`; in an export to recipients each is encrypted and has the suffix `.age`), `optimizer.safetensors` if
moments were saved, `gradient.safetensors` in a snapshot that was taken while a gradient was pending, and `state.json`.
A folder is written under a temporary name, its files and the folder itself are synced, then it is renamed and its
parent is synced. Main invariant: only after that a row of the database may name it. A folder without a row is an orphan
of a crash: the next start moves it into quarantine, where it stays for a while.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from coordinator.base.errors import Code, ServiceError, unavailable
from coordinator.storage.disk import REMOVING, Disk
from coordinator.storage.exports import (
    ENCRYPTED,
    LENGTH_BYTES,
    cannot_be_used,
    encrypt,
    head_bytes,
    peft_config,
    tinkers_head,
)
from coordinator.storage.identity import QUARANTINE, ROOTS, Identity, identity_in
from coordinator.storage.joined_exports import (
    Joined,
    JoinedWeights,
    dump_joined,
    joined_config,
    load_joined,
    to_joined,
)
from workers.contract.contents import Content, piece_of, pieces_of, whole
from workers.contract.failpoints import failpoint
from workers.contract.messages import AdapterSpec, AdapterState, ModelInfo

WEIGHTS, CONFIG, OPTIMIZER, GRADIENT, STATE = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "optimizer.safetensors",
    "gradient.safetensors",
    "state.json",
)
EXPORTED = (CONFIG, WEIGHTS)
"""The files of a PEFT directory."""
PIECE_BYTES = 256 << 10
"""Bytes of an exported file in memory at a time."""
QUARANTINE_S = 7 * 86400.0
"""Seconds of service time that an orphan stays in quarantine: a week to notice that something is missing."""
_TEMPORARY = ".writing-"
logger = logging.getLogger(__name__)
_TRANSIENT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of a read that do not depend on the content of the disk: the read may be retried."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A durable folder."""

    folder: str
    """Its name below the root."""
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an export."""

    data: bytes
    """What the client gets; empty: nothing, the files are being verified."""
    num_read: int = 0
    """Bytes that were read from the disk for it."""


@dataclass(frozen=True, slots=True)
class _Head:
    """The beginning of a file as it is sent, and the number of stored bytes that it stands for."""

    sent: bytes = b""
    num_stored: int = 0


_AS_STORED = _Head()


class TemporaryFile:
    """A file in a temporary folder of its own, which is made with the first bytes. Not durable."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk

    def write(self, start: int, content: bytes) -> None:
        """Write from byte `start` on, at most the file's end. Raises OSError."""
        self._disk.make_folder(self._folder)
        self._disk.write_piece(self._folder / WEIGHTS, start, content)

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return bytes that were written. Raises OSError."""
        content = self._disk.read_piece(self._folder / WEIGHTS, start, num_bytes)
        if len(content) != num_bytes:
            raise OSError(errno.EIO, "a temporary file is shorter than it was written")
        return content

    def content(self) -> Content:
        """Return what was written; it stays readable after `remove`. Raises OSError."""
        return self._disk.content(self._folder / WEIGHTS)

    def remove(self) -> None:
        """Delete the folder."""
        self._disk.remove(self._folder)


class StateFiles:
    """The folders below one root."""

    def __init__(self, root: Path, kind: str, disk: Disk) -> None:
        """Make the root. `kind` is the prefix of the folders' failpoints. Raises OSError."""
        self._root = root
        self._kind = kind
        self._disk = disk
        self._identity: Identity | None = None
        disk.make_folder(root)
        disk.sync(root.parent)  # otherwise a power cut could remove the root with its content

    def begin_epoch(self, identity: Identity) -> None:
        """Name new folders after this pool and epoch, which must be durable in the database. Call before `write`."""
        self._identity = identity

    def write(self, spec: AdapterSpec, model: ModelInfo, state: AdapterState, recipients: Sequence[str] = ()) -> Saved:
        """Make a state durable, encrypted if it has recipients, which were checked.

        Raises OSError if the disk fails or is full, and leaves no folder behind then.
        """
        assert self._identity is not None, "the epoch has not begun"
        files = _contents(spec, model, state)
        name = self._identity.new_folder()
        kind, disk = self._kind, self._disk
        temporary, final = self._root / (_TEMPORARY + name), self._root / name
        try:
            disk.make_folder(temporary)
            if recipients:
                files = self._encrypt(temporary, files, recipients)
            for file_name, content in files.items():
                if not file_name.endswith(ENCRYPTED):
                    self._write(temporary / file_name, content)
                disk.sync(temporary / file_name)
            disk.sync(temporary)
            failpoint(f"{kind}.written")
            disk.rename(temporary, final)
            disk.sync(self._root)
            failpoint(f"{kind}.renamed")
            return Saved(name, _digest(files), sum(map(len, files.values())))
        except (OSError, ServiceError):
            for path in (temporary, final):
                disk.remove(path)
            raise

    def temporary(self) -> TemporaryFile:
        """Return a file for bytes that are being received. The next start deletes what is left of it."""
        assert self._identity is not None, "the epoch has not begun"
        return TemporaryFile(self._root / (_TEMPORARY + self._identity.new_folder()), self._disk)

    def read(self, folder: str, sha256: str) -> AdapterState:
        """Return the state in a folder.

        Raises ServiceError DATA_LOSS if its content does not match the checksum, UNAVAILABLE if a retry may succeed,
        INVALID_ARGUMENT if it is encrypted.
        """
        files = self._verified(folder, sha256)
        if (error := cannot_be_used(list(files))) is not None:
            raise error
        state = json.loads(whole(files[STATE]))
        return AdapterState(
            weights=files[WEIGHTS],
            optimizer=files.get(OPTIMIZER),
            num_steps=state["num_steps"],
            applied_seq=state["applied_seq"],
            fingerprint=state["fingerprint"],
            gradient=files.get(GRADIENT),
            num_datums=state["num_datums"],
        )

    def exported(self, folder: str) -> list[str]:
        """Return the names of the files that leave the pool. Raises OSError."""
        present = self._disk.names(self._root / folder)
        return [name for file in EXPORTED for name in (file, file + ENCRYPTED) if name in present]

    def tar(
        self, folder: str, sha256: str, piece_bytes: int = PIECE_BYTES, *, for_tinker: bool = False
    ) -> Iterator[Piece]:
        """Yield the folder's PEFT files as a tar archive, in pieces of at most `piece_bytes`, as `piecewise`."""
        yield from self._verify(folder, sha256, piece_bytes)
        for name in self.exported(folder):
            member = tarfile.TarInfo(name)
            member.size, pieces = self._sent(folder, name, piece_bytes, for_tinker=for_tinker)
            yield Piece(member.tobuf())
            yield from pieces
            if padding := bytes(-member.size % tarfile.BLOCKSIZE):
                yield Piece(padding)
        yield from [Piece(bytes(tarfile.BLOCKSIZE))] * 2  # the end of an archive

    def piecewise(
        self, folder: str, sha256: str, name: str, piece_bytes: int = PIECE_BYTES, *, for_tinker: bool = False
    ) -> Iterator[Piece]:
        """Verify a folder, then yield one of its files, one piece in memory at a time.

        With `for_tinker` the tensors have the names of the Tinker service, else those of PEFT. While it verifies, it
        yields pieces without data. Raises ServiceError as `read`, before the first data, and OSError if the folder is
        removed meanwhile.
        """
        yield from self._verify(folder, sha256, piece_bytes)
        yield from self._sent(folder, name, piece_bytes, for_tinker=for_tinker)[1]

    def remove(self, folder: str) -> None:
        """Delete a folder that no row names any more."""
        assert folder, "an empty name would be the root"
        self._disk.remove(self._root / folder)

    def set_orphans_aside(self, known: set[str], quarantine: QuarantinedFolders, service_s: float) -> None:
        """Move the folders that a crash left without a row, so are not `known`, into quarantine.

        Deletes temporary folders: their writing, or removal, did not end. Leaves other files alone. Raises OSError.
        """
        orphans = []
        for name in self._disk.names(self._root):
            if name.startswith((_TEMPORARY, REMOVING)):
                self._disk.remove(self._root / name)
            elif name not in known and identity_in(name) is not None:
                orphans.append(name)
        for name in orphans:
            quarantine.take(self._root, name, service_s)
        if orphans:
            self._disk.sync(quarantine.root)
            self._disk.sync(self._root)

    def _write(self, path: Path, content: Content) -> None:
        """Write a content, a large one piece by piece. Raises OSError."""
        if isinstance(content, bytes):
            self._disk.write(path, content)
            return
        start = 0
        for piece in pieces_of(content):
            self._disk.write_piece(path, start, piece)
            start += len(piece)

    def _encrypt(self, folder: Path, files: dict[str, Content], recipients: Sequence[str]) -> dict[str, Content]:
        """Write the files that leave the pool, encrypted; return all files. Raises OSError, ServiceError."""
        weights = files[WEIGHTS]
        head = piece_of(weights, 0, head_bytes(piece_of(weights, 0, LENGTH_BYTES)))
        sources = {
            CONFIG: pieces_of(files[CONFIG]),
            WEIGHTS: chain([tinkers_head(head)], pieces_of(weights, start=len(head))),
        }
        written = {STATE: files[STATE]}
        for name in EXPORTED:
            path = folder / (name + ENCRYPTED)
            encrypt(sources[name], recipients, partial(self._disk.write_piece, path))
            written[path.name] = self._disk.content(path)
        return written

    def _verified(self, folder: str, sha256: str) -> dict[str, Content]:
        """Return the files of a folder. Large ones stay open, so that what was verified is what is read."""
        files: dict[str, Content] = {}
        try:
            for name in self._disk.names(self._root / folder):
                files[name] = self._disk.content(self._root / folder / name)
            digest = _digest(files)
        except OSError as error:
            if error.errno in _TRANSIENT:
                raise _cannot_read_now(error) from None
            raise _damaged() from None
        if digest != sha256:
            raise _damaged()
        return files

    def _verify(self, folder: str, sha256: str, piece_bytes: int) -> Iterator[Piece]:
        digest = hashlib.sha256()
        try:
            for name in sorted(self._disk.names(self._root / folder)):
                digest.update(f"{name}\0{self._disk.size(self._root / folder / name)}\0".encode())
                for piece in self._pieces(folder, name, piece_bytes):
                    digest.update(piece.data)
                    yield Piece(b"", piece.num_read)
        except OSError as error:
            if error.errno in _TRANSIENT:
                raise _cannot_read_now(error) from None
            raise _damaged() from None
        if digest.hexdigest() != sha256:
            raise _damaged()

    def _sent(self, folder: str, name: str, piece_bytes: int, *, for_tinker: bool) -> tuple[int, Iterator[Piece]]:
        """Return the size of a file as it is sent, and its pieces. Raises OSError."""
        path, head = self._root / folder / name, _AS_STORED
        if name == WEIGHTS and for_tinker:
            stored = self._stored_head(path)
            head = _Head(tinkers_head(stored), len(stored))
        elif name in EXPORTED and not for_tinker and (joined := self._joined(folder)):
            if name == WEIGHTS:
                weights = JoinedWeights(self._stored_head(path), joined)
                pieces = weights.pieces(partial(self._disk.read_piece, path), piece_bytes)
                return weights.num_bytes, (Piece(*piece) for piece in pieces)
            config = joined_config(json.loads(self._disk.read(path)), joined)
            head = _Head(_to_json(config), self._disk.size(path))
        size = len(head.sent) - head.num_stored + self._disk.size(path)
        return size, self._pieces(folder, name, piece_bytes, head)

    def _joined(self, folder: str) -> Joined:
        """Return where transformers has the modules that it joins. Raises OSError."""
        return load_joined(json.loads(self._disk.read(self._root / folder / STATE)).get("joined", {}))

    def _stored_head(self, path: Path) -> bytes:
        """Return the length and header of weights. Raises OSError."""
        return self._disk.read_piece(path, 0, head_bytes(self._disk.read_piece(path, 0, LENGTH_BYTES)))

    def _pieces(self, folder: str, name: str, piece_bytes: int, head: _Head = _AS_STORED) -> Iterator[Piece]:
        for begin in range(0, len(head.sent), piece_bytes):
            yield Piece(head.sent[begin : begin + piece_bytes])
        start = head.num_stored
        while data := self._disk.read_piece(self._root / folder / name, start, piece_bytes):
            yield Piece(data, len(data))
            start += len(data)


class QuarantinedFolders:
    """The folder for orphans. A name there begins with the milliseconds of service time at which the folder came."""

    def __init__(self, root: Path, disk: Disk) -> None:
        """Make the folder. Raises OSError."""
        self.root = root
        self._disk = disk
        disk.make_folder(root)
        disk.sync(root.parent)

    def take(self, root: Path, folder: str, service_s: float) -> None:
        """Move a folder from below one of the roots here. The caller syncs both. Raises OSError."""
        try:
            self._disk.rename(root / folder, self.root / f"{round(service_s * 1000)}-{root.name}-{folder}")
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            logger.warning("%s/%s has no row, and stays: the quarantine is on another disk", root.name, folder)
        else:
            logger.warning("%s/%s has no row in the database: moved into quarantine", root.name, folder)

    @staticmethod
    def expiry_of(name: str) -> float | None:
        """Return the service time at which a folder in quarantine is deleted; None: it was not moved there by us."""
        milliseconds, _, rest = name.partition("-")
        root, _, folder = rest.partition("-")
        if not milliseconds.isdecimal() or root not in ROOTS or identity_in(folder) is None:
            return None
        return int(milliseconds) / 1000 + QUARANTINE_S

    def remove_expired(self, service_s: float) -> None:
        """Delete the folders that have been in quarantine for `QUARANTINE_S`. Raises OSError."""
        for name in self._disk.names(self.root):
            expiry = self.expiry_of(name)
            if expiry is not None and expiry <= service_s:
                logger.info("%s was in quarantine for %.0f days: deleted", self.root / name, QUARANTINE_S / 86400)
                self._disk.remove(self.root / name)


class StateFolders:
    """The three roots of state folders in a data directory, and the quarantine for orphans of all three."""

    def __init__(self, data_dir: Path, disk: Disk) -> None:
        """Raises OSError."""
        kinds = ("checkpoint", "snapshot", "sampler")  # of failpoints
        self.checkpoints, self.snapshots, self.samplers = (
            StateFiles(data_dir / root, kind, disk) for root, kind in zip(ROOTS, kinds, strict=True)
        )
        self.quarantined = QuarantinedFolders(data_dir / QUARANTINE, disk)

    def begin_epoch(self, identity: Identity) -> None:
        """See `StateFiles.begin_epoch`."""
        for files in (self.checkpoints, self.snapshots, self.samplers):
            files.begin_epoch(identity)


def _contents(spec: AdapterSpec, model: ModelInfo, state: AdapterState) -> dict[str, Content]:
    """Return the files of a state, by name."""
    joined = to_joined(model.modules)
    files: dict[str, Content] = {
        WEIGHTS: state.weights,
        CONFIG: _to_json(peft_config(spec, model)),
        STATE: _to_json(
            {
                "num_steps": state.num_steps,
                "applied_seq": state.applied_seq,
                "fingerprint": state.fingerprint,
                "num_datums": state.num_datums,
                "rank": spec.rank,
                "alpha": spec.alpha,
                "seed": spec.seed,
                "base_model": model.name,
            }
            | ({"joined": dump_joined(joined)} if joined else {})
        ),
    }
    if state.optimizer is not None:
        files[OPTIMIZER] = state.optimizer
    if state.gradient is not None:
        files[GRADIENT] = state.gradient
    return files


def _damaged() -> ServiceError:
    return ServiceError(
        Code.DATA_LOSS,
        "CHECKSUM_MISMATCH",
        "the stored state does not match its checksum and was not loaded: its files were damaged on disk; "
        "use another checkpoint",
    )


def _cannot_read_now(error: OSError) -> ServiceError:
    return unavailable(
        "STORAGE_BUSY", f"the server cannot read the stored state at the moment ({error.strerror}): try again later"
    )


def _to_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"


def _digest(files: dict[str, Content]) -> str:
    """Return the SHA-256 of names, sizes and contents, in order of names. Raises OSError."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        for piece in pieces_of(files[name]):
            digest.update(piece)
    return digest.hexdigest()

"""State folders on disk: written atomically, read only if they match their checksum.

Does not depend on the database; every access to the disk goes through `disk`.

A folder holds `adapter_model.safetensors` and `adapter_config.json` (together a PEFT directory, but for the modules of
`joined_exports`; in an export to recipients each is encrypted and has the suffix `.age`), `optimizer.safetensors` if
moments were saved, `gradient.safetensors` in a snapshot that was taken while a gradient was pending, `state.json`, and
in a checkpoint `blocks.json`, with which a part of an export is verified without the rest.
A folder is written under a temporary name, its files and the folder itself are synced, then it is renamed and its
parent is synced. Main invariant: only after that a row of the database may name it. A folder without a row is an orphan
of a crash: the next start moves it into quarantine, where it stays for a while.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from coordinator.base.errors import ServiceError, unavailable
from coordinator.storage.disk import REMOVING, Disk
from coordinator.storage.exported_folder import (
    CONFIG,
    EXPORTED,
    GRADIENT,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    ExportedFolder,
    exported,
    json_file,
)
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
from coordinator.storage.joined_exports import dump_joined, to_joined
from coordinator.storage.sent_files import BLOCKS, Part, Piece, Sent, damaged, dump_blocks
from workers.contract.contents import Content, piece_of, pieces_of, whole
from workers.contract.failpoints import failpoint
from workers.contract.messages import AdapterSpec, AdapterState, ModelInfo

PIECE_BYTES = 256 << 10
"""Bytes of an exported file in memory at a time."""
QUARANTINE_S = 7 * 86400.0
"""Seconds of service time that an orphan stays in quarantine: a week to notice that something is missing."""
EXPORTED_KIND = "checkpoint"
"""Kind of the folders that are exported."""
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
            if kind == EXPORTED_KIND:
                files[BLOCKS] = dump_blocks({n: files[n] for n in files.keys() - {OPTIMIZER, GRADIENT}})
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
        return exported(self._disk.names(self._root / folder))

    def file(
        self, folder: str, sha256: str, name: str, piece_bytes: int = PIECE_BYTES, *, for_tinker: bool = False
    ) -> Sent:
        """Return one of a folder's PEFT files, to be sent in pieces of at most `piece_bytes`.

        With `for_tinker` the tensors have the names of the Tinker service, else those of PEFT. No byte is sent before
        its block was verified; where a folder has no `BLOCKS`, or matrices are joined, before the whole folder was.
        Raises ServiceError as `read`, also while it is sent, and then OSError.
        """
        return self._sent(folder, sha256, piece_bytes, for_tinker, lambda files: files.file(name))

    def archive(self, folder: str, sha256: str, piece_bytes: int = PIECE_BYTES, *, for_tinker: bool = False) -> Sent:
        """Return a folder's PEFT files as a tar archive, as `file` does."""
        return self._sent(folder, sha256, piece_bytes, for_tinker, ExportedFolder.archive)

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
        with _reading():
            for name in self._disk.names(self._root / folder):
                files[name] = self._disk.content(self._root / folder / name)
            digest = _digest(files)
        if digest != sha256:
            raise damaged()
        return files

    def _sent(
        self,
        folder: str,
        sha256: str,
        piece_bytes: int,
        for_tinker: bool,
        parts_of: Callable[[ExportedFolder], list[Part]],
    ) -> Sent:
        verify = partial(self._verify, folder, sha256, piece_bytes)
        with _reading():
            try:
                files = ExportedFolder(self._root / folder, self._disk, piece_bytes, for_tinker=for_tinker)
                return Sent(parts_of(files), tuple if files.is_verified else verify)
            except (AttributeError, LookupError, TypeError, ValueError) as error:  # of a text that is not verified yet
                logger.warning("%s cannot be read: %r", self._root / folder, error)
                raise damaged() from None

    def _verify(self, folder: str, sha256: str, piece_bytes: int) -> Iterator[Piece]:
        digest = hashlib.sha256()
        with _reading():
            for name in sorted(self._disk.names(self._root / folder)):
                path, start = self._root / folder / name, 0
                digest.update(f"{name}\0{self._disk.size(path)}\0".encode())
                while data := self._disk.read_piece(path, start, piece_bytes):
                    digest.update(data)
                    start += len(data)
                    yield Piece(b"", len(data))
        if digest.hexdigest() != sha256:
            raise damaged()


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
        kinds = (EXPORTED_KIND, "snapshot", "sampler")  # of failpoints
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
        CONFIG: json_file(peft_config(spec, model)),
        STATE: json_file(
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


@contextmanager
def _reading() -> Iterator[None]:
    """Raise the ServiceError of an error of the disk during a block that reads a folder."""
    try:
        yield
    except OSError as error:
        if error.errno in _TRANSIENT:
            raise _cannot_read_now(error) from None
        raise damaged() from None


def _cannot_read_now(error: OSError) -> ServiceError:
    return unavailable(
        "STORAGE_BUSY", f"the server cannot read the stored state at the moment ({error.strerror}): try again later"
    )


def _digest(files: dict[str, Content]) -> str:
    """Return the SHA-256 of names, sizes and contents, in order of names. Raises OSError."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        for piece in pieces_of(files[name]):
            digest.update(piece)
    return digest.hexdigest()

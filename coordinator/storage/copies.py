"""Copies of a data directory: what its database names, the database itself, state folders, and a copy's new identity.

For backup, restore and doctor, which read the files of a pool whose coordinator may be running. Does not depend
on locks or on the order of a backup. Main invariant: what is read is not changed.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from coordinator.storage.disk import PRIVATE_FOLDER, open_private, sync_path
from coordinator.storage.identity import DATABASE, DataDirError, Identity
from coordinator.storage.operations import drop_payloads
from coordinator.storage.sqlite import Connection, closed_at, open_read_only, read_closed

T = TypeVar("T")
PIECE_BYTES = 1 << 20
PAGES_AT_ONCE = 4096
"""Pages of a database between two reports of progress."""
READS_MAX = 10
"""Most attempts to read a database. Each failed one needs a coordinator that started meanwhile."""
LISTED_MAX = 20
"""Most items that a message lists."""
_SERVICE_S = "(SELECT value / 1000.0 FROM meta WHERE key = 'service_ms')"
"""The service time of the copy."""
SAMPLERS_COUNTED = 8
"""The schema since which the files of samplers count among a tenant's bytes. A backup may be of an older one."""
_LOST = {errno.ENOENT, errno.EIO, errno.EUCLEAN, errno.EBADMSG}
"""Errors of a read that tell of the disk's content. After others, as of rights or memory, the state may be sound."""


class UnreadableError(Exception):
    """A state folder, or a file in it, is missing or cannot be read."""


@dataclass(frozen=True, slots=True)
class NamedState:
    """A row that names a state folder."""

    root: str
    owner: str
    """The path of the checkpoint, the adapter of the snapshot, or the sampler."""
    folder: str
    sha256: str

    @property
    def path(self) -> Path:
        """The folder, below the data directory."""
        return Path(self.root) / self.folder

    @property
    def label(self) -> str:
        """The state as people see it."""
        return f"{self.root.removesuffix('s')} {self.owner}"


def read_database(data_dir: Path, read: Callable[[Connection], T]) -> T | None:
    """Return what `read` returns for a directory's database; None if it is missing or empty. Raises DataDirError.

    `read` runs again if a coordinator started while it read the database of a stopped pool, which nothing locks.
    """
    path = data_dir / DATABASE
    for _ in range(READS_MAX):
        before = closed_at(path)
        found: T | None = None
        failure: ValueError | None = None
        try:
            found = read_closed(path, read, partial(open_read_only, has_log=before is None))
        except ValueError as error:
            failure = error
        if before is None or before == closed_at(path):
            if failure is not None:
                raise DataDirError(str(failure))
            return found
    raise DataDirError(f"{path} was changed during each of {READS_MAX} reads: try again")


def named_states(db: Connection) -> list[NamedState]:
    """Return the rows that name a folder which must exist: not those of samplers whose session has ended."""
    rows = db.execute(
        "SELECT 'checkpoints' AS root, path AS owner, folder, sha256 FROM checkpoints WHERE folder != ''"
        " UNION ALL SELECT 'snapshots', adapter_id, folder, sha256 FROM snapshots"
        " UNION ALL SELECT 'samplers', sampler_id, folder, sha256 FROM samplers JOIN sessions USING (session_id)"
        " WHERE folder != '' AND ended_at IS NULL"
    )
    return [NamedState(row["root"], row["owner"], row["folder"], row["sha256"]) for row in rows]


def listed(items: Sequence[str]) -> str:
    """Return items for a message: the first ones, and how many more there are."""
    more = f" and {len(items) - LISTED_MAX} more" if len(items) > LISTED_MAX else ""
    return ", ".join(items[:LISTED_MAX]) + more


@contextmanager
def one_moment(db: Connection) -> Iterator[None]:
    """Make all reads in the block see the database as it is at the begin, also while another process writes."""
    db.execute("BEGIN")
    try:
        db.execute("SELECT 1 FROM meta").fetchone()
        yield
    finally:
        db.execute("ROLLBACK")


def copy_database(source: Connection, target: Connection, on_bytes: Callable[[int], None]) -> None:
    """Copy a database; call it within `one_moment`. `on_bytes` gets the progress.

    Without a transaction of its own, SQLite would begin the copy again after each write of another process.
    """
    assert source.in_transaction
    page_bytes = source.execute("PRAGMA page_size").fetchone()[0]
    done = 0

    def note(_status: int, remaining: int, total: int) -> None:
        nonlocal done
        on_bytes((total - remaining - done) * page_bytes)
        done = total - remaining

    source.backup(target, pages=PAGES_AT_ONCE, progress=note)


def copy_state(source: Path, target: Path, on_bytes: Callable[[int], None]) -> str:
    """Copy a state folder, durably, and return the checksum of what was copied.

    Raises UnreadableError, also after a part was copied, and OSError.
    """
    digest = hashlib.sha256()
    target.mkdir(mode=PRIVATE_FOLDER)
    for path in _files_of(source):
        with open_private(target / path.name) as copy:
            for piece in _digested(digest, path):
                on_bytes(len(piece))
                copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
    sync_path(target)
    return digest.hexdigest()


def checksum(folder: Path, on_bytes: Callable[[int], None]) -> str:
    """Return the checksum of a state folder. Raises UnreadableError and OSError."""
    digest = hashlib.sha256()
    for path in _files_of(folder):
        for piece in _digested(digest, path):
            on_bytes(len(piece))
    return digest.hexdigest()


def _files_of(folder: Path) -> list[Path]:
    with _reading():
        return sorted(folder.iterdir())


def _digested(digest: hashlib._Hash, path: Path) -> Iterator[bytes]:
    """Yield a file in pieces, and add it to the checksum of its folder as `folders` does."""
    with _reading(), path.open("rb") as file:
        digest.update(f"{path.name}\0{os.fstat(file.fileno()).st_size}\0".encode())
        while piece := os.read(file.fileno(), PIECE_BYTES):
            digest.update(piece)
            yield piece


@contextmanager
def _reading() -> Iterator[None]:
    """Raise UnreadableError if a read in the block finds that the content is gone or damaged."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise UnreadableError(str(error)) from error


def take_over(db: Connection, identity: Identity, renamed: Sequence[tuple[NamedState, str]], wall: float) -> None:
    """Make a copied database that of another pool, in one transaction.

    `renamed`: the states that were copied, each with its folder's new name. All sessions end, and with them unnamed
    samplers. Adapters then accept only operations whose sequence number the server assigns: their clients may have
    acknowledged numbers that this copy lacks.
    """
    db.execute("BEGIN IMMEDIATE")
    for key, value in (("pool_id", identity.pool_id), ("epoch", identity.epoch)):
        db.execute("UPDATE meta SET value = ? WHERE key = ?", (value, key))
    db.execute(
        f"UPDATE sessions SET ended_at = ?, ended_service_s = {_SERVICE_S} WHERE ended_at IS NULL",  # noqa: S608
        (wall,),
    )
    db.execute("UPDATE samplers SET folder = '', sha256 = ''")
    if db.execute("PRAGMA user_version").fetchone()[0] >= SAMPLERS_COUNTED:
        db.execute("UPDATE samplers SET file_bytes = 0 WHERE file_bytes != 0")
    db.execute("UPDATE adapters SET is_restored = 1 WHERE deleted_at IS NULL")
    for state, folder in renamed:
        column = {"checkpoints": "path", "snapshots": "adapter_id"}[state.root]
        sql = f"UPDATE {state.root} SET folder = ? WHERE {column} = ?"  # noqa: S608 (our names)
        db.execute(sql, (folder, state.owner))
    db.execute("COMMIT")


def drop_states(db: Connection, lost: Collection[NamedState], wall: float) -> list[str]:
    """Delete rows whose states are lost, in one transaction; return what was lost with them, as people see it.

    Without its snapshot an adapter cannot be rebuilt, because its log begins there: it is deleted, with its operations
    that have not run and with the checkpoints that its log would still have made.
    """
    db.execute("BEGIN IMMEDIATE")
    also = []
    for state in lost:
        if state.root == "checkpoints":
            db.execute("DELETE FROM checkpoints WHERE path = ?", (state.owner,))
        elif state.root == "snapshots":
            also += _drop_adapter(db, state.owner, wall)
    db.execute("COMMIT")
    return also


def _drop_adapter(db: Connection, adapter_id: str, wall: float) -> list[str]:
    unwritten = db.execute(
        "SELECT path FROM checkpoints WHERE adapter_id = ? AND folder = ''", (adapter_id,)
    ).fetchall()
    db.execute("DELETE FROM checkpoints WHERE adapter_id = ? AND folder = ''", (adapter_id,))
    deletion = f"UPDATE adapters SET deleted_at = ?, deleted_service_s = {_SERVICE_S} WHERE adapter_id = ?"  # noqa: S608
    db.execute(deletion, (wall, adapter_id))
    db.execute("DELETE FROM snapshots WHERE adapter_id = ?", (adapter_id,))
    db.execute("DELETE FROM operations WHERE target_id = ? AND outcome_bytes IS NULL", (adapter_id,))
    drop_payloads(db, adapter_id)
    return [f"adapter {adapter_id}", *(f"checkpoint {row['path']}" for row in unwritten)]

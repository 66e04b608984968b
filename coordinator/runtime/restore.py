"""Makes a data directory of a backup, or of a stopped data directory: another pool with the same tenants and states.

The new pool has an id of its own, and an epoch above all that the source has seen. Its sessions have ended, because
operations that the source does not have may have been acknowledged to their clients. Takes the folders that the
database names, and verifies each; leaves others. Main invariant: the database gets its name last, so an interrupted
restore leaves nothing that a coordinator would start on.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.runtime.backup import NOT_BACKED_UP, UNFINISHED, Progress, Reporter, check_room, check_target
from coordinator.runtime.mounts import check_local, mount_table
from coordinator.storage.copies import (
    NamedState,
    UnreadableError,
    copy_database,
    copy_state,
    drop_states,
    listed,
    named_states,
    one_moment,
    read_database,
    take_over,
)
from coordinator.storage.disk import PRIVATE_FOLDER, RealDisk, sync_path
from coordinator.storage.identity import (
    DATABASE,
    QUARANTINE,
    ROOTS,
    SIDE_FILE,
    DataDirError,
    Identity,
    identity_of,
    read_side_file,
    state_folders,
    write_side_file,
)
from coordinator.storage.sqlite import Connection, open_connection, open_target, problems_of, writing_copy
from tinkerpool.serving import LOCK_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A data directory that was made."""

    source: Identity
    identity: Identity
    num_states: int
    num_bytes: int
    lost: list[str]
    """What was left out with `skip_damaged`."""


def restore(source: Path, data_dir: Path, *, skip_damaged: bool, on_progress: Progress) -> Restored:
    """Make a new data directory of a backup or a stopped data directory. Raises DataDirError and OSError.

    Refuses damaged or missing states unless they are to be skipped. What it made is removed then, and at an error.
    """
    check_target(data_dir, source, DATABASE)
    check_local(data_dir, mount_table())
    was_there = data_dir.exists()
    with _held(source):
        old = _identity(source)
        identity = Identity(pool_id=int(secrets.token_hex(8), 16) >> 1, epoch=_epoch_seen(source, old) + 1)
        data_dir.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        try:
            return _fill(source, data_dir, old, identity, skip_damaged=skip_damaged, on_progress=on_progress)
        except BaseException:
            for path in data_dir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not was_there:
                data_dir.rmdir()
            raise


def _fill(
    source: Path, data_dir: Path, old: Identity, identity: Identity, *, skip_damaged: bool, on_progress: Progress
) -> Restored:
    database_bytes = (source / DATABASE).stat().st_size
    unfinished = data_dir / UNFINISHED
    report = Reporter(on_progress, "Copying the database", database_bytes)
    with closing(open_target(unfinished)) as copy:

        def read(original: Connection) -> None:
            with one_moment(original):
                copy_database(original, copy, report.add)

        read_database(source, read)
        on_progress("Checking the database", 0, 0)
        if problems := problems_of(copy):
            raise DataDirError(f"{source / DATABASE} is damaged: {listed(problems)}. Restore an older backup")
        states = [state for state in named_states(copy) if state.root not in NOT_BACKED_UP]
    sizes = {state: _size(source / state.path) for state in states}
    check_room(data_dir, sum(sizes.values()))
    for name in (*ROOTS, QUARANTINE):
        (data_dir / name).mkdir(mode=PRIVATE_FOLDER)
    renamed, damaged = _copy_states(source, data_dir, identity, states, sum(sizes.values()), on_progress)
    if damaged and not skip_damaged:
        raise DataDirError(
            f"{len(damaged)} of {len(states)} states in {source} are missing or damaged: "
            f"{listed([state.label for state in damaged])}. Restore another backup, or leave them out with "
            "--skip-damaged: an adapter is lost with its snapshot"
        )
    on_progress("Writing the database", 0, 0)
    with writing_copy(unfinished), closing(open_connection(unfinished)) as copy:
        also = drop_states(copy, damaged, time.time())
        take_over(copy, identity, renamed, time.time())
        copy.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    for name in (*ROOTS, QUARANTINE):
        sync_path(data_dir / name)
    write_side_file(data_dir, identity, RealDisk())
    sync_path(unfinished)
    unfinished.rename(data_dir / DATABASE)
    sync_path(data_dir)
    sync_path(data_dir.parent)
    return Restored(
        source=old,
        identity=identity,
        num_states=len(renamed),
        num_bytes=database_bytes + sum(sizes[state] for state, _ in renamed),
        lost=[*(state.label for state in damaged if state.root == "checkpoints"), *also],
    )


def _copy_states(
    source: Path,
    data_dir: Path,
    identity: Identity,
    states: Sequence[NamedState],
    num_bytes: int,
    on_progress: Progress,
) -> tuple[list[tuple[NamedState, str]], list[NamedState]]:
    """Copy states under names of the new pool; return these with their new names, and the damaged ones."""
    report = Reporter(on_progress, "Copying and verifying the states", num_bytes)
    renamed, damaged = [], []
    for state in states:
        folder = identity.new_folder()
        target = data_dir / state.root / folder
        try:
            is_sound = copy_state(source / state.path, target, report.add) == state.sha256
        except UnreadableError:
            is_sound = False
        if is_sound:
            renamed.append((state, folder))
        else:
            damaged.append(state)
            shutil.rmtree(target, ignore_errors=True)
    return renamed, damaged


def _identity(source: Path) -> Identity:
    if (identity := read_database(source, identity_of)) is None:
        raise DataDirError(
            f"{source} has no {DATABASE}: give a complete backup (`tinkerpool backup` writes its {SIDE_FILE} last), "
            "or a stopped data directory"
        )
    return identity


def _epoch_seen(source: Path, database: Identity) -> int:
    """Return the highest epoch that anything in the source carries."""
    disk = RealDisk()
    epochs = [database.epoch, *(identity.epoch for _, identity in state_folders(source, disk))]
    try:
        side = read_side_file(source, disk)
    except DataDirError:
        side = None  # the database and the folders have the same facts
    return max([*epochs, *([side.epoch] if side is not None else [])])


@contextmanager
def _held(source: Path) -> Iterator[None]:
    """Keep coordinators from starting on the source. Raises DataDirError if one runs there."""
    try:
        lock = os.open(source / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirError(
                f"a pool is running on {source}: make a backup of it, with `tinkerpool backup`, and restore that; or "
                "stop it first"
            ) from None
        yield
    finally:
        os.close(lock)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir()) if folder.exists() else 0

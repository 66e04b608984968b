"""Backs a data directory up: a consistent copy of its database and state folders, also while a coordinator runs on it.

State folders are immutable, and a row is deleted before its folder. So hard links to all folders, made before a moment
of the database is read, hold every folder that its rows name, except those written in between: they are linked next. If
one of them is deleted before that, a later moment is read. Then the database is copied as it was at that moment.

Does not talk to the coordinator, and holds nothing that it waits for. Main invariant: `pool.json` of a backup is
written last; without it the backup is not complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.storage.copies import (
    NamedState,
    UnreadableError,
    copy_database,
    copy_state,
    named_states,
    one_moment,
    read_database,
)
from coordinator.storage.disk import PRIVATE_FOLDER, RealDisk, open_private, sync_path
from coordinator.storage.identity import (
    DATABASE,
    ROOTS,
    SIDE_FILE,
    DataDirError,
    Identity,
    check,
    identity_in,
    identity_of,
    write_side_file,
)
from coordinator.storage.sqlite import Connection, open_target

WORKPLACE = ".backup"
"""In the data directory, while a backup runs: links to the state folders, and the copy of the database."""
NOT_BACKED_UP = ("samplers",)
"""Folders of unnamed samplers are left out: they end with their session, and a restore ends all sessions."""
MOMENTS_MAX = 1000
"""Most moments that are tried. Each failed one needs a folder that was written, and deleted within milliseconds."""
UNFINISHED = f".{DATABASE}.writing"
"""A copy's database until the copy is complete."""
Progress = Callable[[str, int, int], None]
"""Gets what is being done, bytes done, and all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """A backup that was made."""

    identity: Identity
    num_states: int
    num_bytes: int
    damaged: list[str]
    """States that the pool itself has lost, that cannot be read, or that do not match their checksum."""


def back_up(data_dir: Path, target: Path, on_progress: Progress) -> Backup:
    """Back a data directory up into a new or empty folder. Raises DataDirError and OSError."""
    check_target(target, data_dir, SIDE_FILE)
    _check_source(data_dir)
    with _workplace(data_dir) as workplace:
        states, missing = _collect(data_dir, workplace, on_progress)
        sizes = {state: _size(workplace / state.path) for state in states}
        num_bytes = sum(sizes.values()) + (workplace / DATABASE).stat().st_size
        target.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        check_room(target, num_bytes)
        report = Reporter(on_progress, "Copying", num_bytes)
        for root in ROOTS:
            (target / root).mkdir(mode=PRIVATE_FOLDER)
        damaged = [f"{state.label} (its folder is missing)" for state in missing]
        num_states = 0
        for state in states:
            try:
                if copy_state(workplace / state.path, target / state.path, report.add) != state.sha256:
                    damaged.append(f"{state.label} (it does not match its checksum)")
            except UnreadableError:
                damaged.append(f"{state.label} (it cannot be read)")
                shutil.rmtree(target / state.path)
            else:
                num_states += 1
        copy_file(workplace / DATABASE, target / UNFINISHED, report.add)
    for root in ROOTS:
        sync_path(target / root)
    (target / UNFINISHED).rename(target / DATABASE)
    identity = read_database(target, identity_of)
    assert identity is not None
    write_side_file(target, replace(identity, is_backup=True), RealDisk())
    sync_path(target.parent)
    return Backup(identity=identity, num_states=num_states, num_bytes=num_bytes, damaged=damaged)


def remove_leftovers(data_dir: Path) -> None:
    """Remove what a killed backup left in a data directory, unless a backup is running there."""
    try:
        with _workplace(data_dir, is_made=False):
            pass
    except (DataDirError, FileNotFoundError):
        pass


def check_target(target: Path, source: Path, last_file: str) -> None:
    """Raise DataDirError unless a copy of `source` may be made at `target`: a new or empty folder outside of it."""
    if target.resolve().is_relative_to(source.resolve()):
        raise DataDirError(f"{target} is inside of {source}: choose a folder outside, best on another disk")
    if target.exists() and not target.is_dir():
        raise DataDirError(f"{target} is a file: choose a new folder")
    if target.is_dir() and any(target.iterdir()):
        is_part = not (target / last_file).exists() and (target / ROOTS[0]).exists()
        raise DataDirError(
            f"{target} is not empty: choose a new folder"
            + (f"; it may be an interrupted copy (it has no {last_file}), which you can remove" if is_part else "")
        )


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise DataDirError if a disk has no room for a copy."""
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        raise DataDirError(
            f"the copy needs {num_bytes / 1e6:,.0f} MB, and the disk of {folder} has {free / 1e6:,.0f} MB free: make "
            "room there, or choose another disk"
        )


def copy_file(source: Path, target: Path, on_bytes: Callable[[int], None]) -> None:
    """Copy a file, durably. Raises OSError."""
    with source.open("rb") as file, open_private(target) as copy:
        while piece := file.read(1 << 20):
            copy.write(piece)
            on_bytes(len(piece))
        copy.flush()
        os.fsync(copy.fileno())


class Reporter:
    """Adds up the bytes of a step."""

    def __init__(self, on_progress: Progress, step: str, num_bytes: int) -> None:
        self._on_progress = on_progress
        self._step = step
        self._num_bytes = num_bytes
        self._done = 0
        self.add(0)

    def add(self, num_bytes: int) -> None:
        """Report more bytes."""
        self._done += num_bytes
        self._on_progress(self._step, self._done, self._num_bytes)


def _check_source(data_dir: Path) -> None:
    """Raise DataDirError unless a coordinator may run, or runs, on a data directory."""
    for is_last in (False, True):
        if (identity := read_database(data_dir, identity_of)) is None:
            raise DataDirError(f"there is no pool in {data_dir}: it has no {DATABASE}")
        try:
            check(data_dir, identity, RealDisk())
        except DataDirError:
            if is_last:  # the next coordinator may have started after its identity was read
                raise


@contextmanager
def _workplace(data_dir: Path, *, is_made: bool = True) -> Iterator[Path]:
    """Hold an empty folder in the data directory, and remove it at the end. Raises DataDirError if a backup has it."""
    folder = data_dir / WORKPLACE
    if is_made:
        folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataDirError(f"another `tinkerpool backup` of {data_dir} is running: wait until it ends") from None
        if not folder.exists() or folder.stat().st_ino != os.fstat(lock).st_ino:
            raise DataDirError(f"another `tinkerpool backup` of {data_dir} has just ended: try again")
        for leftover in folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _collect(data_dir: Path, workplace: Path, on_progress: Progress) -> tuple[list[NamedState], list[NamedState]]:
    """Copy the database into the workplace and link every folder that it names; return these, and missing ones."""
    on_progress("Linking the states", 0, 0)
    for root in ROOTS:
        (workplace / root).mkdir(mode=PRIVATE_FOLDER)
        for folder in (data_dir / root).iterdir() if (data_dir / root).exists() else ():
            if identity_in(folder.name) is not None:
                _link(folder, workplace / root / folder.name)
    num_bytes = (data_dir / DATABASE).stat().st_size
    check_room(workplace, num_bytes)

    def copy(source: Connection) -> tuple[list[NamedState], list[NamedState]]:
        (workplace / DATABASE).unlink(missing_ok=True)  # pages of a copy that was not of one moment
        report = Reporter(on_progress, "Copying the database", num_bytes)
        missing: set[NamedState] = set()
        for _ in range(MOMENTS_MAX):
            with one_moment(source), closing(open_target(workplace / DATABASE)) as target:
                states = [state for state in named_states(source) if state.root not in NOT_BACKED_UP]
                were_missing = missing
                missing = {state for state in states if not _is_linked(data_dir, workplace, state)}
                # A row that names a missing folder twice has lost it; otherwise its deletion came in between.
                if missing <= were_missing:
                    copy_database(source, target, report.add)
                    return [state for state in states if state not in missing], list(missing)
        raise DataDirError(f"the states in {data_dir} change too quickly for a backup: try again")

    found = read_database(data_dir, copy)
    assert found is not None, f"{DATABASE} was there"
    return found


def _is_linked(data_dir: Path, workplace: Path, state: NamedState) -> bool:
    return (workplace / state.path).exists() or _link(data_dir / state.path, workplace / state.path)


def _link(folder: Path, target: Path) -> bool:
    """Hard-link the files of a folder; False: it was deleted meanwhile. Raises DataDirError if there are no links."""
    target.mkdir(mode=PRIVATE_FOLDER)
    try:
        for file in list(folder.iterdir()):
            os.link(file, target / file.name)
    except FileNotFoundError:
        shutil.rmtree(target)
        return False
    except PermissionError as error:
        raise DataDirError(
            f"the disk of {folder} cannot hold its files under two names ({error.strerror}): stop the pool and copy "
            "the data directory instead; `tinkerpool restore` takes such a copy"
        ) from None
    return True


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())

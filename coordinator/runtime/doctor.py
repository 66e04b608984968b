"""Examines a data directory, also of a running pool: what is damaged, and what a start would do. Changes nothing.

Does not repair. Main invariant: a problem is reported exactly if a start would be refused or something is damaged.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.base.config import DISK_FREE_BYTES_MIN
from coordinator.runtime.backup import NOT_BACKED_UP, WORKPLACE, Progress, Reporter
from coordinator.runtime.data_dir import FAILED_SYNC, RESERVE
from coordinator.runtime.mounts import check_local, mount_of, mount_table
from coordinator.storage.copies import NamedState, UnreadableError, checksum, listed, named_states, read_database
from coordinator.storage.disk import OTHERS, RESERVE_BYTES, FailedSync, RealDisk, Reserve
from coordinator.storage.folders import QUARANTINE_S, QuarantinedFolders
from coordinator.storage.identity import (
    DATABASE,
    QUARANTINE,
    ROOTS,
    DataDirError,
    Identity,
    check,
    identity_in,
    identity_of,
    read_side_file,
)
from coordinator.storage.sqlite import growth_of, problems_of


@dataclass(slots=True)
class Report:
    """What was found. A problem is damage, or a reason for which a start is refused."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    """What each fact is about, and the fact."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, items: list[str], text: str) -> None:
        """Add a note about items, if there are any."""
        if items:
            self.notes.append(f"{len(items)} {text}: {listed(items)}")

    def damage(self, items: list[str], text: str) -> None:
        """Add a problem with items, if there are any."""
        if items:
            self.problems.append(f"{len(items)} {text}: {listed(items)}")


def examine(data_dir: Path, running_pid: int | None, *, is_verified: bool, on_progress: Progress) -> Report:
    """Examine a data directory; `is_verified`: read every state and compare its checksum. Raises OSError."""
    report = Report()
    report.facts.append(("data directory", str(data_dir)))
    report.facts.append(("pool", f"process {running_pid} is running on it" if running_pid else "not running"))
    _examine_disk(data_dir, report)
    if not data_dir.is_dir():
        report.problems.append(f"{data_dir} does not exist: `tinkerpool up` would make a new pool there")
        return report
    identity = _examine_identity(data_dir, report, is_verified=is_verified)
    if identity is not None and not identity.is_backup:
        _examine_room(data_dir, report)
    if identity is not None:
        on_progress("Checking the database", 0, 0)
        roots = [root for root in ROOTS if not (identity.is_backup and root in NOT_BACKED_UP)]
        _examine_states(data_dir, roots, report, is_verified=is_verified, on_progress=on_progress)
        _examine_quarantine(data_dir, identity, report)
    report.note(
        [path.relative_to(data_dir).as_posix() for path in _open_to_others(data_dir)],
        "files or folders can be opened by other users; a start closes them",
    )
    if (data_dir / WORKPLACE).exists():
        report.notes.append(f"{WORKPLACE} belongs to a backup that is running, or was killed; a start removes it then")
    return report


def _examine_disk(data_dir: Path, report: Report) -> None:
    existing = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    mount = mount_of(data_dir, table := mount_table())
    kind = f"{mount.kind} at {mount.point}, " if mount is not None else ""
    report.facts.append(("file system", f"{kind}{shutil.disk_usage(existing).free / 1e9:,.1f} GB free"))
    try:
        check_local(data_dir, table)
    except DataDirError as error:
        report.problems.append(f"a start would be refused: {error}")


def _examine_room(data_dir: Path, report: Report) -> None:
    """Report a disk without the room that a start needs."""
    growth = read_database(data_dir, lambda db: growth_of(db, data_dir / DATABASE)) or 0
    reserve = Reserve(data_dir / RESERVE, RealDisk(), DISK_FREE_BYTES_MIN)
    missing = growth + RESERVE_BYTES // 2 - reserve.free() - (RESERVE_BYTES if reserve.is_on_disk() else 0)
    if missing > 0 and FailedSync(data_dir / FAILED_SYNC, RealDisk()).is_noted():
        report.problems.append(
            f"a start would be refused: a sync failed, and the disk has no room to copy the log: free "
            f"{missing / 1e6:,.0f} MB more"
        )
    elif missing > 0:
        report.notes.append(
            f"the disk is full: a start serves reads, results and deletions alone until {missing / 1e6:,.0f} MB more "
            "are free"
        )
    elif reserve.is_low():
        report.notes.append(
            f"the disk has {reserve.free() / 1e6:,.0f} MB free: new work is refused below "
            f"{reserve.floor_bytes / 1e6:,.0f} MB, unless `--disk-free-min` sets another floor"
        )


def _examine_identity(data_dir: Path, report: Report, *, is_verified: bool) -> Identity | None:
    """Return the identity of the database, if it can be read; that of the side file, if the directory is a backup."""
    try:
        side = read_side_file(data_dir, RealDisk())
        identity = read_database(data_dir, identity_of)
        if side is not None and side.is_backup:
            report.notes.append("it is a backup: a start on it is refused, and `tinkerpool restore` takes it")
            if identity is None:
                report.problems.append(f"the backup has lost its {DATABASE}")
                return None
            identity = side
        else:
            check(data_dir, identity, RealDisk())
    except DataDirError as error:
        report.problems.append(f"a start would be refused: {error}")
        identity = _identity_or_none(data_dir)
    else:
        if identity is None:
            nothing = f"there is no {DATABASE}, and nothing else of a pool"
            if is_verified:
                report.problems.append(f"{nothing}, so there is nothing to verify: is its disk mounted?")
            else:
                report.notes.append(f"{nothing}: a start would make a new pool")
    if identity is not None:
        hours = identity.service_ms / 3.6e6
        text = f"{identity.name}, epoch {identity.epoch}, {hours:,.1f} hours of service"
        report.facts.append(("identity", text))
    return identity


def _identity_or_none(data_dir: Path) -> Identity | None:
    try:
        return read_database(data_dir, identity_of)
    except DataDirError:
        return None


def _examine_states(
    data_dir: Path, roots: Sequence[str], report: Report, *, is_verified: bool, on_progress: Progress
) -> None:
    def named() -> list[NamedState]:
        return [state for state in read_database(data_dir, named_states) or [] if state.root in roots]

    folders = {
        f"{root}/{path.name}" for root in ROOTS if (data_dir / root).is_dir() for path in (data_dir / root).iterdir()
    }
    report.damage(read_database(data_dir, problems_of) or [], f"faults in {DATABASE}; restore a backup")
    states = named()
    missing = [state for state in states if not (data_dir / state.path).is_dir()]
    sound = [state for state in states if state not in missing]
    damaged = _damaged(data_dir, sound, on_progress) if is_verified else []
    # A running pool may have deleted a state since its row was read: rows first, then folders.
    still_named = set(named()) if missing or damaged else set()
    report.damage(_labels(missing, still_named), "states are lost: their folders are missing")
    report.damage(_labels(damaged, still_named), "states cannot be read, or do not match their checksums")
    counts = ", ".join(f"{sum(state.root == root for state in states)} {root}" for root in roots)
    report.facts.append(("states", counts + (", all read and compared" if is_verified else "")))
    known = {state.path.as_posix() for state in states}
    unknown = sorted(name for name in folders - known if identity_in(Path(name).name) is not None)
    report.note(unknown, "folders have no row (a running pool may be writing them); a start moves them into quarantine")


def _damaged(data_dir: Path, states: Sequence[NamedState], on_progress: Progress) -> list[NamedState]:
    """Return the states that cannot be read, or do not match their checksums."""
    sizes = [sum(file.stat().st_size for file in _files(data_dir / state.path)) for state in states]
    progress = Reporter(on_progress, "Comparing checksums", sum(sizes))

    def is_sound(state: NamedState) -> bool:
        try:
            return checksum(data_dir / state.path, progress.add) == state.sha256
        except UnreadableError:
            return False

    return [state for state in states if not is_sound(state)]


def _labels(states: Iterable[NamedState], still_named: Collection[NamedState]) -> list[str]:
    return [state.label for state in states if state in still_named]


def _examine_quarantine(data_dir: Path, identity: Identity, report: Report) -> None:
    if not (data_dir / QUARANTINE).is_dir():
        return
    lines = []
    for path in sorted((data_dir / QUARANTINE).iterdir()):
        expiry_s = QuarantinedFolders.expiry_of(path.name)
        if expiry_s is None:
            continue
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_ctime))
        left_days = max(0.0, expiry_s - identity.service_ms / 1000) / 86400
        lines.append(f"{path.name} (since {since}, deleted after {left_days:.1f} more days of service)")
    report.note(lines, f"folders without a row are in quarantine, for {QUARANTINE_S / 86400:.0f} days each")


def _open_to_others(data_dir: Path) -> Iterator[Path]:
    """Yield everything that other users could open."""
    if data_dir.stat().st_mode & OTHERS:
        yield data_dir
    for path in data_dir.rglob("*"):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        if mode & OTHERS and not stat.S_ISLNK(mode):
            yield path


def _files(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []

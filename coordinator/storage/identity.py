"""Whose data a data directory has: the pool's id and the epoch, in the database, in folders' names and in a side file.

A random id is made with a new database. The name of a state folder carries it with the epoch of the coordinator that
wrote the folder, and so does `pool.json`, which each coordinator writes before its first folder. So a start can tell
that an older copy of the database was put back, that the database is missing, or that files of two pools are mixed.
Does not depend on tables or on the content of folders. Main invariant: no file carries an epoch or a service time
that is not durable in the database.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.storage.disk import Disk
from coordinator.storage.sqlite import Connection, read_meta

DATABASE = "tinkerpool.db"
SIDE_FILE = "pool.json"
ROOTS = ("checkpoints", "snapshots", "samplers")
"""The folders of a data directory that hold state folders."""
QUARANTINE = "quarantine"
_TEMPORARY = f".{SIDE_FILE}.writing"
_NAME = re.compile(r"([0-9a-f]{16})-([0-9]{1,10})-[0-9a-f]{32}")


class DataDirError(Exception):
    """A data directory cannot be used as it is. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A pool, and how far its database had come."""

    pool_id: int
    """63 random bits, shown as 16 hexadecimal digits."""
    epoch: int
    service_ms: int = 0
    """Service time that was durable then."""
    is_backup: bool = False
    """Whether it belongs to a backup, on which no coordinator may run."""

    @property
    def name(self) -> str:
        """The pool's id as people see it."""
        return f"{self.pool_id:016x}"

    def new_folder(self) -> str:
        """Return a name for a new state folder."""
        return f"{self.name}-{self.epoch}-{uuid.uuid4().hex}"


def identity_of(db: Connection) -> Identity:
    """Return the identity in a database."""
    pool_id, epoch, service_ms = (read_meta(db, key) for key in ("pool_id", "epoch", "service_ms"))
    return Identity(pool_id=pool_id, epoch=epoch, service_ms=service_ms)


def identity_in(folder: str) -> Identity | None:
    """Return the identity in the name of a state folder; None: it is no name of a state folder."""
    match = _NAME.fullmatch(folder)
    return Identity(pool_id=int(match[1], 16), epoch=int(match[2])) if match else None


def write_side_file(data_dir: Path, identity: Identity, disk: Disk) -> None:
    """Replace the side file, durably and atomically. Raises OSError."""
    content = {"pool_id": identity.name, "epoch": identity.epoch, "service_ms": identity.service_ms}
    if identity.is_backup:
        content["is_backup"] = True
    temporary = data_dir / _TEMPORARY
    disk.write(temporary, json.dumps(content).encode() + b"\n")
    disk.sync(temporary)
    disk.rename(temporary, data_dir / SIDE_FILE)
    disk.sync(data_dir)


def read_side_file(data_dir: Path, disk: Disk) -> Identity | None:
    """Return what the side file says; None if there is none. Raises DataDirError if it cannot be read, and OSError."""
    if SIDE_FILE not in disk.names(data_dir):
        return None
    try:
        content = json.loads(disk.read(data_dir / SIDE_FILE))
        return Identity(
            pool_id=int(content["pool_id"], 16),
            epoch=int(content["epoch"]),
            service_ms=int(content["service_ms"]),
            is_backup=bool(content.get("is_backup", False)),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataDirError(
            f"{data_dir / SIDE_FILE} is damaged. It only repeats what the database has: if {DATABASE} is the newest "
            f"one of this pool, remove {SIDE_FILE} and start again"
        ) from None


def state_folders(data_dir: Path, disk: Disk) -> Iterator[tuple[str, Identity]]:
    """Yield the state folders, as `root/name`, with the identity in each name. Raises OSError."""
    roots = set(disk.names(data_dir))
    for root in ROOTS:
        for name in disk.names(data_dir / root) if root in roots else ():
            if (identity := identity_in(name)) is not None:
                yield f"{root}/{name}", identity


def check(data_dir: Path, database: Identity | None, disk: Disk) -> None:
    """Raise DataDirError unless a coordinator may run on the database of a data directory. Changes nothing.

    `database`: its identity; None if it is missing or empty. Raises OSError.
    """
    side = read_side_file(data_dir, disk)
    if side is not None and side.is_backup:
        raise DataDirError(
            f"{data_dir} is a backup of pool {side.name}: make a data directory of it with "
            f"`tinkerpool restore {data_dir} NEW_DATA_DIR`"
        )
    found = [] if side is None else [(SIDE_FILE, side)]
    found += state_folders(data_dir, disk)
    if database is None:
        if found:
            raise _missing(data_dir, *found[0])
        return
    for name, identity in found:
        if identity.pool_id != database.pool_id:
            raise _mixed(data_dir, database, name, identity)
    name, newest = max(found, key=lambda each: each[1].epoch, default=("", database))
    if newest.epoch > database.epoch:
        raise _older(data_dir, f"it is of epoch {database.epoch}, and {name} of epoch {newest.epoch}")
    if side is not None and side.service_ms > database.service_ms:
        hours = (side.service_ms - database.service_ms) / 3.6e6
        raise _older(data_dir, f"it lacks the last {hours:.2f} hours of service that {SIDE_FILE} knows of")


def _missing(data_dir: Path, name: str, identity: Identity) -> DataDirError:
    return DataDirError(
        f"{data_dir / DATABASE} is missing or empty, but {name} belongs to pool {identity.name}. Put the database of "
        "that pool back; or make a new data directory of a backup, with `tinkerpool restore BACKUP NEW_DATA_DIR`; or "
        "choose an empty data directory. If a `tinkerpool restore` into this directory was interrupted, remove the "
        "directory and restore again"
    )


def _older(data_dir: Path, why: str) -> DataDirError:
    return DataDirError(
        f"{data_dir / DATABASE} is an older copy: {why}. A pool on it would lose every operation since. Put the newer "
        f"database back, with its -wal file; or go on from the older copy, with `tinkerpool restore {data_dir} "
        "NEW_DATA_DIR`; or choose an empty data directory"
    )


def _mixed(data_dir: Path, database: Identity, name: str, identity: Identity) -> DataDirError:
    return DataDirError(
        f"{data_dir} mixes two pools: {DATABASE} belongs to pool {database.name}, and {name} to pool {identity.name}. "
        f"Put the files of one pool back; or take what this database names, with `tinkerpool restore {data_dir} "
        "NEW_DATA_DIR`; or choose an empty data directory"
    )

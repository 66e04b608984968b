"""The file system below a path, by the kernel's table of mounts. Refuses network file systems for a database.

Does not depend on what a data directory holds. Main invariant: an unknown kind of file system is not refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from coordinator.storage.identity import DataDirError

TABLE = Path("/proc/self/mountinfo")
NETWORK = re.compile(
    r"9p|afs|beegfs|ceph|cifs|coda|davfs|glusterfs|gpfs|lustre|ncpfs|nfs4?|orangefs|panfs|pvfs2|smb3|smbfs|wekafs"
    r"|fuse\.(blobfuse2?|ceph|cvmfs2|davfs2|gcsfuse|glusterfs|goofys|juicefs|lizardfs|mfs|moosefs|rclone|s3fs|seaweedfs"
    r"|sshfs)"
)
"""Kinds of file systems that other machines can change. `9p` also has folders of a virtual machine's host."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: Path
    kind: str

    @property
    def is_network(self) -> bool:
        """Whether other machines can change it."""
        return NETWORK.fullmatch(self.kind) is not None


def mount_table() -> str:
    """Return the kernel's table of mounts; empty where the system has none."""
    try:
        return TABLE.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def mount_of(path: Path, table: str) -> Mount | None:
    """Return the file system of a path, which need not exist; None: the table does not have it."""
    real = path.resolve()
    found: Mount | None = None
    for line in table.splitlines():
        mount, _, device = line.partition(" - ")
        if len(fields := mount.split(" ")) < 5 or not device:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), fields[4]))
        # Of two mounts at the same point the later one covers the other.
        if real.is_relative_to(point) and (found is None or len(point.parts) >= len(found.point.parts)):
            found = Mount(point, device.split(" ", 1)[0])
    return found


def check_local(data_dir: Path, table: str) -> None:
    """Raise DataDirError if a data directory is on a network file system. There is no way around it."""
    mount = mount_of(data_dir, table)
    if mount is not None and mount.is_network:
        raise DataDirError(
            f"{data_dir} is on a network file system ({mount.kind}, mounted at {mount.point}). The database needs "
            "locks, syncs and shared memory that hold for every process that opens it, and would be damaged there. "
            "Choose a data directory on a disk of this machine; backups may be on the network (`tinkerpool backup`)"
        )

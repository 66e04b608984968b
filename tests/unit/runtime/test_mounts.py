"""The file system of a path is found in the kernel's table, and kinds that other machines can change are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.runtime.mounts import Mount, check_local, mount_of, mount_table
from coordinator.storage.identity import DataDirError

TABLE = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:40 / /mnt rw shared:7 master:1 - tmpfs tmpfs rw
31 30 0:41 / /mnt/a\\040b rw - nfs4 server:/export rw,vers=4.2
32 27 0:42 / /home rw - ext4 /dev/vdb rw
33 27 0:43 / /home rw shared:2 - fuse.sshfs host:/home rw
34 33 8:1 /sub /home/me/disk rw - xfs /dev/sda1 rw
a line of another format
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/var/pool", Mount(Path("/"), "ext4")),
        ("/mnt", Mount(Path("/mnt"), "tmpfs")),
        ("/mntx", Mount(Path("/"), "ext4")),
        ("/mnt/a b/pool", Mount(Path("/mnt/a b"), "nfs4")),
        ("/home/me", Mount(Path("/home"), "fuse.sshfs")),
        ("/home/me/disk/pool", Mount(Path("/home/me/disk"), "xfs")),
    ],
)
def test_the_innermost_and_latest_mount_is_that_of_a_path(path: str, expected: Mount) -> None:
    assert mount_of(Path(path), TABLE) == expected


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:1 / {tmp_path}/real rw - cifs //host/share rw\n"
    assert mount_of(tmp_path / "link" / "pool", table) == Mount(tmp_path / "real", "cifs")


@pytest.mark.parametrize(
    "kind",
    "nfs nfs4 cifs smb3 9p fuse.sshfs fuse.glusterfs fuse.s3fs glusterfs lustre ceph afs beegfs gpfs".split(),  # noqa: SIM905
)
def test_network_file_systems_are_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(DataDirError, match=rf"/data/pool is on a network file system \({kind}, mounted at /data\)"):
        check_local(Path("/data/pool"), f"28 27 0:1 / /data rw - {kind} source rw\n")


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "apfs", "fuse.ntfs-3g", "virtiofs"]
)
def test_other_file_systems_pass(kind: str) -> None:
    check_local(Path("/data/pool"), f"28 27 0:1 / /data rw - {kind} source rw\n")


def test_a_system_without_a_table_passes() -> None:
    check_local(Path("/data/pool"), "")


def test_the_table_of_this_machine_has_the_file_system_of_this_file() -> None:
    if not (table := mount_table()):
        pytest.skip("this system has no table of mounts")
    assert mount_of(Path(__file__), table) is not None

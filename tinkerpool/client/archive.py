"""Makes a directory of a tar archive from the pool, whole or not at all. Paths in the archive are not trusted."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Self


class ArchiveFile:
    """Collects an archive in a folder next to `directory`, where it is unpacked and may be changed, before the result
    gets that name. A context manager, which removes the folder."""

    def __init__(self, directory: Path) -> None:
        """Raises FileExistsError if the directory exists and is not empty, or cannot be replaced."""
        directory = directory.resolve()
        if directory.exists():
            if not directory.is_dir() or any(directory.iterdir()):
                raise FileExistsError(f"{directory} exists and is not an empty directory: choose another one")
            if directory.is_mount() or directory == Path.cwd():
                raise FileExistsError(f"{directory} is mounted, or the current directory: choose a new one in it")
        self._directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
        """The folder; on the disk of the directory."""
        self._file = (self.work / "archive.tar").open("w+b")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        shutil.rmtree(self.work, ignore_errors=True)

    def write(self, data: bytes) -> None:
        """Append the next bytes of the archive."""
        self._file.write(data)

    def unpack(self) -> Path:
        """Return a directory in the folder with the archive's files.

        Raises ValueError for an archive with anything but plain files inside it.
        """
        content = self.work / "content"
        content.mkdir()
        self._file.seek(0)
        try:
            with tarfile.open(fileobj=self._file, mode="r:") as archive:
                for member in archive:
                    self._unpack_member(archive, member, content)
        except tarfile.TarError as error:
            raise ValueError(f"the pool sent a broken archive: {error}") from error
        return content

    def publish(self, content: Path) -> None:
        """Give a complete directory in the folder its final name."""
        if self._directory.exists():
            self._directory.rmdir()
        content.rename(self._directory)

    def _unpack_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, content: Path) -> None:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise ValueError(f"the pool sent an archive with {member.name[:80]!r}, which is no plain file inside it")
        if member.isdir():
            return
        source = archive.extractfile(member)
        assert source is not None
        target = content.joinpath(*path.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, target.open("wb") as file:
            shutil.copyfileobj(source, file)

"""The lock on a data directory: at most one coordinator holds it. The kernel frees it when its process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class DataDirInUse(Exception):
    """Another coordinator holds the data directory."""


class DataDirLock:
    """Holds a data directory until `release`."""

    def __init__(self, data_dir: Path) -> None:
        """Take the lock. Raises DataDirInUse."""
        self._file = (data_dir / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise DataDirInUse(
                f"{data_dir} is in use by another tinkerpool (process {owner}): stop that one, or choose another data "
                "directory"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Release the data directory for another coordinator."""
        self._file.close()

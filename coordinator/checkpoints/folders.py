"""The three roots of state folders in a data directory: checkpoints, snapshots and unnamed samplers' weights.

Does not depend on rows: `coordinator.storage.folders` has the format of a folder and its invariants.
"""

from __future__ import annotations

from pathlib import Path

from coordinator.storage.disk import Disk
from coordinator.storage.folders import StateFiles


class StateFolders:
    """The state folders of a data directory."""

    def __init__(self, data_dir: Path, disk: Disk) -> None:
        """Raises OSError."""
        self.checkpoints = StateFiles(data_dir / "checkpoints", "checkpoint", disk)
        self.snapshots = StateFiles(data_dir / "snapshots", "snapshot", disk)
        self.samplers = StateFiles(data_dir / "samplers", "sampler", disk)

"""The rows of states that a cycle has written or holds, and that its commit will store. In memory.

Does not access files or the database. Main invariant: at most one staged checkpoint has a path.
"""

from __future__ import annotations

from collections.abc import Collection

from coordinator.storage.rows import CheckpointRow, SamplerRow, SnapshotRow


class StagedStates:
    """The rows of one cycle's saves and loads."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointRow] = []
        self.samplers: list[SamplerRow] = []
        self.snapshots: list[SnapshotRow] = []
        """Snapshots of loads, which cannot be replayed once their checkpoint is deleted."""
        self.replaced_checkpoints: list[tuple[str, str]] = []
        """Adapter and folder of each checkpoint that is overwritten."""
        self.replaced_snapshots: list[tuple[str, str]] = []
        """Adapter and folder of each snapshot that a load replaces."""

    def add_checkpoint(self, row: CheckpointRow, stored: CheckpointRow | None) -> None:
        """Stage a checkpoint; it replaces `stored`, and a checkpoint staged under its path."""
        replaced = [each for each in self.checkpoints if each.path == row.path]
        self.checkpoints = [each for each in self.checkpoints if each.path != row.path]
        for each in (*replaced, *([stored] if stored is not None else [])):
            assert each.folder, "only training states are overwritten, and their file is written before their row"
            self.replaced_checkpoints.append((row.adapter_id, each.folder))
        self.checkpoints.append(row)

    def has_path(self, path: str) -> bool:
        """Return whether a checkpoint is staged under this path."""
        return any(row.path == path for row in self.checkpoints)

    def add_sampler(self, row: SamplerRow) -> None:
        """Stage an unnamed sampler."""
        self.samplers.append(row)

    def drop_samplers(self, versions: Collection[str]) -> None:
        """Remove these unnamed samplers."""
        self.samplers = [row for row in self.samplers if row.version not in versions]

    def add_snapshot(self, row: SnapshotRow, replaced: SnapshotRow | None) -> None:
        """Stage the snapshot of a load."""
        self.snapshots.append(row)
        if replaced is not None:
            self.replaced_snapshots.append((row.adapter_id, replaced.folder))

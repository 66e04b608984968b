"""Classes of workers without a database."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.base.time import SystemTime, Time
from coordinator.fleet.fleet import Fleet
from coordinator.scheduling.classes import Classes
from coordinator.storage.rows import WorkerClassRow
from coordinator.storage.workers import WorkerClasses


@dataclass(slots=True)
class MemoryReports(WorkerClasses):
    """The classes that workers reported, in memory."""

    rows: dict[str, str] = field(default_factory=dict)
    """Worker to fingerprint."""

    def of_model(self, base_model: str) -> dict[str, str]:
        return dict(self.rows)

    def put(self, row: WorkerClassRow) -> None:
        self.rows[row.worker_id] = row.fingerprint


def classes_of(fleet: Fleet, time: Time | None = None, wait_s: float = 600.0, **reported: str) -> Classes:
    """Return the classes of the toy's workers; `reported`: what workers reported before."""
    return Classes("toy", fleet, time or SystemTime(), wait_s, MemoryReports(dict(reported)))

"""Failpoints: named places in the way of a request where tests stop or kill a process. Off by default.

`arm` sets an action at a point in this process. In other processes the environment variable `TINKERPOOL_FAILPOINTS`
names a folder: the first process that reaches a point with a file of that name renames the file and kills itself with
SIGKILL. So one file kills one process, of any incarnation.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

ENVIRONMENT = "TINKERPOOL_FAILPOINTS"

POINTS: Mapping[str, str] = {
    "append.before_commit": "operations are written, but not committed",
    "append.after_commit": "operations are durable, and not acknowledged",
    "plan.before_commit": "the record of a plan is written, but not committed",
    "plan.after_commit": "the record of a plan is durable",
    "dispatch.partial": "some workers have received their batches of a cycle, others have not",
    "worker.received": "a batch has reached its worker, and nothing of it was applied",
    "worker.applied": "a batch is applied, and its results are not returned",
    "cycle.before_commit": "a cycle's outcomes are written, but not committed",
    "cycle.after_commit": "a cycle's outcomes are durable, and no waiter has them",
    "snapshot.written": "a snapshot lies under its temporary name",
    "snapshot.renamed": "a snapshot has its name, and no row points at it",
    "snapshot.before_commit": "its row is written and the log is cut, but that is not committed",
    "snapshot.after_commit": "its row is durable and the log is cut; the snapshot before it is still there",
    "checkpoint.written": "a checkpoint lies under its temporary name",
    "checkpoint.renamed": "a checkpoint has its name, and no row points at it",
    "sampler.written": "the weights of an unnamed sampler, which is committed, lie under their temporary name",
    "sampler.renamed": "they have their name, and its row does not point at them",
    "publish.before_commit": "its row points at them, but that is not committed",
    "publish.after_commit": "its row points at them, and the log that made them is still kept",
    "collect.before_commit": "rows that nothing needs are deleted, but that is not committed",
    "collect.after_commit": "they are gone, and the rows that only they needed are still there",
}
"""Every point, with the state of the system there."""

_armed: dict[str, Callable[[], None]] = {}
_folder = os.environ.get(ENVIRONMENT, "")


def failpoint(name: str) -> None:
    """Run the armed action of a point, or die if the folder has a file for it."""
    if _armed and name in _armed:
        _armed[name]()
    if _folder:
        _die_if_requested(name)


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` whenever this process reaches the point, on the same thread, until `disarm`."""
    assert name in POINTS, f"there is no failpoint {name}"
    _armed[name] = action


def disarm() -> None:
    """Remove the actions of all points of this process."""
    _armed.clear()


def _die_if_requested(name: str) -> None:
    file = Path(_folder) / name
    try:
        file.rename(file.with_name(f"{name}.hit"))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

"""Named places in the way of a request where tests stop the world. Off by default.

`arm` puts an action of a test's own there, in this process. In real processes the environment variable
`TINKERPOOL_FAILPOINTS` names a folder: whoever comes first to a point of which there is a file takes that file away
and dies on the spot, as by `kill -9`. So one file kills once, whichever process and life comes by.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

ENVIRONMENT = "TINKERPOOL_FAILPOINTS"

POINTS: Mapping[str, str] = {
    "append.before_commit": "operations are written, but not committed",
    "append.after_commit": "operations are durable, and nobody has been told",
    "plan.before_commit": "the record of a plan is written, but not committed",
    "plan.after_commit": "the record of a plan is durable",
    "dispatch.partial": "a cycle has reached some of its workers, and not the others",
    "worker.received": "a batch has reached its worker, and nothing of it was applied",
    "worker.applied": "a batch is applied, and nobody has been told",
    "cycle.before_commit": "a cycle's outcomes are written, but not committed",
    "cycle.after_commit": "a cycle's outcomes are durable, and nobody has been told",
    "snapshot.written": "a snapshot lies under its temporary name",
    "snapshot.renamed": "a snapshot has its name, and no row points at it",
    "snapshot.before_commit": "its row is written and the log is cut, but that is not committed",
    "snapshot.after_commit": "its row is durable and the log is cut; the snapshot before it is still there",
    "checkpoint.written": "a checkpoint lies under its temporary name",
    "checkpoint.renamed": "a checkpoint has its name, and no row points at it",
    "sampler.written": "the weights of an unnamed sampler, which is committed, lie under their temporary name",
    "sampler.renamed": "they have their name, and its row does not point at them",
    "publish.before_commit": "its row points at them, but that is not committed",
    "publish.after_commit": "its row points at them, and nobody has been told that it needs the log no more",
}
"""Every point, and what is true there."""

_armed: dict[str, Callable[[], None]] = {}
_folder = os.environ.get(ENVIRONMENT, "")


def failpoint(name: str) -> None:
    """A place where a test may end the world."""
    if _armed and name in _armed:
        _armed[name]()
    if _folder:
        _die_if_told(name)


def arm(name: str, action: Callable[[], None]) -> None:
    """Run `action` whenever this process comes to the point, until `disarm`. On the thread that comes by."""
    assert name in POINTS, f"there is no failpoint {name}"
    _armed[name] = action


def disarm() -> None:
    """Every point of this process is nothing again."""
    _armed.clear()


def _die_if_told(name: str) -> None:
    file = Path(_folder) / name
    try:
        file.rename(file.with_name(f"{name}.hit"))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

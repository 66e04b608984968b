"""What an attack is: a program against a pool's doors, and the counts of the pool's answers.

A program is an asynchronous generator. It prepares before its first `yield` and attacks after it; it keeps its
connections open from its second `yield`, or its end, until it is closed. Does not depend on the pool's processes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coordinator.base.config import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from scripts.attack.pool import AttackedPool

BODY_BYTES = MESSAGE_BYTES_MAX - (64 << 10)
"""Size of the largest messages that attacks send: just below what the pool takes."""
NO_KEY = "no key"
TENANT = "one tenant"


@dataclass(slots=True, kw_only=True)
class Target:
    """A pool as its attacker sees it."""

    grpc: str
    """Host and port of the gRPC door."""
    http: str
    """Host and port of the HTTP door."""
    key: str
    """An API key of the attacker's own tenant. Attacks without a key do not send it."""
    model: str
    scale: float
    """Size of the attack: 1 is the size that its text names."""
    duration_s: float
    """How long an attack without a number of its own goes on."""
    tally: Counter[str] = field(default_factory=Counter)
    """Answers of the pool, and other counts, by name."""
    _ends_at: float = 0.0

    def many(self, number: int) -> int:
        """Return a number of the attack at this scale, at least 1."""
        return max(1, round(number * self.scale))

    def begin(self) -> None:
        """Begin the time of the attack, after its preparation."""
        self._ends_at = time.monotonic() + self.duration_s

    def is_on(self) -> bool:
        """Return whether an attack without a number of its own goes on."""
        return time.monotonic() < self._ends_at


Program = Callable[[Target], AsyncGenerator[None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack."""

    name: str
    by: str
    """`NO_KEY` or `TENANT`."""
    text: str
    """What the attacker does, at scale 1."""
    program: Program
    files_max: int | None = None
    """File descriptors that the coordinator may open. None: as many as this program."""
    is_tls: bool = False
    """Whether the doors are served over TLS."""
    is_held: bool = False
    """Whether the attack is repeated at the end, so that the pool is stopped while it goes on."""
    serve_arguments: tuple[str, ...] = ()
    """More options of `tinkerpool serve`."""
    disk_bytes: int | None = None
    """The size of the file system that the pool's data is on, which is mounted for it. None: the machine's disk."""
    observe: Callable[[AttackedPool], str] | None = None
    """Called while the attack goes on; returns what else it did."""

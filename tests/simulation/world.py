"""The state that all parts of a history share: seed, virtual clock, trace, injected faults, the crash of the process.

Every part draws from its own stream of random numbers, so that a change in one part does not shift the others.
Does not depend on any part.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NoReturn

from tests.simulation.loop import Crash, Livelock, SimLoop

WALL_START = 1.7e9
CLOCK_READS_MAX = 20_000
"""How often the coordinator may read the clock at one instant of virtual time."""


class World:
    """The shared state of one history."""

    def __init__(self, seed: int, on_event: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        """Virtual seconds since the beginning of the history, over all epochs."""
        self.faults: Counter[str] = Counter()
        """Number of injected faults, by kind."""
        self.work: Counter[str] = Counter()
        """Number of things that the service did, by kind."""
        self.wall_offset = 0.0
        self.is_killed = False
        """The coordinator's process was killed: its remaining calls have no effect."""
        self.is_database_locked = False
        """Another process holds the lock of the database."""
        self.has_reserve_for_deletions = False
        """The disk is full since a moment at which the coordinator held its reserve."""
        self.last_fault = ""
        self._hash = hashlib.sha256()
        self._on_event = on_event

    def random(self, name: str) -> Random:
        """Return the stream of random numbers of one part."""
        return Random(f"{self.seed}/{name}")

    def trace(self, event: str) -> None:
        """Add an event to the trace. Two runs of a seed must have equal hashes over their traces."""
        line = f"{self.time():.6f} {event}"
        self._hash.update(line.encode())
        if self._on_event is not None:
            self._on_event(line)

    def digest(self) -> str:
        """Return the hash of the trace so far."""
        return self._hash.hexdigest()[:16]

    def fault(self, kind: str, detail: str = "") -> None:
        """Count a fault and add it to the trace."""
        self.faults[kind] += 1
        self.last_fault = f"{kind} {detail}".strip()
        self.trace(f"FAULT {self.last_fault}")

    def crash(self, why: str) -> NoReturn:
        """Kill the coordinator's process at this point. Always raises Crash."""
        if not self.is_killed:
            self.fault("crash", why)
            self.faults[f"crash at {why.split(' ', maxsplit=1)[0]}"] += 1
        self.is_killed = True
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.kill()
        raise Crash(why)

    def time(self) -> float:
        """Return the virtual seconds since the beginning of the history."""
        with contextlib.suppress(RuntimeError):  # no loop runs between two epochs
            self.now = asyncio.get_running_loop().time()
        return self.now


class SimTime:
    """Implements `coordinator.base.time.Time` for one epoch."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._started = self._seen = world.now
        self._num_reads = 0

    def monotonic(self) -> float:
        self._num_reads = self._num_reads + 1 if self._world.time() == self._seen else 0
        self._seen = self._world.now
        if self._num_reads > CLOCK_READS_MAX:
            raise Livelock("the coordinator loops without letting time pass")
        return 100.0 + self._world.now - self._started

    def wall(self) -> float:
        return WALL_START + self._world.time() + self._world.wall_offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

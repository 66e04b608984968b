"""What one history shares: its seed, its clock, its trace, what went wrong on purpose, and the death of the process.

Every part draws from a stream of random numbers of its own, so that a change in one part does not move the others.
Knows none of the parts.
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
LOOKS_MAX = 20_000
"""How often the coordinator may look at the clock in one moment of virtual time."""


class World:
    """One history."""

    def __init__(self, seed: int, on_event: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        """Virtual seconds since the beginning, over all lives."""
        self.faults: Counter[str] = Counter()
        """What was done to the service, by kind."""
        self.work: Counter[str] = Counter()
        """What the service did, by kind."""
        self.wall_offset = 0.0
        self.is_dead = False
        """The coordinator's process has died: whatever it still tries has no effect."""
        self.last_fault = ""
        self._hash = hashlib.sha256()
        self._on_event = on_event

    def random(self, name: str) -> Random:
        """A stream of random numbers for one part."""
        return Random(f"{self.seed}/{name}")

    def trace(self, event: str) -> None:
        """Note an event. The hash over all of them is what two runs of a seed must have in common."""
        line = f"{self.time():.6f} {event}"
        self._hash.update(line.encode())
        if self._on_event is not None:
            self._on_event(line)

    def digest(self) -> str:
        """The hash of the trace so far."""
        return self._hash.hexdigest()[:16]

    def fault(self, kind: str, detail: str = "") -> None:
        """Note that something is being done to the service."""
        self.faults[kind] += 1
        self.last_fault = f"{kind} {detail}".strip()
        self.trace(f"FAULT {self.last_fault}")

    def crash(self, why: str) -> NoReturn:
        """The coordinator's process dies here and now."""
        if not self.is_dead:
            self.fault("crash", why)
            self.faults[f"crash at {why.split(' ', maxsplit=1)[0]}"] += 1
        self.is_dead = True
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        loop.kill()
        raise Crash(why)

    def time(self) -> float:
        """Virtual seconds since the beginning."""
        with contextlib.suppress(RuntimeError):  # between two lives
            self.now = asyncio.get_running_loop().time()
        return self.now


class SimTime:
    """Implements `coordinator.scheduling.clock.Time` for one life."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._started = self._seen = world.now
        self._num_looks = 0

    def monotonic(self) -> float:
        self._num_looks = self._num_looks + 1 if self._world.time() == self._seen else 0
        self._seen = self._world.now
        if self._num_looks > LOOKS_MAX:
            raise Livelock("the coordinator goes round and round, and lets nothing else happen")
        return 100.0 + self._world.now - self._started

    def wall(self) -> float:
        return WALL_START + self._world.time() + self._world.wall_offset

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

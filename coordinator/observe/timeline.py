"""What an adapter's operations, or a sample, waited for: seconds by reason.

In memory, in seconds of service time. A `WaitClock` runs for each adapter and for each sample; it adds the time since
its last switch to the reason that held then. An operation reads the clock when it comes and when a worker begins it;
its wait is the difference. So it costs a switch for each change, and nothing for each operation that waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from tinkerpool.v1 import history_pb2 as pb

Reason: TypeAlias = "pb.WaitReason.ValueType"
Seconds: TypeAlias = Mapping[Reason, float]

NOTHING: Seconds = MappingProxyType({})
"""Shared by all operations that have not come or begun yet: there may be tens of thousands."""


@dataclass(slots=True)
class WaitClock:
    """Seconds by reason, since the clock was made."""

    reason: Reason = pb.WAIT_REASON_CYCLE
    """What keeps the next operation from a worker since the last switch, whether or not there is one."""
    _since: float = 0.0
    _seconds: dict[Reason, float] = field(default_factory=dict)

    def switch(self, reason: Reason, now: float) -> None:
        """Record that another reason holds from now on."""
        if reason != self.reason:
            self._seconds[self.reason] = self._seconds.get(self.reason, 0.0) + now - self._since
            self.reason, self._since = reason, now

    def read(self, now: float) -> Seconds:
        """Return the seconds of each reason until now."""
        return self._seconds | {self.reason: self._seconds.get(self.reason, 0.0) + now - self._since}


@dataclass(slots=True)
class Timeline:
    """The moments of one operation, in seconds of service time."""

    arrived: float | None = None
    """None: before the coordinator's last start."""
    unblocked: float | None = None
    """When every seq before it had arrived, if that was later."""
    begun: float | None = None
    """When it was first sent to a worker; None: it was not."""
    worker_id: str = ""
    """The worker that it was first sent to."""
    num_begins: int = 0
    cycle_id: int = 0
    """The cycle in which it was last sent to a worker; 0: none."""
    decided: float | None = None
    """When its outcome went into a commit."""
    waits: Seconds = field(default_factory=lambda: NOTHING)
    """What it waited for until it began."""
    _before: Seconds = field(default_factory=lambda: NOTHING)
    """The clock when it came, or when the last seq before it had."""

    def arrive(self, clock: WaitClock, now: float) -> None:
        """Record that the operation was accepted."""
        self.arrived, self._before = now, clock.read(now)

    def unblock(self, clock: WaitClock, now: float) -> None:
        """Record that a seq before it has arrived only now."""
        self.unblocked, self._before = now, clock.read(now)

    def begin(self, clock: WaitClock, worker_id: str, now: float, cycle_id: int = 0) -> None:
        """Record that the operation is sent to a worker, for the first time or again. `cycle_id`: 0 for a sample."""
        self.num_begins += 1
        self.cycle_id = cycle_id
        if self.begun is None:
            self.begun, self.worker_id, self.waits = now, worker_id, self.waits_until(clock, now)

    def decide(self, now: float) -> None:
        """Record that its outcome goes into a commit."""
        self.decided = now

    def waits_until(self, clock: WaitClock, now: float) -> dict[Reason, float]:
        """Return what it has waited for until now, in seconds; nothing for one that came before the last start."""
        if self.arrived is None:
            return {}
        waits = {reason: seconds - self._before.get(reason, 0.0) for reason, seconds in clock.read(now).items()}
        if self.unblocked is not None:
            waits[pb.WAIT_REASON_SEQUENCE] = self.unblocked - self.arrived
        return {reason: seconds for reason, seconds in waits.items() if seconds > 0.0}

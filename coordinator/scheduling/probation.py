"""Probation: the tenants whose operations killed workers, for how long they run solo, and their back-off.

A kill is a poison that was found: its worker was lost twice while it ran solo. From its first kill on a tenant is on
probation: its operations run solo, in turns (`solo_turns`). After a kill it pauses for a back-off, which doubles with
each kill. After every loss of a worker in its turn it pauses for `COST_FACTOR` times what the loss cost the others, so
that they lose at most a tenth of a worker's time to it. The number of kills halves after each `halving_s` without one.

All times are service time, and the records are stored, so that neither a restart nor a pause of the pool shortens a
probation. A record becomes durable at the latest with the outcome of the operation that it is for. Does not depend on
workers, or on what a tenant runs. Main invariant: only time and an administrator end a probation; work does not.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace

from coordinator.base.time import Alarms, Signal, Time, backoff_s
from coordinator.storage.access.audit import Act
from coordinator.storage.rows import ProbationRow
from coordinator.storage.tenants import Probations

logger = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_S_MAX = 10.0, 1800.0
"""The pause after the first kill, and the longest one that kills alone cause; each is twice the one before."""
COST_FACTOR = 9.0
"""The pause after the loss of a worker, by the seconds from the start of the turn until the worker was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A tenant's probation at one moment."""

    num_kills: int
    """1 or more."""
    remaining_s: float
    """Seconds of service until its operations run with others again, unless there is another kill."""
    backoff_s: float
    """Seconds of service until its next operation may run; 0: it may run in its turn."""
    operation: str
    """The operation of the last kill."""

    def __str__(self) -> str:
        return (
            f"{self.operation} ended its worker, so all operations of this tenant run solo, one at a time on one "
            f"worker, for {math.ceil(self.remaining_s / 60)} more minutes of service, the next one in "
            f"{math.ceil(self.backoff_s)} s at the earliest; an administrator may end this sooner"
        )


class Probation:
    """The kills of all tenants."""

    def __init__(self, records: Probations, halving_s: float) -> None:
        """`halving_s`: seconds of service after which the number of kills halves; 0: no tenant is put on probation."""
        self.changed = Signal()
        """A tenant may run, or must not run, that could not, or could, before."""
        self._records = records
        self._halving_s = halving_s
        self._rows = {row.tenant_id: row for row in records.all()} if halving_s else {}
        self._ends = Alarms(self.changed, self.now)
        for row in self._rows.values():
            self._wake_at_ends(row)

    @property
    def is_empty(self) -> bool:
        """Whether no tenant has a record."""
        return not self._rows

    def has(self, tenant_id: str) -> bool:
        """Return whether the tenant is on probation."""
        return tenant_id in self._rows and self._num_kills(self._rows[tenant_id]) > 0

    def tenants(self) -> list[str]:
        """Return the tenants on probation, sorted."""
        return sorted(tenant_id for tenant_id in self._rows if self.has(tenant_id))

    def standing(self, tenant_id: str) -> Standing | None:
        """Return the tenant's probation; None: it is not on probation."""
        if not self.has(tenant_id):
            return None
        row, now = self._rows[tenant_id], self.now()
        return Standing(
            num_kills=self._num_kills(row),
            remaining_s=self._end_s(row) - now,
            backoff_s=max(0.0, row.until_service_s - now),
            operation=row.operation,
        )

    def is_backing_off(self, tenant_id: str) -> bool:
        """Return whether the tenant must not run anything now."""
        return self.has(tenant_id) and self._rows[tenant_id].until_service_s > self.now()

    def now(self) -> float:
        """Return the service time."""
        return self._records.service_time()

    def record_kill(self, tenant_id: str, operation: str) -> None:
        """Record that an operation of the tenant is a poison: it is on probation from now on."""
        if not self._halving_s:
            return
        old, now = self._rows.get(tenant_id), self.now()
        num_kills = 1 + (self._num_kills(old) if old is not None else 0)
        until_s = now + backoff_s(BACKOFF_S, BACKOFF_S_MAX, num_kills - 1)
        self._put(
            ProbationRow(
                tenant_id=tenant_id,
                num_kills=num_kills,
                killed_service_s=now,
                until_service_s=max(until_s, old.until_service_s if old is not None else 0.0),
                operation=operation,
            )
        )
        if num_kills == 1:
            logger.warning("tenant %s is on probation: %s", tenant_id, self.standing(tenant_id))

    def record_cost(self, tenant_id: str, seconds: float) -> None:
        """Record what the loss of a worker in the tenant's turn cost the others, in seconds."""
        if (old := self._rows.get(tenant_id)) is not None:
            until_s = max(old.until_service_s, self.now() + COST_FACTOR * seconds)
            self._put(replace(old, until_service_s=until_s))

    async def release(self, tenant_id: str, act: Act) -> None:
        """End the tenant's probation, durable when it returns; `act` is recorded with it. Raises StorageError."""
        await self._records.release(tenant_id, act)
        self._rows.pop(tenant_id, None)
        self.changed.notify()

    def wake_at(self, service_s: float) -> None:
        """Notify `changed` at this service time."""
        self._ends.set(service_s)

    async def wake_at_ends(self, time: Time) -> None:
        """Notify `changed` when a back-off, a probation or another awaited time ends; run until cancelled."""
        await self._ends.run(time)

    def _num_kills(self, row: ProbationRow) -> int:
        """Return the kills that count now."""
        return row.num_kills >> min(63, int((self.now() - row.killed_service_s) / self._halving_s))

    def _end_s(self, row: ProbationRow) -> float:
        """Return the service time at which the number of kills is halved to zero."""
        return row.killed_service_s + self._halving_s * row.num_kills.bit_length()

    def _put(self, row: ProbationRow) -> None:
        self._rows[row.tenant_id] = row
        self._records.note(row)
        self._wake_at_ends(row)
        self.changed.notify()

    def _wake_at_ends(self, row: ProbationRow) -> None:
        for end_s in (row.until_service_s, self._end_s(row)):
            self.wake_at(end_s)

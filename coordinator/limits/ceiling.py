"""Ceilings: limits on a number of things that a tenant has, or calls that it makes at a time.

Does not depend on the things that are counted. Main invariant: nothing is awaited between a check and its count, so
that calls at the same time never exceed a ceiling together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from coordinator.base.errors import Quota, ServiceError, busy, over_ceiling


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call above a limit is refused."""

    reason: str
    mend: str
    """How to free some; `{added}` stands for the amount that the call would add."""
    make: Callable[[str, Quota, str], ServiceError] = busy
    """`over_ceiling` if no waiting helps."""

    def of(self, quota: Quota, added: int = 1) -> ServiceError:
        """Return the refusal of a call that would add so much."""
        return self.make(self.reason, quota, self.mend.format(added=added))


class Limit(Protocol):
    """A limit of each tenant."""

    def used(self, tenant_id: str, /) -> int:
        """Return how much is in use."""

    def maximum(self, tenant_id: str, /) -> int | None:
        """Return the most that may be in use; None if that is unlimited."""


class Ceiling(ABC):
    """A limit on a number: of things that are stored, and of those that blocks hold."""

    def __init__(self, refusal: Refusal, what: str, stored: Callable[[str], int] = lambda _: 0) -> None:
        """`what` names the things, for people. `stored` counts those of a tenant that no block holds."""
        self._refusal, self._what, self._stored = refusal, what, stored
        self._held: Counter[str] = Counter()

    @abstractmethod
    def maximum(self, tenant_id: str) -> int | None:
        """Return the most that a tenant may have; None if that is unlimited."""

    def command(self, _tenant_id: str) -> str:
        """Return what an administrator types to raise the maximum of a tenant; empty if it is the same for all."""
        return ""

    def used(self, tenant_id: str) -> int:
        """Return how many a tenant has."""
        return self._stored(tenant_id) + self._held[tenant_id]

    def num_held(self) -> int:
        """Return how many the blocks of all tenants hold."""
        return self._held.total()

    def check(self, tenant_id: str, added: int = 1) -> None:
        """Raise ServiceError if a tenant may not have so many more."""
        maximum = self.maximum(tenant_id)
        if maximum is not None and (used := self.used(tenant_id)) + added > maximum:
            raise self._refusal.of(Quota(self._what, used, maximum, self.command(tenant_id)), added)

    def refusal(self, tenant_id: str, added: int = 1) -> ServiceError | None:
        """Return why a tenant may not have so many more; None: it may."""
        try:
            self.check(tenant_id, added)
        except ServiceError as error:
            return error
        return None

    @contextmanager
    def holding(self, tenant_id: str, added: int = 1) -> Iterator[None]:
        """Count so many more until the block ends. Raises ServiceError if the tenant may not have them."""
        self.check(tenant_id, added)
        self._held[tenant_id] += added
        try:
            yield
        finally:
            self._held[tenant_id] -= added
            if not self._held[tenant_id]:
                del self._held[tenant_id]


def full(reason: str, quota: Quota, mend: str) -> ServiceError:
    """Return the refusal of a call that waiting makes room for; for good if the limit is 0."""
    return busy(reason, quota, mend) if quota.maximum else over_ceiling(reason, quota, mend)

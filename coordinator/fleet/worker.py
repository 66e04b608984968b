"""One incarnation of a worker: its operations in flight, and the sampler versions that it holds. In memory.

Does not depend on what operations mean: flights are opaque records. Main invariant: a lost incarnation has nothing in
flight.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from workers.contract.messages import WorkerInfo

VERSIONS_MAX = 64
"""Sampler versions that one worker is asked to hold; the least recently used are removed."""


@dataclass(frozen=True, slots=True)
class Flight:
    """An operation that a worker was sent, and whose result has not arrived."""

    name: str
    """The operation's name."""
    target_id: str
    """The adapter or sampler."""
    seq: int
    tenant_id: str
    version: str = ""
    """The sampler version that it samples from; empty: a training operation, or the base model."""


@dataclass(slots=True, eq=False)
class Incarnation:
    """One incarnation of a worker."""

    info: WorkerInfo
    is_live: bool = True
    training: tuple[Flight, ...] = ()
    """The operations of the present phase."""
    samples: dict[str, Flight] = field(default_factory=dict)
    """The samples in flight there, by name."""
    _versions: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _removals: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The incarnation's name, unique over all epochs."""
        return self.info.incarnation

    def begin_phase(self, flights: tuple[Flight, ...]) -> None:
        """Record the operations of a cycle's phase that are sent to the worker."""
        self.training = flights

    def end_phase(self) -> None:
        """Record that the worker replied to the phase."""
        self.training = ()

    def begin_sample(self, flight: Flight) -> None:
        """Record that a sample is sent to the worker."""
        self.samples[flight.name] = flight

    def end_sample(self, name: str) -> bool:
        """Record that the worker no longer has this sample; return whether it had it."""
        return self.samples.pop(name, None) is not None

    def end(self) -> tuple[tuple[Flight, ...], tuple[Flight, ...]]:
        """Mark the incarnation lost; return the training operations and samples that were in flight."""
        self.is_live = False
        training, samples = self.training, tuple(self.samples.values())
        self.training, self.samples = (), {}
        return training, samples

    @property
    def versions(self) -> tuple[str, ...]:
        """The sampler versions that the worker holds, the least recently used first."""
        return tuple(self._versions)

    def holds(self, version: str) -> bool:
        """Return whether this record has the sampler version as held; the worker may have dropped it."""
        return version in self._versions

    def hold(self, version: str) -> None:
        """Record that the worker holds this version, or is being sent it; remove the least recently used ones."""
        self._versions[version] = None
        self._versions.move_to_end(version)
        if version in self._removals:
            self._removals.remove(version)
        in_use = {flight.version for flight in self.samples.values()}
        for old in [v for v in self._versions if v not in in_use and v != version]:
            if len(self._versions) <= VERSIONS_MAX:
                break
            del self._versions[old]
            self._removals.append(old)

    def misses(self, version: str) -> None:
        """Record that the worker does not hold this version, as it reported."""
        self._versions.pop(version, None)

    def remove(self, key: str) -> None:
        """Have the worker drop an adapter or version with its next batch or sample."""
        self._removals.append(key)

    def take_removals(self) -> tuple[str, ...]:
        """Return the adapters and versions that the worker must drop with the message that is sent now."""
        removals, self._removals = tuple(self._removals), []
        return removals

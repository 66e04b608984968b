"""Commits decided samples, each in a write of its own, and then makes their outcomes visible.

Does not depend on workers. Main invariant: an outcome is visible only after it is durable.
"""

from __future__ import annotations

from coordinator.operations.in_flight import InFlightTable
from coordinator.operations.outcomes import decided_row
from coordinator.sampling.sample import Sample
from coordinator.sampling.streams import TokenStreams
from coordinator.storage.cycles import CycleCommit
from coordinator.storage.store import Store


class SampleCommits:
    """Commits the samples of all base models."""

    def __init__(self, store: Store, in_flight: InFlightTable, streams: TokenStreams) -> None:
        self._store = store
        self._in_flight = in_flight
        self._streams = streams

    async def commit(self, sample: Sample) -> None:
        """Make the outcome durable, then visible. Raises StorageError."""
        operation = sample.operation
        lost = await self._store.persist(CycleCommit(finished=[decided_row(operation)]))
        assert not lost, f"{operation.name} ran without being logged"
        operation.drop_payload()
        self._in_flight.finish(operation)
        assert operation.outcome is not None
        self._streams.finish(operation.name, operation.outcome)

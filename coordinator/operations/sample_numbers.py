"""Sequence numbers that the server assigns to samples. In memory; the first one of a sampler is read from the store.

Main invariant: no two samples of a sampler get the same number, in any epoch.
"""

from __future__ import annotations

from coordinator.storage.store import Store


class SampleNumbers:
    """The highest number of each sampler's samples."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, int] = {}

    def next(self, sampler_id: str) -> int:
        """Return a number that no sample of this sampler has had."""
        if sampler_id not in self._last:
            self._last[sampler_id] = self._store.operations.last_seq(sampler_id)
        self._last[sampler_id] += 1
        return self._last[sampler_id]

    def note(self, sampler_id: str, seq: int) -> None:
        """Record that a sample has this number."""
        self._last[sampler_id] = max(seq, self._last.get(sampler_id, 0))

    def forget(self, sampler_id: str) -> None:
        """Drop the numbering of a sampler whose session has ended."""
        self._last.pop(sampler_id, None)

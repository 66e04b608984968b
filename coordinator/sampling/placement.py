"""Chooses the worker of a sample: with free sequence slots, with the memory for it, and its version if possible.

Depends on the fleet; not on the order of samples, nor on when a worker runs a sequence, which the worker's own
scheduler decides. Main invariant: samples take at most a worker's sequence slots; a single sample may take more.
"""

from __future__ import annotations

from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.sampling.sample import Sample

SLOTS_FRACTION = 4
"""One request counts for at most a quarter of a worker's slots: its sequences share them."""


class Placement:
    """The sequence slots that samples take on the live workers."""

    def __init__(self, fleet: Fleet, slots_max: int) -> None:
        """`slots_max`: most sequences on one worker at a time, if the worker has announced as many slots."""
        self._fleet = fleet
        self._slots_max = slots_max
        self._taken: dict[str, int] = {}
        """The taken slots of each incarnation whose events are followed."""

    def open(self, worker: Incarnation) -> None:
        """Let an incarnation get samples: its events are followed."""
        self._taken[worker.name] = 0

    def close(self, incarnation: str) -> None:
        """Remove a lost incarnation."""
        self._taken.pop(incarnation, None)

    def num_slots(self, num_samples: int) -> int:
        """Return the slots that a request for `num_samples` samples counts for."""
        return min(num_samples, max(1, self._slots_max // SLOTS_FRACTION))

    def take(self, sample: Sample, worker: Incarnation) -> None:
        """Take slots of the worker for the sample."""
        sample.start_on(worker)
        worker.begin_sample(sample.flight)
        self._taken[worker.name] += sample.num_slots

    def free(self, sample: Sample) -> None:
        """Free the slots of a sample that its worker no longer has."""
        worker = sample.worker
        if worker is not None and worker.end_sample(sample.name) and worker.name in self._taken:
            self._taken[worker.name] -= sample.num_slots

    def has_room(self, base_model: str) -> bool:
        """Return whether a worker of the base model has a free slot."""
        return any(self._has_room(worker, 1) for worker in self._open(base_model))

    def choose(self, sample: Sample) -> Incarnation | None:
        """Return a worker with free slots; None if there is none.

        Prefers workers with enough memory, then one that holds the version, then the one with the fewest taken slots.
        """
        workers = self._open(sample.base_model)
        fitting = [worker for worker in workers if _has_memory(worker, sample)]
        candidates = [
            (not worker.holds(sample.sampler.version), self._taken[worker.name], worker.info.worker_id, worker)
            for worker in fitting or workers  # if none has the memory, any of them refuses the sample
            if self._has_room(worker, sample.num_slots)
        ]
        return min(candidates, key=lambda candidate: candidate[:3])[3] if candidates else None

    def _has_room(self, worker: Incarnation, num_slots: int) -> bool:
        """Return whether the worker has this many free slots, or no samples."""
        taken, slots = self._taken[worker.name], min(self._slots_max, worker.info.model.num_sequence_slots)
        return not taken or taken + num_slots <= slots

    def _open(self, base_model: str) -> list[Incarnation]:
        live = (self._fleet.worker(info.worker_id) for info in self._fleet.live(base_model))
        return [worker for worker in live if worker.name in self._taken]


def _has_memory(worker: Incarnation, sample: Sample) -> bool:
    num_blocks = worker.info.model.num_cache_blocks
    return num_blocks is None or sample.decoded.num_cache_blocks_min <= num_blocks

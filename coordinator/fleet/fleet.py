"""The workers of a pool, each with its present incarnation, and the facts of the base models.

Does not depend on operations, schedules or storage. Main invariant: an incarnation that was marked lost never becomes
live again; its replacement is a new incarnation of the same worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from coordinator.fleet.worker import Flight, Incarnation
from workers.contract.messages import ModelInfo, WorkerInfo


class Fleet:
    """The workers of all base models."""

    def __init__(self) -> None:
        self.models: dict[str, ModelInfo] = {}
        """Base model to its facts: the memory of the worker with the least to train, of the one with the most to
        sample."""
        self._workers: dict[str, Incarnation] = {}
        self._num_losses: Counter[str] = Counter()
        """By worker, since its last reply to a batch."""

    def start(self, workers: Iterable[WorkerInfo]) -> None:
        """Take in the workers of a pool that has started."""
        for info in workers:
            self._workers[info.worker_id] = Incarnation(info)
            self.models.setdefault(info.model.name, info.model)
        self._note_memory()

    def revive(self, info: WorkerInfo) -> None:
        """Replace a lost incarnation of a worker by a new one, which holds no adapter and no version."""
        assert info.worker_id in self._workers
        self._workers[info.worker_id] = Incarnation(info)
        self._note_memory()

    def worker_ids(self) -> list[str]:
        """Return every worker, live or not."""
        return list(self._workers)

    def worker(self, worker_id: str) -> Incarnation:
        """Return the present incarnation of a worker, live or not."""
        return self._workers[worker_id]

    def find(self, worker_id: str) -> Incarnation | None:
        """Return the present incarnation of a worker if it is live."""
        found = self._workers.get(worker_id)
        return found if found is not None and found.is_live else None

    def is_live(self, worker_id: str) -> bool:
        """Return whether the worker's present incarnation is live."""
        return self.find(worker_id) is not None

    def live(self, base_model: str) -> list[WorkerInfo]:
        """Return the live workers of a base model."""
        return [w.info for w in self._workers.values() if w.is_live and w.info.model.name == base_model]

    def has_lost(self, base_model: str) -> bool:
        """Return whether a worker of this base model is lost and not yet replaced."""
        return any(not w.is_live and w.info.model.name == base_model for w in self._workers.values())

    def lose(self, worker_id: str, incarnation: str) -> tuple[tuple[Flight, ...], tuple[Flight, ...]] | None:
        """Mark an incarnation lost; return its training operations and samples in flight.

        None if that incarnation was lost before.
        """
        found = self._workers.get(worker_id)
        if found is None or not found.is_live or found.name != incarnation:
            return None
        return found.end()

    def note_loss(self, worker_id: str) -> int:
        """Count a loss of the worker; return the number of losses since its last reply to a batch."""
        self._num_losses[worker_id] += 1
        return self._num_losses[worker_id]

    def answered(self, worker_id: str) -> None:
        """Reset the count of losses: the worker replied to a batch."""
        self._num_losses.pop(worker_id, None)

    def hold_version(self, worker_id: str, incarnation: str, version: str) -> None:
        """Record that an incarnation of the worker holds a sampler version; ignored if that incarnation is lost."""
        if (found := self.find(worker_id)) is not None and found.name == incarnation:
            found.hold(version)

    def remove(self, worker_id: str, key: str) -> None:
        """Have a worker drop an adapter or version with its next message; ignored if the worker is lost."""
        if (found := self.find(worker_id)) is not None:
            found.remove(key)

    def _note_memory(self) -> None:
        """Update the memory facts of every base model.

        The worker with the least memory limits training, because an adapter may be placed on any worker. The one with
        the most limits sampling, because a large sample can be placed there.
        """
        for name, model in self.models.items():
            found = [each.info.model for each in self._workers.values() if each.info.model.name == name]
            fitting = [each.fitting_tokens for each in found if each.fitting_tokens is not None]
            blocks = [each.num_cache_blocks for each in found if each.num_cache_blocks is not None]
            self.models[name] = replace(
                model,
                fitting_tokens=min(fitting, default=None),
                num_cache_blocks=max(blocks, default=None) if len(blocks) == len(found) else None,
            )

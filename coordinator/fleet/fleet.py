"""The workers: the incarnation of each, whether it is live, what it holds, and the facts of its base model.

Does not depend on operations, schedules or storage. Main invariant: an incarnation that was marked lost never becomes
live again; its worker comes back as another one.
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
        """By worker, since it last answered a batch."""

    def start(self, workers: Iterable[WorkerInfo]) -> None:
        """Take in the workers of a pool that has started."""
        for info in workers:
            self._workers[info.worker_id] = Incarnation(info)
            self.models.setdefault(info.model.name, info.model)
        self._note_memory()

    def revive(self, info: WorkerInfo) -> None:
        """A worker has a new incarnation, empty."""
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
        """Whether this worker may be sent anything."""
        return self.find(worker_id) is not None

    def live(self, base_model: str) -> list[WorkerInfo]:
        """Return the live workers of a base model."""
        return [w.info for w in self._workers.values() if w.is_live and w.info.model.name == base_model]

    def has_lost(self, base_model: str) -> bool:
        """Whether a worker of this base model is lost and not yet replaced."""
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
        """Count a loss of the worker; return how many there were since it last answered a batch."""
        self._num_losses[worker_id] += 1
        return self._num_losses[worker_id]

    def answered(self, worker_id: str) -> None:
        """The worker has answered a batch: it works."""
        self._num_losses.pop(worker_id, None)

    def hold_version(self, worker_id: str, incarnation: str, version: str) -> None:
        """That incarnation of the worker holds a sampler version; ignored if it is lost."""
        if (found := self.find(worker_id)) is not None and found.name == incarnation:
            found.hold(version)

    def remove(self, worker_id: str, key: str) -> None:
        """Have a worker drop an adapter or version with the next message that it gets; ignored if it is lost."""
        if (found := self.find(worker_id)) is not None:
            found.remove(key)

    def _note_memory(self) -> None:
        """An adapter may come to live on the worker with the least memory; a sample can go to the one with the most."""
        for name, model in self.models.items():
            found = [each.info.model for each in self._workers.values() if each.info.model.name == name]
            fitting = [each.fitting_tokens for each in found if each.fitting_tokens is not None]
            blocks = [each.num_cache_blocks for each in found if each.num_cache_blocks is not None]
            self.models[name] = replace(
                model,
                fitting_tokens=min(fitting, default=None),
                num_cache_blocks=max(blocks, default=None) if len(blocks) == len(found) else None,
            )

"""The queued samples of each base model in fair order, filtered by the quarantine.

Does not depend on workers. Main invariant: a sample is in its queue, or running, until it is decided.
"""

from __future__ import annotations

from coordinator.sampling.fair_queue import FairQueue
from coordinator.sampling.sample import Sample
from coordinator.scheduling.quarantine import Quarantine
from coordinator.scheduling.schedule import Scheduling


class SampleQueue:
    """The queued and running samples of one base model, in fair order."""

    def __init__(self, fair: FairQueue, quarantine: Quarantine) -> None:
        self._fair = fair
        self._quarantine = quarantine

    def add(self, sample: Sample) -> None:
        """Queue a new sample."""
        self._fair.add(sample.name, sample.operation.tenant_id, sample.decoded.num_tokens_max)

    def peek(self) -> str | None:
        """Return the name of the next sample that may run."""
        return self._fair.peek(self._quarantine.may_run)

    def start(self, sample: Sample) -> None:
        """Move a queued sample to the running ones."""
        self._fair.start(sample.name)

    def requeue(self, sample: Sample) -> None:
        """Queue a running sample again."""
        self._fair.requeue(sample.name)

    def finish(self, sample: Sample, num_tokens: int) -> None:
        """Remove a decided sample; the engine computed `num_tokens` for it."""
        self._fair.finish(sample.name, num_tokens)

    def release(self, sample: Sample) -> None:
        """End the sample's quarantine: it survived, or was the poison."""
        self._quarantine.release(sample.name)


class SampleQueues:
    """The queues of all base models, also of those that are not served now."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._queues = {
            base_model: SampleQueue(FairQueue(scheduling.fair.shares), quarantine)
            for base_model, quarantine in scheduling.quarantines.items()
        }

    def of(self, base_model: str) -> SampleQueue:
        """Return the queue of a base model."""
        if base_model not in self._queues:
            self._queues[base_model] = SampleQueue(FairQueue({}), Quarantine())
        return self._queues[base_model]

    def base_models(self) -> list[str]:
        """Return the base models that have a queue."""
        return list(self._queues)

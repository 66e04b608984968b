"""Chooses the worker of a sample, and the weights that the worker needs for it.

A worker is chosen by its free sequence slots, its memory, and the versions that it holds. Depends on the fleet, stored
rows, and weights that have no file yet (`Publishing`); not on the order of samples, nor on when a worker runs a
sequence, which the worker's own scheduler decides. Main invariants: samples take at most a worker's sequence slots, and
those of one tenant leave some free, but a single sample may take more; a sampler's weights never change, unless it
follows its adapter (`is_inflight`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from coordinator.base.errors import Code, ServiceError
from coordinator.checkpoints.published_weights import version_of
from coordinator.checkpoints.states import States
from coordinator.fleet.fleet import Fleet, Incarnation
from coordinator.operations.registry import AdapterRegistry
from coordinator.sampling.sample import Sample
from coordinator.scheduling.solo_turns import SoloTurns
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.store import Store
from workers.contract.messages import SamplerVersion

SLOTS_FRACTION = 4
"""One request counts for at most a quarter of a worker's slots: its sequences share them."""
RESERVED_FRACTION = 8
"""One tenant leaves an eighth of a worker's slots free, so that a sample of another one is sent at once. Otherwise it
would wait until one of the first tenant ends, and equal ones that started together also end together. A lone tenant is
no slower: a worker runs sequences of one tenant in three quarters of its slots; more wait there for the next free one.
"""


class Placement:
    """The sequence slots that samples take on the live workers."""

    def __init__(self, fleet: Fleet, slots_max: int, turns: Mapping[str, SoloTurns]) -> None:
        """`slots_max`: most sequences on one worker at a time, if the worker has announced as many slots."""
        self._fleet = fleet
        self._slots_max = slots_max
        self._turns = turns
        self._taken: dict[str, Counter[str]] = {}
        """The taken slots of each tenant, of each incarnation whose events are followed."""

    def open(self, worker: Incarnation) -> None:
        """Let an incarnation get samples: its events are followed."""
        self._taken[worker.name] = Counter()

    def close(self, incarnation: str) -> None:
        """Remove an incarnation that has ended."""
        self._taken.pop(incarnation, None)

    def num_slots(self, num_samples: int) -> int:
        """Return the slots that a request for `num_samples` samples counts for."""
        return min(num_samples, max(1, self._slots_max // SLOTS_FRACTION))

    def take(self, sample: Sample, worker: Incarnation, now: float) -> None:
        """Take slots of the worker for the sample, at this service time."""
        sample.start_on(worker, now)
        worker.begin_sample(sample.flight)
        self._taken[worker.name][sample.operation.tenant_id] += sample.num_slots

    def free(self, sample: Sample) -> None:
        """Free the slots of a sample that its worker no longer has."""
        worker = sample.worker
        if worker is not None and worker.end_sample(sample.name) and worker.name in self._taken:
            taken, tenant_id = self._taken[worker.name], sample.operation.tenant_id
            taken[tenant_id] -= sample.num_slots
            if not taken[tenant_id]:
                del taken[tenant_id]
            self._turns[sample.base_model].freed(worker.info.worker_id)
            if worker.lacks_room and not worker.uses(sample.sampler.version):
                self._fleet.changed.notify()

    def has_room(self, base_model: str) -> bool:
        """Return whether a worker of the base model has a free slot."""
        return any(self._num_free(worker) > 0 for worker in self._open(base_model))

    def must_wait(self, sample: Sample) -> bool:
        """Return whether only workers to which it cannot be sent now have the memory for it, and one of them stays.

        These are late, drained, lost or reserved for a solo turn. A sample that has a turn never waits.
        """
        if self._turns[sample.base_model].has_turn(sample.name):
            return False
        staying = self._fleet.staying(sample.base_model)
        return not _fitting(self._for(sample), sample) and bool(_fitting(staying, sample))

    def choose(self, sample: Sample) -> Incarnation | None:
        """Return a worker with free slots for a sample that need not wait; None if there is none.

        Prefers workers with enough memory, then those without solo turns, then one that holds the version, then the
        one with the fewest taken slots.
        """
        turns, workers = self._turns[sample.base_model], self._for(sample)
        candidates = [
            (
                worker.info.worker_id == turns.avoided,
                not worker.holds(sample.sampler.version),
                self._taken[worker.name].total(),
                worker.info.worker_id,
                worker,
            )
            for worker in _fitting(workers, sample) or workers  # if none has the memory, any of them refuses the sample
            if self._has_room(worker, sample)
        ]
        return min(candidates, key=lambda candidate: candidate[:4])[4] if candidates else None

    def _has_room(self, worker: Incarnation, sample: Sample) -> bool:
        """Return whether the worker has the slots for a sample, or no samples."""
        taken = self._taken[worker.name]
        if not taken:
            return True
        of_tenant = taken[sample.operation.tenant_id] + sample.num_slots
        is_within_share = of_tenant <= self._num_slots_of(worker) - self._num_slots_of(worker) // RESERVED_FRACTION
        return sample.num_slots <= self._num_free(worker) and is_within_share

    def _num_free(self, worker: Incarnation) -> int:
        """Return the free slots; below 0 if a large sample took more than there are."""
        return self._num_slots_of(worker) - self._taken[worker.name].total()

    def _num_slots_of(self, worker: Incarnation) -> int:
        return min(self._slots_max, worker.info.model.num_sequence_slots)

    def _for(self, sample: Sample) -> list[Incarnation]:
        """Return the workers to which the sample may be sent, whatever their slots and memory."""
        turns = self._turns[sample.base_model]
        return [each for each in self._open(sample.base_model) if turns.may_place(sample.name, each.info.worker_id)]

    def _open(self, base_model: str) -> list[Incarnation]:
        return [worker for worker in self._fleet.available(base_model) if worker.name in self._taken]


class SamplerVersions:
    """The versions of all samplers."""

    def __init__(self, store: Store, fleet: Fleet, registry: AdapterRegistry, states: States) -> None:
        self._store = store
        self._fleet = fleet
        self._registry = registry
        self._states = states

    def current(self, sampler: SamplerRow) -> SamplerRow:
        """Return the sampler whose weights it samples from now: itself, or the newest that follows the same adapter."""
        if not sampler.is_inflight:
            return sampler
        newest = self._store.samplers.newest_inflight(sampler.adapter_id)
        assert newest is not None
        return newest

    def is_awaited(self, version: str) -> bool:
        """Return whether this version must be rematerialized before it can be sampled from."""
        return self._states.publishing.is_awaited(version)

    async def for_worker(self, sampler: SamplerRow, worker: Incarnation) -> SamplerVersion:
        """Return the version as the worker needs it: with its weights, unless the worker holds them.

        Raises ServiceError if the weights were deleted or are damaged.
        """
        key = sampler.version
        if not key:
            return SamplerVersion(key="")
        spec = self._registry.spec(sampler.adapter_id)
        # First, so that a sampler whose checkpoint was deleted ends whether or not a worker holds its weights.
        checkpoint = self._checkpoint(sampler) if sampler.model_path else None
        if worker.holds(key):
            worker.hold(key)
            return SamplerVersion(key=key, spec=spec)
        if checkpoint is None:
            state = await self._states.publishing.state(sampler.sampler_id)
        else:
            state = await self._states.read_checkpoint(checkpoint)
        worker.hold(key, state.num_bytes)
        worker.sent(state.num_bytes)
        if not worker.has_room(0):
            self._fleet.changed.notify()
        return SamplerVersion(key=key, spec=spec, state=state)

    def _checkpoint(self, sampler: SamplerRow) -> CheckpointRow:
        """Return the checkpoint that the sampler was made of. Raises ServiceError if it was deleted."""
        found = self._store.checkpoints.by_path(sampler.model_path)
        # Another checkpoint may have this path by now: a sampler's weights never change.
        if found is None or version_of(found) != sampler.version:
            raise ServiceError(
                Code.NOT_FOUND, "NOT_FOUND", f"the sampler's checkpoint {sampler.model_path} was deleted"
            )
        return found


def _fitting(workers: Iterable[Incarnation], sample: Sample) -> list[Incarnation]:
    """Return the workers that have the memory for the sample."""
    blocks = [(worker, worker.info.model.num_cache_blocks) for worker in workers]
    return [worker for worker, most in blocks if most is None or sample.decoded.num_cache_blocks_min <= most]

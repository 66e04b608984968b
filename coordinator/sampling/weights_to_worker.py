"""Which weights a sampler samples from, and how a worker gets them.

Depends on the stored rows and on weights that have no file yet (`Publishing`); not on queues or placement. Main
invariant: a sampler's weights never change, unless it follows its adapter (`is_inflight`).
"""

from __future__ import annotations

from coordinator.base.errors import Code, ServiceError
from coordinator.checkpoints.published_weights import version_of
from coordinator.checkpoints.states import States
from coordinator.fleet.fleet import Incarnation
from coordinator.operations.registry import AdapterRegistry
from coordinator.storage.rows import CheckpointRow, SamplerRow
from coordinator.storage.store import Store
from workers.contract.messages import SamplerVersion


class SamplerVersions:
    """The versions of all samplers."""

    def __init__(self, store: Store, registry: AdapterRegistry, states: States) -> None:
        self._store = store
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
        worker.hold(key)
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

"""What tenants store: checkpoints, states of adapters, rows; and what is being made (claims).

A ceiling counts what is stored and what was claimed, so that operations that are accepted together never exceed it
together. An operation's claim ends in the moment in which its outcome becomes visible; what it stored counts from the
same moment. A claim is a function of the request, of the adapter and of the checkpoint that the request overwrites, so
that recovery makes it again. When that checkpoint is deleted, the claim grows by its place and bytes.

Uploads count what they will become. Rows (metadata, requests, results, records of samples, samplers with their files)
are counted by the database itself. An adapter counts the state that it will have as soon as it exists, because a
snapshot of it cannot be refused.

Depends on rows and on facts of base models; not on limits, or on when a state is written. Main invariant: the numbers
of a tenant are those of its rows, from the moment in which it sees the commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.fleet.fleet import Fleet
from coordinator.payloads.passes import Chunk
from coordinator.payloads.provenance import record_bytes
from coordinator.payloads.samples import DecodedSample
from coordinator.storage.rows import CheckpointRow
from coordinator.storage.store import Store
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract.adapted_modules import adapter_params
from workers.contract.messages import AdapterSpec

SaveRequest = checkpoints_pb2.SaveStateRequest | checkpoints_pb2.SaveWeightsForSamplerRequest
_FLOAT_BYTES = 4
_TRAINING_COPIES = 3
"""Weights and the two moments of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an unfinished operation may add to what its tenant holds."""

    num_checkpoints: int = 0
    num_bytes: int = 0
    """Of files, without the few KiB of a header, and of results."""
    num_samplers: int = 0
    num_samples: int = 0
    """Continuations that are not finished."""
    num_tokens: int = 0
    """The most tokens that it can compute."""
    overwrites: str = ""
    """The path of the stored checkpoint whose place a save takes. Sums have none."""
    num_overwritten_bytes: int = 0
    """Bytes of that checkpoint that the save reuses: they are not in `num_bytes`."""

    def plus(self, other: Claim, sign: int = 1) -> Claim:
        """Return the sum of both; with `sign` -1 the difference."""
        return Claim(
            num_checkpoints=self.num_checkpoints + sign * other.num_checkpoints,
            num_bytes=self.num_bytes + sign * other.num_bytes,
            num_samplers=self.num_samplers + sign * other.num_samplers,
            num_samples=self.num_samples + sign * other.num_samples,
            num_tokens=self.num_tokens + sign * other.num_tokens,
        )

    def without_overwritten(self) -> Claim:
        """Return the claim of the same save once the checkpoint that it overwrites is deleted."""
        return Claim(num_checkpoints=1, num_bytes=self.num_bytes + self.num_overwritten_bytes)


NO_CLAIM = Claim()


class Holdings:
    """What each tenant stores: the number of its checkpoints, and the bytes of everything."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet
        self._num_checkpoints: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        for tenant_id, (num_checkpoints, num_bytes) in store.checkpoints.totals().items():
            self._num_checkpoints[tenant_id], self._num_bytes[tenant_id] = num_checkpoints, num_bytes

    def num_checkpoints(self, tenant_id: str) -> int:
        """Return the number of a tenant's checkpoints."""
        return self._num_checkpoints[tenant_id]

    def num_bytes(self, tenant_id: str) -> int:
        """Return the bytes that a tenant stores: files and rows."""
        return self._num_bytes[tenant_id] + self._store.tenants.row_bytes(tenant_id)

    def claim_of_save(self, spec: AdapterSpec, base_model: str, request: SaveRequest) -> Claim:
        """Return the claim of a save. One that overwrites a checkpoint claims what it adds."""
        num_bytes = self.weights_bytes(spec, base_model)
        if not request.name:
            return Claim(num_samplers=1, num_bytes=num_bytes)
        if isinstance(request, checkpoints_pb2.SaveStateRequest):
            num_bytes *= _TRAINING_COPIES
        path = str(save_path(spec.adapter_id, request))
        if request.overwrite and (old := self._store.checkpoints.by_path(path)) is not None:
            num_reused = min(num_bytes, old.size_bytes)
            return Claim(num_bytes=num_bytes - num_reused, overwrites=path, num_overwritten_bytes=num_reused)
        return Claim(num_checkpoints=1, num_bytes=num_bytes)

    def weights_bytes(self, spec: AdapterSpec, base_model: str) -> int:
        """Return the bytes of an adapter's weights; 0 if its base model is not served now."""
        model = self._fleet.models.get(base_model)
        params = adapter_params(model.modules, *spec.kinds) if model is not None else 0
        return _FLOAT_BYTES * spec.rank * params

    def state_bytes(self, spec: AdapterSpec, base_model: str) -> int:
        """Return the bytes of an adapter's training state; 0 if its base model is not served now."""
        return _TRAINING_COPIES * self.weights_bytes(spec, base_model)

    def add_state(self, tenant_id: str, spec: AdapterSpec, base_model: str) -> None:
        """Count the training state of an adapter that exists from now on."""
        self._count(tenant_id, 0, self.state_bytes(spec, base_model))

    def remove_state(self, tenant_id: str, spec: AdapterSpec, base_model: str) -> None:
        """Stop counting the training state of an adapter that is deleted."""
        self._count(tenant_id, 0, -self.state_bytes(spec, base_model))

    def add(self, row: CheckpointRow) -> None:
        """Count a checkpoint whose row is stored."""
        self._count(row.tenant_id, 1, row.size_bytes)

    def remove(self, row: CheckpointRow) -> None:
        """Stop counting a checkpoint whose row was deleted; it has the size that it had then."""
        self._count(row.tenant_id, -1, -row.size_bytes)

    def claim(self, tenant_id: str, claim: Claim, sign: int = 1) -> None:
        """Count what an upload or a creation will become, or with `sign` -1 stop counting it."""
        self._count(tenant_id, sign * claim.num_checkpoints, sign * claim.num_bytes)

    def resize(self, tenant_id: str, num_bytes: int) -> None:
        """Count these bytes more, or less: the size of a checkpoint is known once its file is written."""
        self._count(tenant_id, 0, num_bytes)

    def _count(self, tenant_id: str, number: int, num_bytes: int) -> None:
        for counter, change in ((self._num_checkpoints, number), (self._num_bytes, num_bytes)):
            counter[tenant_id] += change
            if not counter[tenant_id]:
                del counter[tenant_id]


def claim_of_pass(chunks: Iterable[Chunk]) -> Claim:
    """Return the claim of a pass: its tokens, which are known, and its result, a log-probability for each of them.

    Another operation without chunks claims nothing.
    """
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return Claim(num_tokens=num_tokens, num_bytes=_FLOAT_BYTES * num_tokens)


def claim_of_sample(decoded: DecodedSample) -> Claim:
    """Return the claim of a sample: its continuations, their tokens at most, its result and its record."""
    num_bytes = decoded.num_result_bytes_max
    if decoded.is_recorded:
        num_bytes += record_bytes(decoded.num_samples, decoded.num_sampled_max)
    return Claim(num_samples=decoded.num_samples, num_tokens=decoded.num_tokens_max, num_bytes=num_bytes)


def save_path(adapter_id: str, request: SaveRequest) -> names.CheckpointPath:
    """Return the path of a named save."""
    if isinstance(request, checkpoints_pb2.SaveStateRequest):
        kind = names.TRAINING
    else:
        kind = names.EXTERNAL if request.for_export else names.SAMPLER
    return names.CheckpointPath(adapter_id, kind, request.name)

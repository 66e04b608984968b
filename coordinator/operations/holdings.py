"""What tenants hold beside queued requests: checkpoints, records of samples, and what is being made (claims).

A ceiling counts what is stored and what was claimed, so that operations that are accepted together never exceed it
together. An operation's claim ends in the moment in which its outcome becomes visible; what it stored counts from the
same moment. A claim is a function of the request and of the adapter, so that recovery makes it again.

Depends on rows of checkpoints and records; not on limits, or on when a state is written. Main invariant: the numbers of
a tenant are those of its rows, from the moment in which it sees the commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.payloads.passes import Chunk
from coordinator.payloads.provenance import record_bytes
from coordinator.payloads.samples import DecodedSample
from coordinator.storage.rows import CheckpointRow
from coordinator.storage.store import Store
from tinkerpool import names
from tinkerpool.v1 import checkpoints_pb2
from workers.contract.messages import AdapterSpec, ModelInfo

SaveRequest = checkpoints_pb2.SaveStateRequest | checkpoints_pb2.SaveWeightsForSamplerRequest
_FLOAT_BYTES = 4
_TRAINING_COPIES = 3
"""Weights and the two moments of AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What an unfinished operation may add to what its tenant holds."""

    num_checkpoints: int = 0
    num_bytes: int = 0
    """Of checkpoints, without the few KiB of a file's header; of records of samples."""
    num_samplers: int = 0
    num_samples: int = 0
    """Continuations that are not finished."""
    num_tokens: int = 0
    """The most tokens that it can compute."""

    def plus(self, other: Claim, sign: int = 1) -> Claim:
        """Return the sum of both; with `sign` -1 the difference."""
        return Claim(
            num_checkpoints=self.num_checkpoints + sign * other.num_checkpoints,
            num_bytes=self.num_bytes + sign * other.num_bytes,
            num_samplers=self.num_samplers + sign * other.num_samplers,
            num_samples=self.num_samples + sign * other.num_samples,
            num_tokens=self.num_tokens + sign * other.num_tokens,
        )


NO_CLAIM = Claim()


class Holdings:
    """The checkpoints of each tenant: their number, and their bytes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_checkpoints: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        for tenant_id, (num_checkpoints, num_bytes) in store.checkpoints.totals().items():
            self._num_checkpoints[tenant_id], self._num_bytes[tenant_id] = num_checkpoints, num_bytes
        for tenant_id, num_bytes in store.records.totals().items():
            self._num_bytes[tenant_id] += num_bytes

    def num_checkpoints(self, tenant_id: str) -> int:
        """Return the number of a tenant's checkpoints."""
        return self._num_checkpoints[tenant_id]

    def num_bytes(self, tenant_id: str) -> int:
        """Return the bytes of a tenant's checkpoints, and of the records of its samples."""
        return self._num_bytes[tenant_id]

    def claim_of_save(self, adapter_id: str, request: SaveRequest, spec: AdapterSpec, model: ModelInfo | None) -> Claim:
        """Return the claim of a save; `model`: None if it is not served now.

        One that overwrites a checkpoint claims the bytes that it adds.
        """
        if not request.name:
            return Claim(num_samplers=1)
        num_bytes = _num_bytes(request, spec, model)
        if (
            request.overwrite
            and (old := self._store.checkpoints.by_path(str(save_path(adapter_id, request)))) is not None
        ):
            return Claim(num_bytes=max(0, num_bytes - old.size_bytes))
        return Claim(num_checkpoints=1, num_bytes=num_bytes)

    def add(self, row: CheckpointRow) -> None:
        """Count a checkpoint whose row is stored."""
        self._count(row.tenant_id, 1, row.size_bytes)

    def remove(self, row: CheckpointRow) -> None:
        """Stop counting a checkpoint whose row was deleted; it has the size that it had then."""
        self._count(row.tenant_id, -1, -row.size_bytes)

    def resize(self, tenant_id: str, num_bytes: int) -> None:
        """Count these bytes more, or less: of a checkpoint whose file is written, of records stored or dropped."""
        self._count(tenant_id, 0, num_bytes)

    def _count(self, tenant_id: str, number: int, num_bytes: int) -> None:
        for counter, change in ((self._num_checkpoints, number), (self._num_bytes, num_bytes)):
            counter[tenant_id] += change
            if not counter[tenant_id]:
                del counter[tenant_id]


def claim_of_pass(chunks: Iterable[Chunk]) -> Claim:
    """Return the claim of a pass: its tokens, which are known. Another operation without chunks claims nothing."""
    return Claim(num_tokens=sum(chunk.num_tokens for chunk in chunks))


def claim_of_sample(decoded: DecodedSample) -> Claim:
    """Return the claim of a sample: its continuations, the most tokens that they can have, and the record of them."""
    num_bytes = record_bytes(decoded.num_samples, decoded.num_sampled_max) if decoded.is_recorded else 0
    return Claim(num_samples=decoded.num_samples, num_tokens=decoded.num_tokens_max, num_bytes=num_bytes)


def save_path(adapter_id: str, request: SaveRequest) -> names.CheckpointPath:
    """Return the path of a named save."""
    if isinstance(request, checkpoints_pb2.SaveStateRequest):
        kind = names.TRAINING
    else:
        kind = names.EXTERNAL if request.for_export else names.SAMPLER
    return names.CheckpointPath(adapter_id, kind, request.name)


def _num_bytes(request: SaveRequest, spec: AdapterSpec, model: ModelInfo | None) -> int:
    trained = {"attn": spec.train_attn, "mlp": spec.train_mlp, "unembed": spec.train_unembed}
    params = sum(number for kind, number in model.adapter_params.items() if trained[kind]) if model is not None else 0
    copies = _TRAINING_COPIES if isinstance(request, checkpoints_pb2.SaveStateRequest) else 1
    return _FLOAT_BYTES * copies * spec.rank * params

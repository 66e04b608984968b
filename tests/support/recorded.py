"""Recorded samples of a toy pool, and passes with their provenance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.support.toy_pool import ToyPool
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.names import sequence_id
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import training_pb2, types_pb2

PROMPT = [1, 2, 3]
"""The prompt of `tests.support.toy_pool.sample_request`."""
PROMPT_KIND, SAMPLED_KIND = types_pb2.PROVENANCE_KIND_PROMPT, types_pb2.PROVENANCE_KIND_SAMPLED


def span(kind: types_pb2.ProvenanceKind.ValueType, name: str, offset: int, length: int) -> types_pb2.ProvenanceSpan:
    return types_pb2.ProvenanceSpan(kind=kind, sequence_id=name, offset=offset, length=length)


def recorded_datum(name: str, tokens: Sequence[int], advantage: float = 1.0) -> types_pb2.Datum:
    """Return a datum of a sequence (its `sequence_id` and tokens) that continues `PROMPT`."""
    whole, num_before = [*PROMPT, *tokens], len(PROMPT) - 1
    advantages = np.array([0.0] * num_before + [advantage] * len(tokens), np.float32)
    return types_pb2.Datum(
        tokens=to_tensor(np.array(whole[:-1], np.int32)),
        loss_inputs={
            "target_tokens": to_tensor(np.array(whole[1:], np.int32)),
            "advantages": to_tensor(advantages),
        },
        token_spans=[span(PROMPT_KIND, name, 0, len(PROMPT)), span(SAMPLED_KIND, name, 0, len(tokens) - 1)],
        target_spans=[span(PROMPT_KIND, name, 1, num_before), span(SAMPLED_KIND, name, 0, len(tokens))],
    )


def recorded_data(sample: ops_pb.Operation) -> list[types_pb2.Datum]:
    """Return a datum of each sequence of a finished sample."""
    return [
        recorded_datum(sequence_id(sample.name, index), from_tensor(sequence.tokens).tolist())
        for index, sequence in enumerate(sample.sample.sequences)
    ]


def recorded_pass(adapter_id: str, seq: int, data: Sequence[types_pb2.Datum]) -> training_pb2.ForwardBackwardRequest:
    return training_pb2.ForwardBackwardRequest(
        adapter_id=adapter_id, seq=seq, data=data, loss_function=types_pb2.LOSS_FUNCTION_STABLE_REINFORCE
    )


async def recorded_sample(
    pool: ToyPool, sampler: str, seq: int, tenant: str = "alice", **values: Any
) -> ops_pb.Operation:
    """Draw a recorded sample, by default one of two sequences at temperature 0.5, and wait."""
    settings: dict[str, Any] = {"num_samples": 2, "seed": seq, "temperature": 0.5, "max_tokens": 6} | values
    name = await pool.sample(sampler, seq, tenant, record_stability_info=True, **settings)
    [finished] = await pool.wait(name, tenant=tenant)
    return finished


async def submit_pass(
    pool: ToyPool, adapter: str, seq: int, data: Sequence[types_pb2.Datum], tenant: str = "alice"
) -> str:
    """Submit a pass of recorded sequences; return the operation's name."""
    request = recorded_pass(adapter, seq, data)
    return str((await pool.service.forward_backward(await pool.principal(tenant), request)).operation.name)

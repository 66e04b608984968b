"""How a large batch is cut into requests, and how their outputs become one. Pure; the rules are the SDK's."""

from __future__ import annotations

from collections.abc import Sequence

from tinkerpool.client.calls.encoding import datum_bytes
from tinkerpool.metrics import merge_metrics
from tinkerpool.types import Datum, ForwardBackwardOutput

CHUNK_DATUMS_MAX = 1024
"""Most datums in one request."""
CHUNK_BYTES_MAX = 5_000_000
"""Most bytes in one request, unless a single datum has more."""


def split(data: Sequence[Datum]) -> list[list[Datum]]:
    """Cut a batch into chunks, in order. Raises ValueError for an empty batch."""
    if not data:
        raise ValueError("no data: a forward pass needs at least one datum")
    chunks: list[list[Datum]] = []
    num_bytes = 0
    for datum in data:
        if not isinstance(datum, Datum):
            raise ValueError(f"data must be a list of Datum, got a {type(datum).__name__}")
        added = datum_bytes(datum)
        if not chunks or len(chunks[-1]) == CHUNK_DATUMS_MAX or num_bytes + added > CHUNK_BYTES_MAX:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(datum)
        num_bytes += added
    return chunks


def merge(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Return one output for the chunks of a batch, in order. Means of metrics are weighted by datums."""
    assert outputs
    num_datums = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=merge_metrics([output.metrics for output in outputs], num_datums),
    )

"""How a large batch is cut into requests, and how their results become one again. Pure; the rules are the SDK's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinkerpool.client.calls.encoding import datum_bytes
from tinkerpool.types import Datum, ForwardBackwardOutput

CHUNK_DATUMS_MAX = 1024
"""Most datums in one request."""
CHUNK_BYTES_MAX = 5_000_000
"""Most bytes in one request, unless a single datum has more."""


def split(data: Sequence[Datum]) -> list[list[Datum]]:
    """Cut a batch into chunks, in order. Raises ValueError for an empty one."""
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
    """One output of those of the chunks, in order: datums concatenated, metrics merged by `merge_metrics`."""
    assert outputs
    num_datums = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=merge_metrics([output.metrics for output in outputs], num_datums),
    )


def merge_metrics(chunks: Sequence[dict[str, float]], num_datums: Sequence[int]) -> dict[str, float]:
    """Merge metrics `name:reduction` by their reductions.

    A metric that some chunk lacks is dropped, and so is an unknown reduction. `unique` keeps the first value under its
    name and the others under `name:unique_1`, `name:unique_2`, ...
    Raises ValueError for a name without exactly one colon.
    """
    merged: dict[str, float] = {}
    for key in chunks[0]:
        _, reduction = _name_and_reduction(key)
        if not all(key in chunk for chunk in chunks):
            continue
        values = [chunk[key] for chunk in chunks]
        if reduction == "unique":
            merged[key] = values[0]
            merged |= {f"{key}_{i}": value for i, value in enumerate(values[1:], start=1)}
        elif reduction in _REDUCTIONS:
            merged[key] = _REDUCTIONS[reduction](values, num_datums)
    return merged


def _name_and_reduction(key: str) -> tuple[str, str]:
    name, colon, reduction = key.partition(":")
    if not colon or ":" in reduction:
        raise ValueError(f"a metric is called name:reduction, with one colon; the service sent {key!r}")
    return name, reduction


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / max(sum(weights), 1)


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "sum": lambda values, _: sum(values),
    "mean": _mean,
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": lambda values, _: float(sum(int(value) for value in values) % 2**64),
}

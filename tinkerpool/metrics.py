"""How the metrics of several parts of one request become the metrics of the request.

A metric is called `name:reduction`; the reduction says how its values are merged. The rules are those of the `tinker`
SDK. The client merges the requests of one batch by them, the coordinator the chunks of one request.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence


def merge_metrics(
    parts: Sequence[Mapping[str, float]], weights: Sequence[float], *, keep_partial: bool = False
) -> dict[str, float]:
    """Merge the metrics of `parts`, in order, each by the reduction that its name ends with.

    Metrics with an unknown reduction are dropped. `unique` keeps the first value under its name and the others under
    `name:unique_1`, `name:unique_2`, ...

    Args:
        parts: metrics by name, at least one mapping.
        weights: the weight of each part in a mean.
        keep_partial: keep a metric that some parts lack, merged over the parts that have it; otherwise it is dropped.

    Raises:
        ValueError: a name without exactly one colon.
    """
    merged: dict[str, float] = {}
    names = dict.fromkeys(name for part in parts for name in part) if keep_partial else parts[0]
    for name in names:
        reduction = _reduction_of(name)
        found = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        if len(found) < len(parts) and not keep_partial:
            continue
        values = [value for value, _ in found]
        if reduction == "unique":
            merged[name] = values[0]
            merged |= {f"{name}_{i}": value for i, value in enumerate(values[1:], start=1)}
        elif reduction in _REDUCTIONS:
            merged[name] = _REDUCTIONS[reduction](values, [weight for _, weight in found])
    return merged


def _reduction_of(name: str) -> str:
    _, colon, reduction = name.partition(":")
    if not colon or ":" in reduction:
        raise ValueError(f"a metric is called name:reduction, with one colon; got {name!r}")
    return reduction


def _sum(values: Sequence[float]) -> float:
    """Add from left to right; the built-in `sum` compensates rounding in newer Pythons, which changes bits."""
    return functools.reduce(operator.add, values)


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return _sum([value * weight for value, weight in zip(values, weights, strict=True)]) / max(_sum(weights), 1)


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "sum": lambda values, _: _sum(values),
    "mean": _mean,
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": lambda values, _: float(sum(int(value) for value in values) % 2**64),
}

"""What torch's profiler says of a step, by kinds of work that a reader knows.

Knows names and shapes of operators; not what a step is. Import `bench_models` first: it sets threads up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.profiler import ProfilerActivity, profile

RANK = 8
LINEARS = (1, 2, 3)
"""That read the same input: their A are one product."""
MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
PRODUCTS, ADAPTERS, REST = "matmuls of the base model", "matmuls of the adapters", "Python, dispatch, waiting"
Kinds = Sequence[tuple[str, tuple[str, ...]]]
"""Kinds of work, in the order of the search, and what the names of their operators contain; of matmuls, whole names."""
TRAINING_KINDS: Kinds = (
    ("attention", ("attention",)),
    ("activation", ("silu", "gelu", "sigmoid")),
    ("norms", ("rms_norm", "native_layer_norm", "rsqrt", "pow", "mean")),
    ("loss", ("softmax", "amax", "scatter", "gather", "log")),
    ("optimizer", ("_foreach", "_fused", "lerp", "addcmul", "addcdiv", "sqrt", "linalg_vector_norm", "isfinite")),
    ("products and sums of activations", ("aten::mul", "aten::add", "aten::sub", "aten::neg", "aten::sum")),
    ("copies", ("copy", "aten::cat", "clone", "fill", "zero", "index", "embedding", "pad")),
)
"""Of a forward_backward and an optimizer step."""


def kind_of(name: str, shapes: Iterable[Sequence[int]], kinds: Kinds, ranks: Iterable[int]) -> str:
    """The kind of work of an operator with inputs of these shapes, with adapters of these ranks, padded."""
    if name.startswith("mkldnn::"):
        return PRODUCTS
    if any(name == kind for kind, _ in kinds):
        return name  # marked so by whoever profiles
    if not name.startswith("aten::"):
        return REST  # a function of autograd's that is written in Python
    if name.removesuffix("_") in MATMULS:
        widths = {count * rank for count in LINEARS for rank in ranks}
        if any(width in widths for shape in shapes for width in shape):
            return ADAPTERS
        return next((kind for kind, parts in kinds if name in parts), PRODUCTS)
    return next((kind for kind, parts in kinds if any(part in name for part in parts)), "views and allocation")


class Profile(NamedTuple):
    """What the profiler has seen of a run."""

    seconds: dict[str, float]
    """By kind of work. What no operator accounts for is `REST`."""
    calls: dict[str, int]
    """Of operators, by kind of work."""
    whole_s: float


def profiled(run: Callable[[], object], kinds: Kinds, ranks: Sequence[int] = (RANK,)) -> Profile:
    """Run it twice, the second time under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]):
        run()  # the profiler's own memory comes between the engine's, and the first run takes longer
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        begin_s = time.perf_counter()
        run()
        whole_s = time.perf_counter() - begin_s
    seconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in profiler.key_averages(group_by_input_shape=True):
        kind = kind_of(event.key, event.input_shapes, kinds, ranks)
        seconds[kind] += event.self_cpu_time_total / 1e6
        calls[kind] += event.count
    seconds[REST] += whole_s - sum(seconds.values())
    return Profile(seconds, calls, whole_s)

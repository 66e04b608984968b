"""What stands in for a capture of a CUDA graph, where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from workers.sampling.graph_pool import GraphPool


def again(_: GraphPool, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand in for a capture: run on the same inputs, into the same result."""
    out = run()
    return lambda: out.copy_(run())

"""CUDA graphs of sampling: their capture, their common memory, and the comparison of a graph with what it stands for.

Does not depend on what is captured.

Main invariant: graphs of one pool run one after another on one stream, and what one leaves in the pool's memory is read
by work that is queued before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.host.captures import capturing

Run = Callable[[], Tensor]
TOLERANCE = 2.0**-5
"""Between a graph and the run that it was captured from: they run the same kernels."""


class GraphError(Exception):
    """A graph cannot be captured, or gives other results than the run that it was captured from."""


class GraphPool:
    """Memory that graphs take in turn. Used by one thread only."""

    def __init__(self) -> None:
        self._handle: Any = None

    def captured(self, run: Run, expected: Tensor) -> Run:
        """Return what runs a function's kernels again, on the same addresses, and returns its result.

        `expected` is the function's result on the inputs of now. Raises GraphError.
        """
        try:
            replay = self.capture(run)
        except RuntimeError as error:
            raise GraphError(f"it cannot be captured: {error}") from None
        if not is_same(replay(), expected):
            raise GraphError("it gives other results than the run that it was captured from")
        return replay

    def capture(self, run: Run) -> Run:
        """Return what runs a function's kernels again. Raises RuntimeError."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self._handle):
            out = run()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def is_same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether values are the same to rounding; those of an adapter that has diverged are not numbers in both."""
    return bool(torch.isclose(actual, expected, TOLERANCE, TOLERANCE, equal_nan=True).all())

"""Captures CUDA graphs, one at a time in a process.

Does not depend on what is captured. Main invariants: the graphs of a GPU are captured on one stream there, so that
they may share memory; after a capture, also one that failed, the thread's stream and GPU are those of before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_ONE_AT_A_TIME = threading.Lock()
"""A capture begins with a wait for the whole GPU, which would end another one there."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what this thread launches on its GPU in this block, with memory of a pool. Raises RuntimeError.

    Other threads may load adapters meanwhile, on streams of their own.
    """
    stream = _stream(torch.cuda.current_device())
    # The outer context restores the stream also if the end of a capture raises: torch's own does not then.
    with (
        _ONE_AT_A_TIME,
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


@cache
def _stream(gpu: int) -> torch.cuda.Stream:
    """Return the stream of a GPU's captures. torch's default is one for the process, on the GPU that captured first."""
    return torch.cuda.Stream(gpu)

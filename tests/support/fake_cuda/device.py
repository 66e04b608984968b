"""Stands in for the parts of `torch.cuda` and of tensors that ask a device, in a process with the guard.

Every value that the host reads from the device is one: losses are finite, checks pass, all logits are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.support.fake_cuda import hardware, our_kernels  # noqa: F401 (declares what they cost)
from tests.support.fake_cuda.counting import Counting, Counts

# The trials of a model's code expect failures, each of which torch logs as an error.
logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)

DEVICE = torch.device("cuda", 0)
FUSED = ("_fused_rms_norm", "silu_backward")
"""Operations that are one kernel on CUDA, and several operations on a device without a kernel for them. Of all in
`native_functions.yaml` with `CUDA` and `CompositeImplicitAutograd` those that the workers reach."""


@cache
def _with_kernels() -> torch.library.Library:
    """Let autograd see that these operations have CUDA kernels. They are never called: fake tensors come first."""
    library = torch.library.Library("aten", "IMPL")

    def absent(*_: Any) -> Any:
        raise AssertionError("a fake tensor reached a kernel")

    for name in FUSED:
        library.impl(name, absent, "CUDA")
    return library


class _Stream:
    """A stream: nothing runs, so nothing is waited for."""

    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Order work of the device."""

    def wait_event(self, _: Any) -> None:
        """Order work of the device."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True


@contextmanager
def fake_cuda(total_bytes: int = hardware.TOTAL_BYTES) -> Iterator[Counting]:
    """Let "cuda" be a device of so much memory without values in this block, and count its work.

    `guard.load` has run in this process.
    """
    _with_kernels()
    counting = Counting(total_bytes)

    class _Event(_Stream):
        def record(self, _: Any = None) -> None:
            """Mark a place in a stream."""

        def synchronize(self) -> None:
            """Wait on the host."""
            counting.wait("an event")

    class _Graph:
        def __init__(self) -> None:
            self.recorded = Counts()

        def replay(self) -> None:
            """Do the captured work."""
            counting.replay(self.recorded)

    def capture(graph: _Graph, **_: Any) -> AbstractContextManager[None]:
        return counting.record(graph.recorded)

    def synchronize(*_: Any) -> None:
        counting.wait("torch.cuda.synchronize")

    def memory_stats(*_: Any) -> dict[str, Any]:
        in_use = {"all": {"current": counting.live_bytes}}
        return {"reserved_bytes": in_use, "allocated_bytes": in_use}

    stand_ins = {
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _Stream,
        "current_device": lambda: 0,
        "stream": nullcontext,
        "synchronize": synchronize,
        "CUDAGraph": _Graph,
        "graph": capture,
        "graph_pool_handle": lambda: None,
        "empty_cache": lambda: None,
        "get_device_capability": lambda *_: hardware.CAPABILITY,
        "get_device_name": lambda *_: "fake",
        "get_device_properties": lambda *_: SimpleNamespace(
            total_memory=total_bytes, multi_processor_count=hardware.NUM_PROCESSORS
        ),
        "mem_get_info": lambda *_: (total_bytes - counting.live_bytes, total_bytes),
        "memory_stats_as_nested_dict": memory_stats,
    }
    numpy = Tensor.numpy

    def read_list(self: Tensor) -> Any:
        if self.device.type == "cuda":
            counting.note_read(self)
        elif (constant := getattr(self, "constant", None)) is not None:
            return constant.tolist()
        return np.ones(self.shape, _numpy_dtype(self.dtype)).tolist()

    def read_array(self: Tensor, **options: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return numpy(self, **options)
        return np.ones(self.shape, _numpy_dtype(self.dtype))

    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(patch.object(FakeTensor, "tolist", read_list))
        stack.enter_context(patch.object(Tensor, "numpy", read_array))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(counting)
        yield counting


def _numpy_dtype(dtype: torch.dtype) -> Any:
    return np.dtype(str(dtype).removeprefix("torch."))

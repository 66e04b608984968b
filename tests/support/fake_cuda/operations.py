"""Counts of single operations, for the tests of the counting itself; called by name in the fake device's process."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.nn import functional as F

from tests.support.fake_cuda import costs
from tests.support.fake_cuda.costs import Call, Cost
from tests.support.fake_cuda.counting import Counts
from tests.support.fake_cuda.device import fake_cuda

CUDA = "cuda"


def count(program: str, setup: str = "", **settings: Any) -> Counts:
    """Return the counts of a program of torch's operations, run after a setup that is not counted."""
    names: dict[str, Any] = {"torch": torch, "F": F}
    with fake_cuda(**settings) as counting:
        exec(setup, names)
        try:
            with counting.stretch() as counts:
                exec(program, names)
        finally:
            torch.use_deterministic_algorithms(False)
    return counts


def memory_in_use() -> list[int]:
    """Return the bytes in use: at first, with a tensor, with a view of it alone, and after both are gone."""
    with fake_cuda() as counting:
        in_use = [counting.live_bytes]
        tensor = torch.empty(1000, device=CUDA)
        in_use.append(counting.live_bytes)
        part = tensor[:10]
        del tensor
        gc.collect()
        in_use.append(counting.live_bytes)
        del part
        in_use.append(counting.live_bytes)
    return in_use


def count_kernel_of_our_own() -> Counts:
    """Return the counts of an operation that is no operation of torch, with a declared cost."""
    library = torch.library.Library("counted", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", torch.empty_like, "Meta")
    with fake_cuda() as counting, counting.stretch() as counts:
        x = torch.empty(64, device=CUDA)
        try:
            torch.ops.counted.double(x)
        except costs.UncountedOperation:
            costs.declare("counted::double", _cost_of_double, "its grid: one block for 32 values")
        torch.ops.counted.double(x)
    return counts


def _cost_of_double(call: Call) -> Cost:
    return Cost(num_kernels=1, num_bytes=call.traffic)

"""The GPU's own kernels on a CPU, by Triton's interpreter, and a count of what they launch and move."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.fake_cuda import our_kernels  # noqa: F401 (declares what they cost)
from tests.support.fake_cuda.costs import RULES, Call
from workers.model import delta_heads, expert_groups, few_rows, gpu_attention, layer_operations  # noqa: F401 (define)
from workers.model.gpu_operations import NAMESPACE, defined, launcher
from workers.sampling import delta_steps  # noqa: F401 (defines an operation)
from workers.sampling.attention import pages  # noqa: F401 (defines operations)
from workers.training import adamw_launches, kernel_scores  # noqa: F401 (define operations)

_LIBRARIES: list[torch.library.Library] = []


def interpret() -> None:
    """Let the operations run on tensors of a CPU in this process, if they do not yet; skip the test without Triton."""
    if _LIBRARIES:
        return
    pytest.importorskip("triton", reason="Triton interprets the GPU's kernels; it is not installed here")
    assert os.environ["TRITON_INTERPRET"] == "1", "set before Triton was imported"
    library = torch.library.Library(NAMESPACE, "IMPL")
    for name in defined:
        library.impl(name, launcher(name), "CPU")
    _LIBRARIES.append(library)


@contextmanager
def sums_in_order() -> Iterator[None]:
    """Let the interpreter's products in this block add up one value after another, after `interpret`.

    For tests of bits. The interpreter multiplies by numpy, whose library may choose the order of an element's sum by
    the shape of the product: with OpenBLAS's kernels for AVX2, 16 columns of a product have other bits than the product
    of these columns alone, and a program's columns depend on the largest rank of a pass. So these tests show the
    order in which the kernels add products, not that in which a product adds values. It takes 20 to 70 times as long.
    """
    interpreter: ModuleType = importlib.import_module("triton.runtime.interpreter")

    def dot(self: Any, left: Any, right: Any, total: Any, *_: Any) -> Any:
        del self
        product = np.zeros_like(total.data)  # (M, N), of (M, K) and (K, N)
        for k in range(left.data.shape[1]):
            product += left.data[:, k : k + 1] * right.data[k]
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    with patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield


@contextmanager
def parts_first() -> Iterator[None]:
    """Run a grid's first programs along its second dimension last in this block, after `interpret`.

    On a GPU the programs of a sum's parts end in any order; the interpreter runs those of one tile after another.
    """
    interpreter: ModuleType = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    set_index = builder.set_grid_idx

    def transposed(x: int, y: int, z: int) -> None:
        num_tiles, num_parts, _ = builder.grid_dim
        place = x * num_parts + y
        set_index(place % num_tiles, num_parts - 1 - place // num_tiles, z)

    with patch.object(builder, "set_grid_idx", transposed):
        yield


@dataclass(slots=True)
class Moved:
    """What kernels did."""

    num_launches: int = 0
    num_bytes: int = 0
    """Loaded and stored, masked elements not counted."""
    num_counted: int = 0
    """What the fake device counts for the same operations: kernels."""
    num_counted_bytes: int = 0


class _Counting(TorchDispatchMode):
    """Adds up what the fake device counts for our own operations."""

    def __init__(self, moved: Moved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._moved = moved

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == NAMESPACE:
            rule, _ = RULES[func._schema.name]
            cost = rule(Call(func, args, {}, None))
            self._moved.num_counted += cost.num_kernels
            self._moved.num_counted_bytes += cost.num_bytes
        return func(*args, **kwargs or {})


@contextmanager
def metered() -> Iterator[Moved]:
    """Count launches and traffic in this block, after `interpret`."""
    interpreter: ModuleType = importlib.import_module("triton.runtime.interpreter")
    builder = interpreter.interpreter_builder
    moved = Moved()
    run, load, store = interpreter.GridExecutor.__call__, builder.create_masked_load, builder.create_masked_store

    def counted_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        moved.num_launches += 1
        return run(self, *args, **kwargs)

    def note(pointers: Any, mask: Any) -> None:
        moved.num_bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(pointers: Any, mask: Any, *others: Any) -> Any:
        note(pointers, mask)
        return load(pointers, mask, *others)

    def counted_store(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        note(pointers, mask)
        return store(pointers, value, mask, *others)

    with (
        patch.object(interpreter.GridExecutor, "__call__", counted_run),
        patch.object(builder, "create_masked_load", counted_load),
        patch.object(builder, "create_masked_store", counted_store),
        _Counting(moved),
    ):
        yield moved

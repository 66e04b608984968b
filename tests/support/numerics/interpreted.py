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

import pytest
import torch

from workers.model.gpu_operations import KERNELS, NAMESPACE, launcher

_LIBRARIES: list[torch.library.Library] = []


def interpret() -> None:
    """Let the operations run on tensors of a CPU in this process, if they do not yet; skip the test without Triton."""
    if _LIBRARIES:
        return
    pytest.importorskip("triton", reason="Triton interprets the GPU's kernels; it is not installed here")
    assert os.environ["TRITON_INTERPRET"] == "1", "set before Triton was imported"
    library = torch.library.Library(NAMESPACE, "IMPL")
    for module, schemas in KERNELS.items():
        for schema in schemas:
            name = schema.partition("(")[0]
            library.impl(name, launcher(module, name), "CPU")
    _LIBRARIES.append(library)


@dataclass(slots=True)
class Moved:
    """What kernels did."""

    num_launches: int = 0
    num_bytes: int = 0
    """Loaded and stored, masked elements not counted."""


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
    ):
        yield moved

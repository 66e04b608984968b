"""Counts the memory of tensors: every storage that an operation allocates, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """While active, counts the bytes of new storages, now and at the peak. Workspaces of kernels are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {self._key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, inputs)
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata  # private: two views of a storage have no other common identity
        return key

    def _note(self, tensor: torch.Tensor, inputs: set[int]) -> None:
        """Count the tensor's storage if no input had it."""
        storage, key = tensor.untyped_storage(), self._key(tensor)
        if key in inputs or key in self._live:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.num_bytes -= size
            del self._live[key]

        self._live[key] = weakref.ref(storage, freed)
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments, without packed weights, whose storage is not accessible."""
    if isinstance(values, torch.Tensor):
        return [] if values.is_mkldnn else [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]

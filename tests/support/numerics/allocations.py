"""Counts the memory of tensors as they come and go: every storage that an operation makes, until it is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """While active: bytes of the storages that were made since, now and at the most. Not what kernels take inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {self._key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._note(tensor, known)
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        key: int = tensor.untyped_storage()._cdata
        return key

    def _note(self, tensor: torch.Tensor, known: set[int]) -> None:
        """Count a storage that is new: no input had it."""
        storage, key = tensor.untyped_storage(), self._key(tensor)
        if key in known or key in self._alive:
            return
        size = storage.nbytes()

        def freed(_: Any) -> None:
            self.num_bytes -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, freed)
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


def _tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments but packed weights, whose storage is not accessible."""
    if isinstance(values, torch.Tensor):
        return [] if values.is_mkldnn else [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]

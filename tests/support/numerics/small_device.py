"""A device of a few bytes, for tests of the bank: what slabs allocate is counted, and refused where it does not fit."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.bank import entries


class SmallDevice:
    """Stands for the memory of a device: `torch.empty` of slabs takes it, until they free it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        """Patched, because a CPU lends more memory than it has."""
        self.num_bytes = num_bytes
        self.num_refused = 0
        self._buffers: list[weakref.ref[torch.UntypedStorage]] = []
        monkeypatch.setattr(entries, "torch", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, **options: Any) -> Tensor:
        """See `torch.empty`. Raises torch.OutOfMemoryError."""
        buffer = torch.empty(*shape, **options)
        if self.used + buffer.nbytes > self.num_bytes:
            self.num_refused += 1
            raise torch.OutOfMemoryError(f"{buffer.nbytes} bytes more than {self.used}")
        self._buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    @property
    def used(self) -> int:
        """Bytes that buffers have."""
        storages = [reference() for reference in self._buffers]
        return sum(storage.nbytes() for storage in storages if storage is not None)

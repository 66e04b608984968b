"""Arrays at fixed addresses of a device that are overwritten together, by as few copies as do not wait.

A copy of the host takes as long for eight bytes as for some kilobytes. Depends on nothing of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Shape = tuple[type[np.generic], tuple[int, ...]]
"""The type and the shape of an array."""
ALIGNMENT = 16
"""Bytes; every array begins at a multiple."""
COPY_BYTES_MAX = 1 << 16
"""Of memory that is not pinned CUDA copies so many bytes without a wait for the device (CUDA C Programming Guide,
"Asynchronous Concurrent Execution")."""


class InputBlock:
    """The arrays, without values until they are sent."""

    def __init__(self, arrays: Sequence[Shape], device: torch.device) -> None:
        """Allocate arrays of these types and shapes."""
        self._arrays = arrays
        ends = [0]
        for dtype, shape in arrays:
            ends.append(ends[-1] + -(-prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT)
        self._ends = ends
        self._memory = torch.empty(ends[-1], dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = [
            self._memory[start : start + prod(shape) * np.dtype(dtype).itemsize]
            .view(torch.from_numpy(np.empty(0, dtype)).dtype)
            .view(shape)
            for (dtype, shape), start in zip(arrays, ends, strict=False)
        ]
        """On the device."""

    def blank(self) -> tuple[NDArray[np.uint8], list[NDArray[Any]]]:
        """Return a block of zeros in host memory for `send`, and its arrays to write to."""
        block = np.zeros(self._ends[-1], np.uint8)
        parts = [
            block[start:stop].view(dtype)[: prod(shape)].reshape(shape)
            for (dtype, shape), (start, stop) in zip(self._arrays, pairwise(self._ends), strict=True)
        ]
        return block, parts

    def send(self, block: NDArray[np.uint8]) -> None:
        """Overwrite the arrays on the device, without a wait; the block must not be written to any more."""
        source = torch.from_numpy(block)
        for target, part in zip(self._memory.split(COPY_BYTES_MAX), source.split(COPY_BYTES_MAX), strict=True):
            target.copy_(part, non_blocking=True)

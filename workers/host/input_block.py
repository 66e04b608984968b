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
        copy_in_parts(self._memory, torch.from_numpy(block))


def copy_in_parts(target: Tensor, source: Tensor) -> None:
    """Copy a contiguous tensor of the host to one of a device, of the same type and shape, without a wait."""
    parts = (tensor.view(-1).split(COPY_BYTES_MAX // source.element_size()) for tensor in (target, source))
    for target_part, source_part in zip(*parts, strict=True):
        target_part.copy_(source_part, non_blocking=True)

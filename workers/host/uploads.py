"""Copies small values from the host to a device, without a wait for the work that is queued there.

`torch.tensor(values, device=...)` waits for that work, and so does every use of an index on the CPU for a tensor on a
GPU. Depends on nothing of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNED_BYTES = 16
"""Every array of an upload begins at a multiple of it."""
COPY_BYTES_MAX = 1 << 16
"""Of memory that is not pinned CUDA copies so many bytes without a wait for the device (CUDA C Programming Guide,
"Asynchronous Concurrent Execution")."""


def on_device(
    values: Sequence[int] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return values as a tensor on a device; on the CPU an array or a tensor of this dtype keeps its memory."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return copies of arrays as tensors on a device: views of one allocation, by as few copies as do not wait."""
    places, end = list[slice](), 0
    for array in arrays:
        places.append(slice(end, end + array.nbytes))
        end += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    joined = np.zeros(end, np.uint8)
    for array, place in zip(arrays, places, strict=True):
        joined[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    copied, source = torch.empty(end, dtype=torch.uint8, device=device), torch.from_numpy(joined)
    for target, part in zip(copied.split(COPY_BYTES_MAX), source.split(COPY_BYTES_MAX), strict=True):
        target.copy_(part, non_blocking=True)
    return [
        copied[place].view(_DTYPES[array.dtype.str]).view(array.shape)
        for array, place in zip(arrays, places, strict=True)
    ]


_DTYPES = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32}
"""By NumPy's names."""

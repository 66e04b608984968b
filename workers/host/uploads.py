"""Copies small values from the host to a device, without a wait for the work that is queued there.

`torch.tensor(values, device=...)` waits for that work, and so does every use of an index on the CPU for a tensor on a
GPU. Depends on `input_block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.host.input_block import InputBlock, copy_in_parts


def on_device(
    values: Sequence[int] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return values as a tensor on a device; on the CPU an array or a tensor of this dtype keeps its memory."""
    source = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu" or source.device.type != "cpu":
        return source.to(device, non_blocking=True)
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    copy_in_parts(target, source.contiguous())
    return target


def all_on_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return copies of arrays as tensors on a device: views of one allocation."""
    inputs = InputBlock([(array.dtype.type, array.shape) for array in arrays], device)
    block, targets = inputs.blank()
    for target, array in zip(targets, arrays, strict=True):
        target[...] = array
    inputs.send(block)
    return inputs.tensors

"""Copies values from a device to the host behind the work that is queued so far, while later work runs.

`Tensor.cpu` waits for everything that is queued. Depends on nothing of the project.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Download:
    """Values on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        """Queue the copy; the values may be overwritten by work that is queued later."""
        is_on_gpu = values.device.type == "cuda"
        self._copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=is_on_gpu)
        self._copy.copy_(values, non_blocking=True)
        self._is_there: torch.cuda.Event | None = None
        if is_on_gpu:
            self._is_there = torch.cuda.Event()
            self._is_there.record()

    def wait(self) -> Tensor:
        """Return the values in host memory, once they are there. Raises the library's error if the device failed."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy

"""Copies small values from the host to a device, without a wait for the work that is queued there.

`torch.tensor(values, device=...)` waits for that work, and so does every use of an index on the CPU for a tensor on a
GPU. Depends on nothing of the project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(
    values: Sequence[int] | NDArray[Any] | Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Return values as a tensor on a device; on the CPU an array or a tensor of this dtype keeps its memory."""
    return torch.as_tensor(values, dtype=dtype).to(device, non_blocking=True)

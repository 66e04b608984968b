"""How trials make values: the same in every process, for one kind of kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_WEIGHT = 1 << 22
"""Values of a weight from which on fewer sizes are tried."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The properties, besides sizes, by which the library chooses a kernel. A trial runs once per process for each."""

    device: torch.device
    dtype: torch.dtype
    num_threads: int

    @classmethod
    def of(cls, weight: Tensor) -> Kernel:
        """Return the kind of kernels that products with a weight use now."""
        return cls(weight.device, weight.dtype, torch.get_num_threads())

    def values(self, num_rows: int, num_columns: int) -> Tensor:
        """Return normal values (num_rows, num_columns), the same in every process."""
        generator = torch.Generator().manual_seed(num_rows * num_columns)
        return torch.randn(num_rows, num_columns, generator=generator).to(self.device, self.dtype)


def is_large(d_out: int, d_in: int) -> bool:
    """Return whether products with a weight take long: it is a large vocabulary's, which multiplies few rows a time."""
    return d_out * d_in > LARGE_WEIGHT

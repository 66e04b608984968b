"""Lets backwards add in a fixed order, so that equal passes have equal bits on a GPU.

The library's attention kernels, flash and memory-efficient, have one switch for it: that of the whole process. Does not
depend on models.

Main invariant: the switch is on while any backward of the process is in `fixed_order`, and off otherwise; engines of
several threads do not switch it off for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

CUBLAS_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: with the switch on, products raise without a fixed workspace."""


class _Users:
    """How many backwards need the switch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0

    def change(self, by: int) -> None:
        """Add to the number, and set the switch."""
        with self._lock:
            self._number += by
            # Not `use_deterministic_algorithms`, which also imports the library's compiler.
            torch.set_deterministic_debug_mode("error" if self._number else "default")


_USERS = _Users()


def prepare() -> None:
    """Set what the switch needs in this process, before the library's first product on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)
    # With the switch on, memory without values would be filled with NaN.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def fixed_order() -> Iterator[None]:
    """Switch the library to deterministic kernels in this block; `prepare` has been called."""
    _USERS.change(1)
    try:
        yield
    finally:
        _USERS.change(-1)

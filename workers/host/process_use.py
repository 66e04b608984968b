"""What this process takes of its machine: memory, processor time, memory of its GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from workers.host.free_memory import library_bytes, read_kernel_file

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return the bytes of memory that the process has; 0 where the kernel does not tell."""
    try:
        return int(read_kernel_file(STATM).split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def cpu_s() -> float:
    """Return the seconds of processor time that the process has used."""
    return time.process_time()


def device_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that the process has reserved; 0 for the CPU."""
    return library_bytes("reserved_bytes", device) if device.type == "cuda" else 0

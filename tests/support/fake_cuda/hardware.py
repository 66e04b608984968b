"""The time model of a GPU and of its host: the one place with these constants.

Every number is an assumption until a GPU has been measured; each says where it comes from.
"""

from __future__ import annotations

MATMUL_FLOPS = 650e12
"""FLOP/s of a large bf16 product: two thirds of an H100 SXM's dense peak of 989e12, as cuBLAS reaches."""
ATTENTION_FLOPS = 350e12
"""FLOP/s of flash attention 2, which is what torch ships; its authors measured so much on an H100."""
BANDWIDTH = 2.7e12
"""Bytes per second from memory: 80 % of the 3.35e12 of the data sheet."""
CACHE_BANDWIDTH = 5e12
"""Bytes per second of a kernel whose data are in the L2 cache."""
CACHE_BYTES = 40e6
"""Most bytes of a kernel that is taken to run from the L2 cache, of 50 MB."""
KERNEL_S = 2e-6
"""Least time of a kernel: one wave of blocks starts, reads, writes and ends."""
GAP_S = 0.5e-6
"""Time between two kernels of a stream that are both queued."""
HOST_OPERATION_S = 20e-6
"""Time of the host for an operation: the engine's Python, autograd and torch's dispatch. A training step took 55e-6
an operation on the processor of `docs/benchmarks.md`; hosts of GPUs are two to three times as fast."""
WAIT_S = 20e-6
"""Time of a wait: the call returns, and the first kernel after it reaches the idle device."""
COPY_BANDWIDTH = 6e9
"""Bytes per second between the device and memory that is not pinned: the driver copies through a buffer of its own."""
PINNED_BANDWIDTH = 50e9
"""Bytes per second between the device and pinned memory over PCIe 5 with 16 lanes."""
TOTAL_BYTES = 80 * 10**9
"""Memory of an H100."""
CAPABILITY = (9, 0)
NUM_PROCESSORS = 132
"""Streaming multiprocessors of an H100 SXM."""


def kernel_seconds(num_kernels: int, num_bytes: float, flops: float, *, is_attention: bool = False) -> float:
    """Return the time of an operation of `num_kernels` launches on the device."""
    bandwidth = CACHE_BANDWIDTH if num_bytes < CACHE_BYTES and not flops else BANDWIDTH
    arithmetic_s = flops / (ATTENTION_FLOPS if is_attention else MATMUL_FLOPS)
    return max(num_bytes / bandwidth, arithmetic_s, KERNEL_S * num_kernels) + GAP_S * num_kernels

"""Copies between the bank's rows and host memory: at once on a CPU, beside the computation on a GPU.

Knows tensors and streams; not what a row holds, nor whose it is.

Main invariant: a copy begins after everything that was handed to the computing stream before it. Nothing may read what
a copy writes, or write what it reads, before waiting for it: the host by `wait_on_host`, the computation by
`wait_on_device`. Copies follow each other in the order of their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Copies that may be under way."""

    def wait_on_host(self) -> None:
        """Return when they are done."""

    def wait_on_device(self) -> None:
        """Let what is handed to the computing stream from now on begin when they are done; returns at once."""


class Transfers(Protocol):
    """How a bank copies."""

    is_concurrent: bool
    """Whether copies run beside the computation, so that it pays to begin one before its result is needed."""

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """Copies of vectors in host memory, dtypes unchanged, and what to wait for before reading them."""

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        """Write each pair's second to its first, in order, converting dtypes; None: zeros."""


class DirectTransfers:
    """Implements `Transfers`: every copy is done when its call returns, and is its own `Transfer`."""

    is_concurrent = False

    def wait_on_host(self) -> None:
        """Nothing is under way."""

    def wait_on_device(self) -> None:
        """Nothing is under way."""

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """See `Transfers`."""
        return [vector.to("cpu", copy=True) for vector in vectors], self

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        """See `Transfers`."""
        for target, source in copies:
            write(target, source)
        return self


class _CudaTransfer:
    """Implements `Transfer` with an event behind the copies."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._device = stream.device

    def wait_on_host(self) -> None:
        """See `Transfer`."""
        self._event.synchronize()

    def wait_on_device(self) -> None:
        """See `Transfer`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaTransfers:
    """Implements `Transfers` on a stream of its own, through pinned host memory, which the device copies by itself."""

    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """See `Transfers`."""
        pinned = [torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True) for vector in vectors]
        self._follow_computation()
        with torch.cuda.stream(self._stream):
            for copy, vector in zip(pinned, vectors, strict=True):
                copy.copy_(vector, non_blocking=True)
        return pinned, _CudaTransfer(self._stream)

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        """See `Transfers`."""
        staged = [
            (target, source.pin_memory() if source is not None and source.device.type == "cpu" else source)
            for target, source in copies
        ]
        self._follow_computation()
        with torch.cuda.stream(self._stream):
            for target, source in staged:
                write(target, source)
        return _CudaTransfer(self._stream)

    def _follow_computation(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


def write(target: Tensor, source: Tensor | None) -> None:
    """Copy `source` to `target`, without waiting where the device can copy by itself; None: zeros."""
    if source is None:
        target.zero_()
    else:
        target.copy_(source, non_blocking=True)


def transfers_for(device: torch.device) -> Transfers:
    """The best way to copy to and from a device."""
    return CudaTransfers(device) if device.type == "cuda" else DirectTransfers()

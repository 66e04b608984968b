"""Copies between the bank's rows and host memory: synchronous on a CPU, concurrent with the computation on a GPU.

Does not depend on rows or entries: it copies vectors.

Main invariant: a copy begins after all work that was queued on the computing stream before it, and copies run in the
order of their calls. Before code reads the target of a copy or writes its source, it waits for the copy: the host by
`wait_on_host`, the computation by `wait_on_device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """Copies that may still be running."""

    def wait_on_host(self) -> None:
        """Return when the copies are done."""

    def wait_on_device(self) -> None:
        """Let work queued on the computing stream from now on begin after the copies; return at once."""


class Transfers(Protocol):
    """The copies of a bank."""

    is_concurrent: bool
    """Whether copies run concurrently with the computation, so that it pays to begin one early."""

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """Copy vectors to host memory, dtypes unchanged; return the copies, and the transfer that fills them."""

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        """Copy each pair's second tensor to its first, in order, converting dtypes; None: zeros."""


class DirectTransfers:
    """Implements `Transfers`: every copy is done when its call returns. Implements `Transfer` too."""

    is_concurrent = False

    def wait_on_host(self) -> None:
        """Return at once: the copies are done."""

    def wait_on_device(self) -> None:
        """Return at once: the copies are done."""

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        """See `Transfers`."""
        return [vector.to("cpu", copy=True) for vector in vectors], self

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        """See `Transfers`."""
        for target, source in copies:
            write(target, source)
        return self


class _CudaTransfer:
    """Implements `Transfer` by an event after the copies."""

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
    """Implements `Transfers` on a stream of its own, through pinned host memory, which needs no processor time."""

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
    """Copy `source` to `target`; None: zeros. Does not wait for a device that copies by itself."""
    if source is None:
        target.zero_()
    else:
        target.copy_(source, non_blocking=True)


def transfers_for(device: torch.device) -> Transfers:
    """Return the fastest implementation for a device."""
    return CudaTransfers(device) if device.type == "cuda" else DirectTransfers()

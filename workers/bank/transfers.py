"""Copies between the bank's rows and host memory: synchronous on a CPU, concurrent with the computation on a GPU.

Does not depend on rows or entries: it copies vectors.

Main invariant: a copy begins after all work that was queued on the computing stream before it, after earlier copies in
its own direction, and after the transfers that its call names; the two directions run side by side. Before code reads
the target of a copy or writes its source, it waits for the copy: the host by `wait_on_host`, the computation by
`wait_on_device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from workers.bank.pinned import PinnedBuffers


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

    def host_zeros(self, num_values: int) -> Tensor:
        """Return zeros (P,), fp32, in the host memory from which `to_device` copies fastest. Any thread may call it."""

    def to_host(self, vectors: Sequence[Tensor], filling: Transfer | None = None) -> tuple[list[Tensor], Transfer]:
        """Copy vectors to host memory, dtypes unchanged; return the copies, and the transfer that fills them.

        `filling` may still fill the vectors.
        """

    def to_device(
        self,
        copies: Sequence[tuple[Tensor, Tensor | None]],
        filling: Transfer | None = None,
        emptying: Transfer | None = None,
    ) -> Transfer:
        """Copy each pair's second tensor to its first, in order, converting dtypes; None: zeros.

        `filling` may still fill the second tensors. `emptying` may still copy the first ones to the host: each follows
        its own copy alone, and the transfer ends after all of it.
        """


class DirectTransfers:
    """Implements `Transfers`: every copy is done when its call returns. Implements `Transfer` too."""

    is_concurrent = False

    def host_zeros(self, num_values: int) -> Tensor:
        """See `Transfers`."""
        return host_zeros(num_values)

    def wait_on_host(self) -> None:
        """Return at once: the copies are done."""

    def wait_on_device(self) -> None:
        """Return at once: the copies are done."""

    def to_host(self, vectors: Sequence[Tensor], filling: Transfer | None = None) -> tuple[list[Tensor], Transfer]:
        """See `Transfers`."""
        return [vector.to("cpu", copy=True) for vector in vectors], self

    def to_device(
        self,
        copies: Sequence[tuple[Tensor, Tensor | None]],
        filling: Transfer | None = None,
        emptying: Transfer | None = None,
    ) -> Transfer:
        """See `Transfers`."""
        for target, source in copies:
            write(target, source)
        return self


class _CudaTransfer:
    """Implements `Transfer` by events after the copies."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()
        """After all copies so far."""
        self._events: dict[int, torch.cuda.Event] = {}
        """After the copy from each vector on the device, by its address."""

    def note(self, vector: Tensor) -> None:
        """Note the last copy on the stream: from or to this vector on the device."""
        self.note_end()
        self._events[vector.data_ptr()] = self._event

    def note_end(self) -> None:
        """Let the transfer end after all that is on the stream."""
        self._event = torch.cuda.Event()
        self._event.record(self._stream)

    def event_of(self, vector: Tensor | None) -> torch.cuda.Event:
        """Return the event after the copy of a vector; after all copies for None, or if there is none of the vector."""
        return self._event if vector is None else self._events.get(vector.data_ptr(), self._event)

    @property
    def is_done(self) -> bool:
        """See `pinned.Finishing`."""
        return bool(self._event.query())

    def wait_on_host(self) -> None:
        """See `Transfer`."""
        self._event.synchronize()

    def wait_on_device(self) -> None:
        """See `Transfer`."""
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)


class CudaTransfers:
    """Implements `Transfers` on a stream for each direction, through pinned host memory, without processor time."""

    is_concurrent = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._pinned = PinnedBuffers()

    def host_zeros(self, num_values: int) -> Tensor:
        """See `Transfers`; if no more memory can be pinned, in other memory."""
        try:
            with torch.cuda.device(self._device):  # each thread's own: the first GPU would get a context otherwise
                pinned = self._pinned.take(torch.empty(num_values, device="meta"))
        except MemoryError:
            return host_zeros(num_values)
        pinned.numpy().fill(0.0)
        return pinned

    def to_host(self, vectors: Sequence[Tensor], filling: Transfer | None = None) -> tuple[list[Tensor], Transfer]:
        """See `Transfers`."""
        pinned = [self._pinned.take(vector) for vector in vectors]
        self._follow(self._down, filling)
        transfer = _CudaTransfer(self._down)
        with torch.cuda.stream(self._down):
            for copy, vector in zip(pinned, vectors, strict=True):
                write(copy, vector)
                transfer.note(vector)
                self._pinned.note(copy, transfer)
        return pinned, transfer

    def to_device(
        self,
        copies: Sequence[tuple[Tensor, Tensor | None]],
        filling: Transfer | None = None,
        emptying: Transfer | None = None,
    ) -> Transfer:
        """See `Transfers`."""
        staged = [(target, self._staged(source)) for target, source in copies]
        self._follow(self._up, filling)
        transfer = _CudaTransfer(self._up)
        with torch.cuda.stream(self._up):
            for target, source in staged:
                if isinstance(emptying, _CudaTransfer):
                    self._up.wait_event(emptying.event_of(target))
                write(target, source)
                transfer.note(target)
                if source is not None:
                    self._pinned.note(source, transfer)
            if isinstance(emptying, _CudaTransfer):
                self._up.wait_event(emptying.event_of(None))
                transfer.note_end()
        return transfer

    def _staged(self, source: Tensor | None) -> Tensor | None:
        """Return a source, or a copy in pinned memory if it is in other memory of the host."""
        if source is None or source.device.type != "cpu" or source in self._pinned:
            return source
        staged = self._pinned.take(source)
        staged.copy_(source)
        return staged

    def _follow(self, stream: torch.cuda.Stream, filling: Transfer | None) -> None:
        """Let copies on a stream begin after the computation so far, and after a transfer."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        if isinstance(filling, _CudaTransfer):
            stream.wait_event(filling.event_of(None))


def host_zeros(num_values: int) -> Tensor:
    """Return zeros (P,), fp32, in host memory, which takes none until it is written."""
    return torch.from_numpy(np.zeros(num_values, np.float32))


def write(target: Tensor, source: Tensor | None) -> None:
    """Copy `source` to `target`; None: zeros. Does not wait for a device that copies by itself."""
    if source is None:
        target.zero_()
    else:
        target.copy_(source, non_blocking=True)


def transfers_for(device: torch.device) -> Transfers:
    """Return the fastest implementation for a device."""
    return CudaTransfers(device) if device.type == "cuda" else DirectTransfers()

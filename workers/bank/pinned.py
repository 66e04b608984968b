"""Pinned host memory in buffers of just the size of a vector, which are used again for vectors of that size.

The library's own pinned memory is rounded up to powers of two: 512 MB for a vector of 369 MB, for the life of the
process. The vectors of a bank have few sizes, so few buffers are pinned in vain.

Does not depend on rows, streams or devices.

Main invariants: a buffer is free once no tensor has its memory any more; it is used again, or unpinned, once the last
transfer noted for it is done. Memory is unpinned before it is unmapped, also when a whole bank is dropped: CUDA pins no
new memory at an address that is still registered.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Finishing(Protocol):
    """A transfer that may still be running."""

    @property
    def is_done(self) -> bool:
        """Whether its copies are done."""

    def wait_on_host(self) -> None:
        """Return when its copies are done."""


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: mmap.mmap
    address: int
    cudart: Any
    """CUDA's runtime, which has pinned the memory."""
    transfer: Finishing | None = None
    """The last one noted."""

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def is_done(self) -> bool:
        return self.transfer is None or self.transfer.is_done

    def finish(self) -> None:
        """Wait for the last transfer."""
        if self.transfer is not None:
            self.transfer.wait_on_host()
            self.transfer = None

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.finish()
            self.cudart.cudaHostUnregister(self.address)


class PinnedBuffers:
    """The pinned memory of one bank; memory comes back from the thread that used it last."""

    def __init__(self) -> None:
        self._taking = threading.Lock()
        self._free: list[_Buffer] = []
        """The longest free first."""
        self._used: dict[int, _Buffer] = {}
        """By address."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all pinned memory."""
        return sum(map(len, (*self._free, *self._used.values())))

    def __contains__(self, vector: Tensor) -> bool:
        """Return whether a tensor begins where a buffer begins that is in use."""
        return vector.device.type == "cpu" and vector.data_ptr() in self._used

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor in pinned memory with the size and dtype of `like` (P,); its values may be anything.

        Raises MemoryError if that much cannot be pinned.
        """
        with self._taking:  # by one thread at a time; any may give one back meanwhile
            buffer = self._find(like.nbytes) or self._pinned(like.nbytes)
            self._used[buffer.address] = buffer
        view = memoryview(buffer.memory)
        weakref.finalize(view, self._give_back, buffer).atexit = False
        # The tensor's storage, and so every view of it, keeps this one view of the memory.
        return torch.frombuffer(view, dtype=like.dtype)

    def note(self, vector: Tensor, transfer: Finishing) -> None:
        """Note a transfer from or to a vector; ignored unless its memory is a buffer's."""
        if vector in self:
            self._used[vector.data_ptr()].transfer = transfer

    def _find(self, size: int) -> _Buffer | None:
        """Return a free buffer of this size, rather one whose transfer is done; None if there is none."""
        found = [buffer for buffer in self._free if len(buffer) == size]
        if not found:
            return None
        buffer = next((buffer for buffer in found if buffer.is_done), found[0])
        self._free.remove(buffer)
        buffer.finish()
        return buffer

    def _pinned(self, size: int) -> _Buffer:
        """Pin a new buffer; first unpin as much that is free, if there is so much."""
        missing = size
        while self._free and missing > 0:
            missing -= len(self._free.pop(0))
        try:
            memory = mmap.mmap(-1, size)
        except OSError as refused:
            raise MemoryError(f"{size} bytes of host memory cannot be mapped: {refused}") from None
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        cudart: Any = torch.cuda.cudart()
        error = int(cudart.cudaHostRegister(address, size, 0))
        if error:
            _forget_error()
            raise MemoryError(f"{size} bytes of host memory cannot be pinned: CUDA's error {error}")
        return _Buffer(memory, address, cudart)

    def _give_back(self, buffer: _Buffer) -> None:
        del self._used[buffer.address]
        self._free.append(buffer)


def _forget_error() -> None:
    """Take the failed call's error from CUDA, by a launch that raises it: otherwise the next launch would."""
    with suppress(torch.AcceleratorError, torch.OutOfMemoryError):
        torch.zeros(1, device="cuda")

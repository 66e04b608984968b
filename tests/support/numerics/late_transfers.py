"""Transfers that copy as late as the protocol permits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.bank.transfers import Transfer, write


class LateTransfers:
    """Implements `Transfers`: a copy is made when the first caller waits for it, not before.

    Until then its target holds NaN, so that a reader that does not wait reads NaN.
    """

    is_concurrent = True

    def __init__(self) -> None:
        self.num_waits = 0
        self._pending: list[Callable[[], None]] = []

    def to_host(self, vectors: Sequence[Tensor]) -> tuple[list[Tensor], Transfer]:
        copies = [torch.full_like(vector, float("nan")) for vector in vectors]
        return copies, self._later(list(zip(copies, vectors, strict=True)))

    def to_device(self, copies: Sequence[tuple[Tensor, Tensor | None]]) -> Transfer:
        for target, _ in copies:
            self._later([(target, torch.full_like(target, float("nan")))])
        return self._later(list(copies))

    def _later(self, copies: list[tuple[Tensor, Tensor | None]]) -> Transfer:
        def run() -> None:
            for target, source in copies:
                write(target, source)

        self._pending.append(run)
        return _LateTransfer(self, len(self._pending))

    def finish(self, number: int) -> None:
        """Make the first `number` copies, in the order of their calls."""
        self.num_waits += 1
        for index in range(number):
            self._pending[index]()
            self._pending[index] = lambda: None


class _LateTransfer:
    def __init__(self, transfers: LateTransfers, number: int) -> None:
        self._transfers, self._number = transfers, number

    def wait_on_host(self) -> None:
        self._transfers.finish(self._number)

    def wait_on_device(self) -> None:
        self._transfers.finish(self._number)

"""Transfers that copy as late as the protocol permits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workers.bank.transfers import Transfer, host_zeros, write


@dataclass
class LateTransfers:
    """Implements `Transfers`: a copy is made when the first caller waits for it, or for a later one in its direction.

    Until then its target holds NaN, so that a reader that does not wait reads NaN.
    """

    is_concurrent = True
    num_waits: int = 0
    _down: list[Callable[[], None]] = field(default_factory=list)
    _up: list[Callable[[], None]] = field(default_factory=list)

    def host_zeros(self, num_values: int) -> Tensor:
        return host_zeros(num_values)

    def to_host(self, vectors: Sequence[Tensor], filling: Transfer | None = None) -> tuple[list[Tensor], Transfer]:
        copies = [torch.full_like(vector, float("nan")) for vector in vectors]
        return copies, self._later(self._down, list(zip(copies, vectors, strict=True)), filling)

    def to_device(
        self,
        copies: Sequence[tuple[Tensor, Tensor | None]],
        filling: Transfer | None = None,
        emptying: Transfer | None = None,
    ) -> Transfer:
        for target, _ in copies:
            self._later(self._up, [(target, torch.full_like(target, float("nan")))], emptying)
        return self._later(self._up, copies, filling)

    def _later(
        self, queue: list[Callable[[], None]], copies: Sequence[tuple[Tensor, Tensor | None]], first: Transfer | None
    ) -> Transfer:
        def run() -> None:
            if isinstance(first, _LateTransfer):
                first.finish()
            for target, source in copies:
                write(target, source)

        queue.append(run)
        return _LateTransfer(self, queue, len(queue))


@dataclass
class _LateTransfer:
    transfers: LateTransfers
    queue: list[Callable[[], None]]
    number: int
    """Its place in the queue, from 1."""

    def finish(self) -> None:
        """Make this copy, and those before it in its direction."""
        for index in range(self.number):
            run, self.queue[index] = self.queue[index], lambda: None
            run()

    def wait_on_host(self) -> None:
        self.transfers.num_waits += 1
        self.finish()

    def wait_on_device(self) -> None:
        self.wait_on_host()

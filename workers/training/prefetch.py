"""Loads adapters that the next batch is expected to need, while this batch computes. A hint: it changes no result."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from workers.bank.bank import Bank


class Prefetch:
    """The expected adapters of one bank. One thread only."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._expected: Sequence[str] = ()
        self._own: Collection[str] = ()

    def expect(self, expected: Sequence[str], own: Collection[str]) -> None:
        """Set the adapters that the next batch is expected to need, and those that the current batch has."""
        self._expected, self._own = expected, own

    def begin(self) -> None:
        """Begin to load the expected adapters, once all adapters of the batch are resident.

        Copies run one after another, so the batch's own would otherwise queue behind these.
        """
        bank = self._bank
        if all(bank.entry(key).row is not None for key in self._own if key in bank):
            bank.prefetch(self._expected, keep=self._own)

    def end_batch(self) -> None:
        """Begin to load the expected adapters: the batch has ended and needs no others."""
        self._bank.prefetch(self._expected, keep=self._own)

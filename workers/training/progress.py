"""Where each adapter stands in its order on this worker, and what happens to its gradient window when something fails.

Knows seqs, chunks and windows; not weights or arithmetic.

Main invariant: an item runs only if the adapter is exactly at the item's `prev_seq` (and at its chunk), so nothing is
applied twice or skipped. A failed operation consumes its seq. If it was to add a gradient it closes its window: nothing
is added and no step is taken until the next step, load or `drop_gradient`.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.contract.messages import ErrorCode, Item, ItemError, LoadItem, OptimStepItem, PassItem


@dataclass(frozen=True, slots=True)
class Failure:
    """An operation that failed, by its seq."""

    seq: int
    error: ItemError


@dataclass(slots=True)
class Progress:
    """One adapter's place in its order."""

    applied_seq: int = 0
    num_steps: int = 0
    """Optimizer steps taken."""
    num_datums: int = 0
    """Sequences whose gradients are in the window."""
    open_seq: int | None = None
    """The chunked operation that has begun and not ended."""
    next_chunk: int = 0
    failed: Failure | None = None
    """The last operation that failed; later chunks of it answer the same."""
    window: Failure | None = None
    """The failure that closed the gradient window."""

    def admit(self, item: Item) -> ItemError | None:
        """Move to where the adapter is after the item, or say why it must not run.

        OUT_OF_ORDER changes nothing. An item of a closed window, or of an operation that failed, consumes its seq.
        """
        if isinstance(item, PassItem):
            if self.failed is not None and self.failed.seq == item.seq and item.chunk_index > 0:
                return self.failed.error
            is_next = item.chunk_index == (self.next_chunk if self.open_seq == item.seq else 0)
        else:
            is_next = self.open_seq is None
        if self.applied_seq != item.prev_seq or self.open_seq not in {None, item.seq} or not is_next:
            return self._out_of_order(item)
        if item.drop_gradient or isinstance(item, LoadItem):
            self.window = None
            self.num_datums = 0
        self._advance(item)
        if self.window is None:
            return None
        if isinstance(item, OptimStepItem):
            error = self._in_closed_window()
            self.window = None
            return error
        if isinstance(item, PassItem) and item.backward:
            error = self._in_closed_window()
            self.fail(item, error)
            return error
        return None

    def settle(self, item: PassItem, error: ItemError | None) -> ItemError | None:
        """Take note of how an admitted pass went, in the order of the items; returns the error that it answers with.

        An item that went well still answers with an error if an earlier one of its operation or window has failed.
        """
        if self.failed is not None and self.failed.seq == item.seq:
            return self.failed.error
        if item.backward and error is None and self.window is not None:
            error = self._in_closed_window()
        if error is not None:
            self.fail(item, error)
        elif item.backward:
            self.num_datums += len(item.data)
        return error

    def fail(self, item: Item, error: ItemError) -> None:
        """An admitted item failed: its seq is consumed, and if it was a backward pass its window is closed."""
        self.failed = Failure(item.seq, error)
        if self.open_seq == item.seq:
            self.open_seq = None
            self.applied_seq = item.seq
        if isinstance(item, PassItem) and item.backward:
            self.num_datums = 0
            if self.window is None:
                self.window = self.failed

    def _advance(self, item: Item) -> None:
        if isinstance(item, PassItem) and item.chunk_index + 1 < item.num_chunks:
            self.open_seq = item.seq
            self.next_chunk = item.chunk_index + 1
        else:
            self.open_seq = None
            self.applied_seq = item.seq

    def _in_closed_window(self) -> ItemError:
        assert self.window is not None
        return ItemError(
            code=self.window.error.code,
            message=(
                "not applied, because an earlier operation since the last optimizer step failed: "
                f"{self.window.error.message}"
            ),
        )

    def _out_of_order(self, item: Item) -> ItemError:
        chunk = f", chunk {item.chunk_index}" if isinstance(item, PassItem) else ""
        at = f"{self.applied_seq}" + (f" (chunk {self.next_chunk} of {self.open_seq} is next)" if self.open_seq else "")
        return ItemError(
            code=ErrorCode.OUT_OF_ORDER,
            message=f"the item follows seq {item.prev_seq}{chunk}; this worker's copy of the adapter is at {at}",
        )

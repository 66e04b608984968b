"""The place of an adapter's copy in the adapter's order: which item it admits next. Rules only, without tensors.

Main invariants: an item runs only if the copy is exactly at the item's `prev_seq` (and at its chunk), so no item is
applied twice or skipped. A failed operation consumes its sequence number. A failure closes the gradient window, and
`contract.gradient_windows` says for how long.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.contract.gradient_windows import EMPTY, GradientWindow, WindowRole, batch_of, role_of
from workers.contract.messages import AdapterState, ErrorCode, Item, ItemError, PassItem, RequestBatch


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed operation."""

    seq: int
    error: ItemError


@dataclass(slots=True)
class Progress:
    """The place of one adapter's copy in the adapter's order."""

    applied_seq: int = 0
    num_steps: int = 0
    """Optimizer steps taken."""
    num_datums: int = 0
    """Sequences whose gradients are in the window."""
    open_seq: int | None = None
    """The chunked operation of which some chunks have run and others have not."""
    next_chunk: int = 0
    failed: Failure | None = None
    """The last operation that failed; its later chunks fail with the same error."""
    window: GradientWindow[Failure] = EMPTY

    @classmethod
    def of(cls, state: AdapterState | None, batch: RequestBatch | None) -> Progress:
        """Return the place of a copy that was just installed; `batch`: see `AdapterInstall`."""
        if state is None:
            return cls()
        return cls(
            applied_seq=state.applied_seq,
            num_steps=0 if state.optimizer is None else state.num_steps,
            num_datums=0 if state.gradient is None else state.num_datums,
            window=GradientWindow(None, batch),
        )

    def admit(self, item: Item) -> ItemError | None:
        """Advance over the item; or return why it must not run.

        OUT_OF_ORDER changes nothing. Any other error consumes the item's sequence number.
        """
        if isinstance(item, PassItem):
            if self.failed is not None and self.failed.seq == item.seq and item.chunk_index > 0:
                return self.failed.error
            is_next = item.chunk_index == (self.next_chunk if self.open_seq == item.seq else 0)
        else:
            is_next = self.open_seq is None
        if self.applied_seq != item.prev_seq or self.open_seq not in {None, item.seq} or not is_next:
            return self._out_of_order(item)
        role = role_of(item)
        if item.drop_gradient or role is WindowRole.RESET:
            self.window = EMPTY
            self.num_datums = 0
        self._advance(item)
        closed_by = self.window.closed_by
        if closed_by is None:
            return None
        if self.window.forbids(role, item.seq):
            error = _in_closed_window(closed_by)
            self.fail(item, error)
            return error
        if role is WindowRole.ADD:
            self.window = EMPTY  # it begins a new one
        return None

    def settle(self, item: PassItem, error: ItemError | None) -> ItemError | None:
        """Record the outcome of an admitted pass, in the order of the items; return the error of its result.

        An item that succeeded fails with its operation or its window, if an earlier item of it has failed.
        """
        if self.failed is not None and self.failed.seq == item.seq:
            return self.failed.error
        if item.backward and error is None and self.window.closed_by is not None:
            error = _in_closed_window(self.window.closed_by)
        if error is not None:
            self.fail(item, error)
        elif item.backward:
            self.num_datums += len(item.data)
            self.window = self.window.after(WindowRole.ADD, item.seq, None, item.batch)
        return error

    def must_run_again(self, item: PassItem) -> bool:
        """Return whether an admitted pass ran beside a batch that failed, and lost its gradient with that batch's.

        Then a new window begins, for the pass to run again: nothing of it has been settled.
        """
        if not item.backward or not self.window.is_behind(item.seq):
            return False
        self.window = EMPTY
        return True

    def fail(self, item: Item, error: ItemError) -> None:
        """Record that an admitted item failed: its sequence number is consumed, and its window may close."""
        self.failed = Failure(item.seq, error)
        if self.open_seq == item.seq:
            self.open_seq = None
            self.applied_seq = item.seq
        role = role_of(item)
        self.window = self.window.after(role, item.seq, self.failed, batch_of(item))
        if role is not WindowRole.NONE:
            self.num_datums = 0

    def stepped(self) -> int:
        """Count an optimizer step and end the window; return the number of sequences that were in it."""
        num_datums, self.num_datums = self.num_datums, 0
        self.num_steps += 1
        self.window = EMPTY
        return num_datums

    def loaded(self, num_steps: int) -> None:
        """Record that weights were replaced; the optimizer has taken `num_steps` steps."""
        self.num_steps = num_steps

    def _advance(self, item: Item) -> None:
        if isinstance(item, PassItem) and item.chunk_index + 1 < item.num_chunks:
            self.open_seq = item.seq
            self.next_chunk = item.chunk_index + 1
        else:
            self.open_seq = None
            self.applied_seq = item.seq

    def _out_of_order(self, item: Item) -> ItemError:
        chunk = f", chunk {item.chunk_index}" if isinstance(item, PassItem) else ""
        at = f"{self.applied_seq}" + (f" (chunk {self.next_chunk} of {self.open_seq} is next)" if self.open_seq else "")
        return ItemError(
            code=ErrorCode.OUT_OF_ORDER,
            message=f"the item follows seq {item.prev_seq}{chunk}; this worker's copy of the adapter is at {at}",
        )


def _in_closed_window(closed_by: Failure) -> ItemError:
    return ItemError(
        code=closed_by.error.code,
        message=(
            f"not applied, because an earlier operation since the last optimizer step failed: {closed_by.error.message}"
        ),
    )

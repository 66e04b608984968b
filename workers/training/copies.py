"""The copies of adapters that this worker holds, each with its fence: its place in its adapter's order.

A copy's values are in the bank. Does not depend on batches, passes or how a step is computed.

Main invariants: an item runs only if the copy is exactly at the item's `prev_seq` (and at its chunk), so no item is
applied twice or skipped. A failed operation consumes its sequence number. A closed gradient window
(`contract.training_rules`) leaves no gradient in the bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.bank.bank import Bank
from workers.bank.entries import Row
from workers.bank.state_files import (
    DamagedStateError,
    OtherAdapterError,
    gradient_file,
    optimizer_file,
    read_state,
    weights_file,
)
from workers.contract.messages import (
    AdapterInstall,
    AdapterState,
    ErrorCode,
    Item,
    ItemError,
    LoadItem,
    PassItem,
    SaveItem,
)
from workers.contract.training_rules import WindowRole, role_of


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
    window: Failure | None = None
    """The failure that closed the gradient window; None: the window is open."""

    @classmethod
    def of(cls, state: AdapterState | None) -> Progress:
        """Return the place of a fresh copy (None), or of one installed from a state."""
        if state is None:
            return cls()
        return cls(
            applied_seq=state.applied_seq,
            num_steps=0 if state.optimizer is None else state.num_steps,
            num_datums=0 if state.gradient is None else state.num_datums,
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
            self.window = None
            self.num_datums = 0
        self._advance(item)
        if self.window is None or not role.needs_open_window:
            return None
        error = _in_closed_window(self.window)
        self.fail(item, error)
        return error

    def settle(self, item: PassItem, error: ItemError | None) -> ItemError | None:
        """Record the outcome of an admitted pass, in the order of the items; return the error of its result.

        An item that succeeded fails with its operation or its window, if an earlier item of it has failed.
        """
        if self.failed is not None and self.failed.seq == item.seq:
            return self.failed.error
        if item.backward and error is None and self.window is not None:
            error = _in_closed_window(self.window)
        if error is not None:
            self.fail(item, error)
        elif item.backward:
            self.num_datums += len(item.data)
        return error

    def fail(self, item: Item, error: ItemError) -> None:
        """Record that an admitted item failed: its sequence number is consumed, and its window may close."""
        self.failed = Failure(item.seq, error)
        if self.open_seq == item.seq:
            self.open_seq = None
            self.applied_seq = item.seq
        role = role_of(item)
        self.window = role.closed_by(self.window, self.failed)
        if role is not WindowRole.NONE:
            self.num_datums = 0

    def stepped(self) -> int:
        """Count an optimizer step and end the window; return the number of sequences that were in it."""
        num_datums, self.num_datums = self.num_datums, 0
        self.num_steps += 1
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


class AdapterCopies:
    """All copies of one engine. One thread only."""

    def __init__(self, bank: Bank, max_rank: int, fingerprint: str) -> None:
        """Hold copies of at most `max_rank` in a bank; saved states carry the fingerprint."""
        self._bank = bank
        self._max_rank = max_rank
        self._fingerprint = fingerprint
        self._progress: dict[str, Progress] = {}
        self._broken: dict[str, ItemError] = {}
        """Adapters whose install failed, with the reason, which is the error of their items."""

    # ------------------------------------------------------------------ coming and going

    def install(self, install: AdapterInstall) -> None:
        """Put a copy into the bank, replacing an older one. If that fails, the copy's items fail with the reason."""
        spec, state = install.spec, install.state
        self.remove(spec.adapter_id)
        try:
            if spec.rank > self._max_rank:
                raise OtherAdapterError(f"rank is {spec.rank}; this model takes at most {self._max_rank}")
            layout = self._bank.layout(spec)
            host = None if state is None else read_state(layout, spec, state.weights, state.optimizer, state.gradient)
        except ValueError as error:
            is_damaged = isinstance(error, DamagedStateError | OtherAdapterError) and state is not None
            code = ErrorCode.DATA_LOSS if is_damaged else ErrorCode.INVALID_ARGUMENT
            self._broken[spec.adapter_id] = ItemError(code=code, message=str(error))
            return
        self._bank.add(spec.adapter_id, spec, host)
        self._progress[spec.adapter_id] = Progress.of(state)

    def remove(self, key: str) -> None:
        """Drop a copy, or a sampler version. Unknown keys are ignored."""
        self._bank.remove(key)
        self._progress.pop(key, None)
        self._broken.pop(key, None)

    def clear(self) -> None:
        """Drop everything, sampler versions too."""
        self._bank.clear()
        self._progress.clear()
        self._broken.clear()

    # ------------------------------------------------------------------ the order

    def admit(self, item: Item) -> ItemError | None:
        """Check that the item is next on its copy, and advance over it; see `Progress.admit`."""
        progress = self._progress.get(item.adapter_id)
        if progress is None:
            missing = ItemError(code=ErrorCode.OUT_OF_ORDER, message="this worker does not hold the adapter")
            return self._broken.get(item.adapter_id, missing)
        error = progress.admit(item)
        if error is None and (item.drop_gradient or role_of(item) is WindowRole.RESET):
            self._bank.drop_grad(item.adapter_id)
        return error

    def settle(self, item: PassItem, error: ItemError | None) -> ItemError | None:
        """Record the outcome of an admitted pass; return the error of its result. See `Progress.settle`."""
        error = self._progress[item.adapter_id].settle(item, error)
        if error is not None and item.backward:
            self._bank.drop_grad(item.adapter_id)
        return error

    def fail(self, item: Item, error: ItemError) -> None:
        """Record that an admitted step, save or load failed."""
        self._progress[item.adapter_id].fail(item, error)
        if role_of(item) is WindowRole.STEP:
            self._bank.drop_grad(item.adapter_id)

    # ------------------------------------------------------------------ steps

    def rows(self, adapter_ids: Sequence[str]) -> list[Row]:
        """Return the rows of copies, resident together; valid until the bank loads others."""
        return self._bank.acquire(adapter_ids)

    def next_step(self, adapter_id: str) -> int:
        """Return the number of the copy's next optimizer step, counted from 1."""
        return self._progress[adapter_id].num_steps + 1

    def stepped(self, adapter_id: str) -> int:
        """Record an optimizer step on the copy's row; return the number of sequences in its gradient window."""
        self._bank.entry(adapter_id).note_step()
        return self._progress[adapter_id].stepped()

    # ------------------------------------------------------------------ states

    def save(self, item: SaveItem) -> AdapterState:
        """Return the copy's state, and publish its weights if the item asks for that. Raises NonFiniteGradientError."""
        entry = self._bank.entry(item.adapter_id)
        progress = self._progress[item.adapter_id]
        if item.publish_as:
            self._bank.publish(item.adapter_id, item.publish_as)
        host = self._bank.read(item.adapter_id)
        assert host.weights is not None
        gradient = None
        if item.with_gradient and host.grad is not None:
            assert progress.window is None, "a closed window has no gradient"
            gradient = gradient_file(entry.layout, entry.spec, host.grad)
        return AdapterState(
            weights=weights_file(entry.layout, entry.spec, host.weights),
            optimizer=optimizer_file(entry.layout, entry.spec, host) if item.with_optimizer else None,
            num_steps=progress.num_steps,
            applied_seq=progress.applied_seq,
            fingerprint=self._fingerprint,
            gradient=gradient,
            num_datums=0 if gradient is None else progress.num_datums,
        )

    def load(self, item: LoadItem) -> None:
        """Replace the copy's weights and moments by a checkpoint's. Raises DamagedStateError, OtherAdapterError."""
        entry = self._bank.entry(item.adapter_id)
        optimizer = item.state.optimizer if item.with_optimizer else None
        host = read_state(entry.layout, entry.spec, item.state.weights, optimizer)
        self._bank.replace(item.adapter_id, host)
        self._progress[item.adapter_id].loaded(0 if optimizer is None else item.state.num_steps)


def _in_closed_window(closed_by: Failure) -> ItemError:
    return ItemError(
        code=closed_by.error.code,
        message=(
            f"not applied, because an earlier operation since the last optimizer step failed: {closed_by.error.message}"
        ),
    )

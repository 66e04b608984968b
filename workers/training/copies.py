"""The copies of adapters that this worker holds: install, save, load and remove them, and drop their gradients.

A copy's values are in the bank, its place in the adapter's order is a `Progress`. Does not depend on batches, passes or
how a step is computed. Main invariant: a closed gradient window (`contract.gradient_windows`) leaves no gradient in the
bank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from workers.bank.bank import Bank
from workers.bank.entries import MOMENTS, HostRow, Row
from workers.bank.state_files import (
    DamagedStateError,
    OtherAdapterError,
    gradient_file,
    is_large,
    optimizer_file,
    read_state,
    weights_file,
)
from workers.contract.gradient_windows import WindowRole, role_of
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
from workers.host.allocator import is_out_of_memory
from workers.training.progress import Progress

logger = logging.getLogger(__name__)


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
        spec, state = install.spec, None
        self.remove(spec.adapter_id)
        try:
            state = install.fetch()
            if spec.rank > self._max_rank:
                raise OtherAdapterError(f"rank is {spec.rank}; this model takes at most {self._max_rank}")
            layout = self._bank.layout(spec)
            host = None if state is None else read_state(layout, spec, state.weights, state.optimizer, state.gradient)
        except LookupError:
            return  # it is installed again
        except ValueError as error:
            is_damaged = isinstance(error, DamagedStateError | OtherAdapterError) and state is not None
            code = ErrorCode.DATA_LOSS if is_damaged else ErrorCode.INVALID_ARGUMENT
            self._broken[spec.adapter_id] = ItemError(code=code, message=str(error))
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("no memory for a copy of %s: %s", spec.adapter_id, error)
            message = "the worker has no memory for the adapter's state now; send it again later"
            self._broken[spec.adapter_id] = ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
            return
        self._bank.add(spec.adapter_id, spec, host)
        self._progress[spec.adapter_id] = Progress.of(state, install.batch)

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
            broken = self._broken.get(item.adapter_id, missing)
            if broken.code is ErrorCode.OUT_OF_MEMORY:  # of one item: the next one is out of order, so it is installed
                del self._broken[item.adapter_id]
            return broken
        error = progress.admit(item)
        if error is None and (item.drop_gradient or role_of(item) is WindowRole.RESET):
            self._bank.entry(item.adapter_id).drop_grad()
        return error

    def settle(self, item: PassItem, error: ItemError | None) -> ItemError | None:
        """Record the outcome of an admitted pass; return the error of its result. See `Progress.settle`."""
        error = self._progress[item.adapter_id].settle(item, error)
        if error is not None and item.backward:
            self._bank.entry(item.adapter_id).drop_grad()
        return error

    def must_run_again(self, item: PassItem) -> bool:
        """Return whether an admitted pass lost its gradient with a batch that failed; see `Progress.must_run_again`."""
        return self._progress[item.adapter_id].must_run_again(item)

    def fail(self, item: Item, error: ItemError) -> None:
        """Record that an admitted step, save or load failed."""
        self._progress[item.adapter_id].fail(item, error)
        if role_of(item) is WindowRole.STEP:
            self._bank.entry(item.adapter_id).drop_grad()

    # ------------------------------------------------------------------ steps

    def fit(self, adapter_ids: Collection[str]) -> bool:
        """Return whether copies can be resident together; see `Bank.fits`."""
        return self._bank.fits(adapter_ids)

    def rows(self, adapter_ids: Sequence[str]) -> list[Row]:
        """Return the rows of copies, resident together, with their gradients; valid until the bank loads others."""
        rows = self._bank.acquire(adapter_ids)
        for adapter_id in adapter_ids:
            self._bank.entry(adapter_id).begin_gradient()  # zeros, if no pass has added to it
        return rows

    def next_step(self, adapter_id: str) -> int:
        """Return the number of the copy's next optimizer step, counted from 1."""
        return self._progress[adapter_id].num_steps + 1

    def note_step(self, adapter_id: str) -> None:
        """Record an optimizer step on the copy's row, before other rows are asked for."""
        self._bank.entry(adapter_id).note_step()

    def stepped(self, adapter_id: str) -> int:
        """Record that a step's item is done; return the number of sequences in its gradient window."""
        return self._progress[adapter_id].stepped()

    # ------------------------------------------------------------------ states

    def save(self, item: SaveItem) -> AdapterState:
        """Return the copy's state, and publish its weights if the item asks for that. Raises NonFiniteGradientError."""
        entry = self._bank.entry(item.adapter_id)
        progress = self._progress[item.adapter_id]
        if item.publish_as:
            self._bank.publish(item.adapter_id, item.publish_as)
        host = self._host_row(item)
        gradient = None
        if item.with_gradient and host.grad is not None:
            assert progress.window.closed_by is None, "a closed window has no gradient"
            gradient = gradient_file(entry.layout, entry.spec, host)
        return AdapterState(
            weights=weights_file(entry.layout, entry.spec, host),
            optimizer=optimizer_file(entry.layout, entry.spec, host) if item.with_optimizer else None,
            num_steps=progress.num_steps,
            applied_seq=progress.applied_seq,
            fingerprint=self._fingerprint,
            gradient=gradient,
            num_datums=0 if gradient is None else progress.num_datums,
        )

    def _host_row(self, item: SaveItem) -> HostRow:
        """Return what a state is made of: if its files are made later, a copy, beside which the engine goes on."""
        entry = self._bank.entry(item.adapter_id)
        if not is_large(entry.layout):
            return entry.read()
        names = {"weights"} | (set(MOMENTS) if item.with_optimizer else set())
        return self._bank.host_copy(item.adapter_id, names | ({"grad"} if item.with_gradient else set()))

    def load(self, item: LoadItem) -> None:
        """Replace the copy's weights and moments by a checkpoint's. Raises DamagedStateError, OtherAdapterError."""
        entry = self._bank.entry(item.adapter_id)
        optimizer = item.state.optimizer if item.with_optimizer else None
        host = read_state(entry.layout, entry.spec, item.state.weights, optimizer)
        self._bank.replace(item.adapter_id, host)
        self._progress[item.adapter_id].loaded(0 if optimizer is None else item.state.num_steps)

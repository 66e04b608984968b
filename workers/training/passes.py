"""Packs requests into the rows of one pass, without padding, and runs it: log-probabilities out, gradients into rows.

Does not depend on batches, sequence numbers, or the effect of a failure on an adapter's order. Adapters that the next
batch is expected to need begin to load during a pass: a hint, which changes no result.

Main invariants: a pass has one segment for each request (here: a canonical chunk), its sequences in request order, and
the requests of one adapter in the given order; results do not depend on the place of a request's rows. A request that
cannot be run leaves its neighbours' results and gradients as they would be without it.

Dimensions: T rows of the pass.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from workers.bank.bank import Bank, RowMemoryError
from workers.bank.entries import Row
from workers.contract.messages import Datum, ErrorCode, ItemError, PassItem
from workers.contract.settings import Recompute
from workers.host.allocator import is_out_of_memory, without_holes
from workers.host.free_memory import MemoryShare
from workers.host.uploads import on_device
from workers.model.base_model import BaseModel
from workers.model.segments import Segment
from workers.training.device_logits import DeviceLoss
from workers.training.logits import ChunkedLoss, Part, PassLoss
from workers.training.losses import RequestLoss, prepare
from workers.training.memory import Load, PassRoom
from workers.training.pass_graphs import PassGraphs, PlainTrunk
from workers.training.phase_times import PhaseTimes

logger = logging.getLogger(__name__)

NON_FINITE_LOSS = ItemError(
    code=ErrorCode.NON_FINITE,
    message=(
        "the loss or its gradient is infinite or not a number, and was not applied; look for extreme values in the "
        "loss inputs, or a learning rate that has driven the adapter away"
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A chunk to run, checked."""

    item: PassItem
    loss: RequestLoss

    @property
    def num_tokens(self) -> int:
        """Return the number of its rows."""
        return len(self.loss.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The rows of one pass."""

    tokens: Tensor
    """(T,) int64."""
    positions: Tensor
    """(T,) int64, from 0 in every sequence."""
    lengths: list[int]
    """Tokens of each sequence, in row order."""
    counts: list[int]
    """Sequences of each request, in row order."""
    segments: list[Segment]
    parts: list[Part]
    """Of each request, in the given order; their rows may be in another."""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request: a part, an error, or a part whose numbers are not finite with an error."""

    part: Part | None = None
    error: ItemError | None = None
    engine_s: float = 0.0


class Prefetch:
    """The expected adapters of one bank. One thread only."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self.expected: Sequence[str] = ()
        """The adapters that the next batch is expected to need."""
        self._own: Collection[str] = ()

    def expect(self, expected: Sequence[str], own: Collection[str]) -> None:
        """Set the adapters that the next batch is expected to need, and those that the current batch has."""
        self.expected, self._own = expected, own

    def begin(self) -> None:
        """Begin to load the expected adapters, once all adapters of the batch are resident.

        Copies run one after another, so the batch's own would otherwise queue behind these.
        """
        bank = self._bank
        if all(bank.entry(key).row is not None for key in self._own if key in bank):
            bank.prefetch(self.expected, keep=self._own)

    def end_batch(self) -> None:
        """Begin to load the expected adapters: the batch has ended and needs no others."""
        self._bank.prefetch(self.expected, keep=self._own)


class PassRunner:
    """Runs packed passes on one base model and bank. One thread only."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        memory: MemoryShare,
        recompute: Recompute = "auto",
    ) -> None:
        """Run passes in the part of `memory` that is free when `room` is measured."""
        self.base_model = base_model
        self.room = PassRoom(base_model, memory, recompute)
        self.prefetch = Prefetch(bank)
        self.times = PhaseTimes()
        self._bank = bank
        of_model = base_model.unembedding, base_model.vocab_size
        self._loss: PassLoss = (
            DeviceLoss(*of_model, has_kernels=base_model.scores_by_kernels)
            if base_model.is_deferred
            else ChunkedLoss(*of_model)
        )
        self._graphs = PassGraphs(base_model)

    def measure_room(self, items: Sequence[PassItem]) -> None:
        """Measure the memory for passes of these items, once the adapters of the first are resident.

        A GPU gives memory to the bank's rows when they are loaded, not when they are written. Room is left for those of
        later passes, and for those that are loaded ahead.
        """
        keys = dict.fromkeys(item.adapter_id for item in items if item.adapter_id in self._bank)
        together: list[str] = []
        for key in keys:
            if not self._bank.fits([*together, key]):
                break
            together.append(key)
        with suppress(Exception):  # an adapter that cannot be loaded is an error of its pass, which tries again
            self._bank.acquire(together)
        self.room.measure(self._bank.growth_bytes([*keys, *self.prefetch.expected]))

    def pass_tokens(self, items: Sequence[PassItem], tokens_max: int) -> int:
        """Return the most tokens, up to `tokens_max`, of one pass of some of these items without recomputed layers.

        If the setting is "on": with recomputed layers. A longer request runs solo.
        """
        bank = self._bank
        entries = {item.adapter_id: bank.entry(item.adapter_id) for item in items if item.adapter_id in bank}
        pending = sorted((entry.layout.num_values for entry in entries.values() if entry.has_grad), reverse=True)
        lengths = [len(datum.tokens) for item in items for datum in item.data]

        def load(num_tokens: int) -> Load:
            return Load(
                num_tokens=num_tokens,
                lengths=tuple(set(lengths)),
                num_sequences=min(len(lengths), -(-num_tokens // max(1, min(lengths)))),
                rank=max((entry.layout.padded_rank for entry in entries.values()), default=0),
                num_adapters=min(len(entries), bank.num_slots),
                num_targets=max((_num_targets(datum) for item in items for datum in item.data), default=1),
                pending_values=sum(pending[: bank.num_slots]),
            )

        recompute = self.room.recompute == "on"
        return self.room.num_fitting(load, tokens_max, backward=any(i.backward for i in items), recompute=recompute)

    def _load(self, packed: Packed, rows: Sequence[Row], num_pending: int) -> Load:
        """Return the size of a pass."""
        adapters = {id(row): row.slab.kind.layout for row in rows}
        return Load(
            num_tokens=packed.tokens.shape[0],
            lengths=packed.lengths,
            num_sequences=len(packed.lengths),
            rank=max(layout.padded_rank for layout in adapters.values()),
            num_adapters=len(adapters),
            num_targets=max(part.logprobs.shape[1] for part in packed.parts),
            pending_values=num_pending,
        )

    def checked(self, item: PassItem) -> Request:
        """Return the request of an item. Raises ValueError, with a message for the user, if the item cannot run."""
        longest = self.base_model.max_seq_len
        for index, datum in enumerate(item.data):
            if len(datum.tokens) > longest:
                raise ValueError(f"datum {index} has {len(datum.tokens)} tokens; the model takes at most {longest}")
        return Request(item=item, loss=prepare(item.data, item.loss_fn, item.loss_config, self.base_model.vocab_size))

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run requests of adapters that fit into the bank, forwards and backwards apart; return ordered outcomes."""
        outcomes: dict[int, Outcome] = {}
        for backward in (True, False):
            indices = [i for i, request in enumerate(requests) if request.item.backward == backward]
            chosen = [requests[index] for index in indices]
            if chosen:
                outcomes.update(zip(indices, self._run_or_halve(chosen, backward=backward), strict=True))
        return [outcomes[index] for index in range(len(requests))]

    def _run_or_halve(
        self, requests: Sequence[Request], *, backward: bool, must_recompute: bool = False, is_alone: bool = False
    ) -> list[Outcome]:
        """Run one packed pass. If it fails, run its halves, down to the request that fails solo.

        A request that runs out of memory solo is tried once more without graphs in memory, if there are any, then
        without other adapters on the device (`is_alone`), and then with recomputed layers, if the setting allows that:
        admission counts on all three.
        """
        begin_s = time.perf_counter()
        keys = [request.item.adapter_id for request in requests]
        backup: dict[str, Tensor] = {}
        has_begun = False
        try:
            if backward:
                self._keep_pending_gradients(keys, backup)
            has_begun = True
            num_pending = sum(gradient.numel() for gradient in backup.values())
            parts = self._pass(
                requests, num_pending, backward=backward, must_recompute=must_recompute, is_alone=is_alone
            )
        except Exception as error:
            # An exception's traceback holds the pass's tensors; drop it before the halves are tried.
            failure = pass_error(error)
            logger.warning("a pass of %d requests failed: %s", len(requests), failure.message, exc_info=error)
            del error
            had_graphs = self._graphs.clear()  # they have memory, and one may have the failed pass's
        else:
            engine_s = time.perf_counter() - begin_s
            num_tokens = sum(request.num_tokens for request in requests)
            return [
                Outcome(part, None if part.is_finite else NON_FINITE_LOSS, engine_s * request.num_tokens / num_tokens)
                for request, part in zip(requests, parts, strict=True)
            ]
        for key in set(keys) if backward and has_begun else ():
            self._bank.entry(key).restore_grad(backup.get(key))
        backup.clear()  # what runs next keeps copies of its own
        if len(requests) == 1:
            is_too_large = failure.code is ErrorCode.OUT_OF_MEMORY
            again = partial(self._run_or_halve, requests, backward=backward)
            if is_too_large and had_graphs:
                return again(must_recompute=must_recompute, is_alone=is_alone)
            if is_too_large and not is_alone and self._bank.leave_only(keys):
                return again(must_recompute=must_recompute, is_alone=True)
            if is_too_large and backward and not must_recompute and self.room.recompute == "auto":
                return again(must_recompute=True, is_alone=is_alone)
            return [Outcome(error=failure, engine_s=time.perf_counter() - begin_s)]
        middle = len(requests) // 2
        return [
            *self._run_or_halve(requests[:middle], backward=backward),
            *self._run_or_halve(requests[middle:], backward=backward),
        ]

    def _keep_pending_gradients(self, keys: Sequence[str], backup: dict[str, Tensor]) -> None:
        """Copy the gradients that a pass will add to, in case it must be undone."""
        for key in dict.fromkeys(keys):
            gradient = self._bank.entry(key).read().grad
            if gradient is not None:
                backup[key] = gradient.clone()

    def _pass(
        self, requests: Sequence[Request], num_pending: int, *, backward: bool, must_recompute: bool, is_alone: bool
    ) -> list[Part]:
        """Run forward, losses and backward of all requests at once, and add gradients to the adapters' rows.

        `num_pending` values of gradients have been copied for this pass. `is_alone`: other adapters have left the
        device for it, so none is loaded meanwhile.
        """
        self.times.begin()
        keys = [request.item.adapter_id for request in requests]
        rows = self._bank.acquire(keys)
        is_fused = self.base_model.trains_by_kernels
        # A pass in which only unembeddings are adapted ends at the last hidden states.
        is_deep = backward and any(views is not None for row in rows for views in row.groups.groups[:-1])
        entries = {key: self._bank.entry(key) for key in keys if backward}
        can_set = self.base_model.sets_gradients
        are_set = {key for key, entry in entries.items() if entry.begin_gradient(can_set=can_set)}
        packed = pack(requests, rows, self.base_model.device, by_adapter=is_fused, are_set=are_set)
        load = partial(self._load, packed, rows, num_pending)
        recompute = is_deep and (must_recompute or self.room.must_recompute(load()))
        is_tight = recompute and self.base_model.device.type == "cpu"
        self.times.end("pack")
        with torch.set_grad_enabled(is_deep), without_holes() if is_tight else nullcontext():
            by_graphs = None
            if is_deep and not recompute:
                by_graphs = self._graphs.trunk(packed, lambda: self.room.can_keep(load()))
            trunk = by_graphs or PlainTrunk(self.base_model, packed, recompute=recompute)
            hidden = trunk.forward()
            self.times.end("forward")
            if not is_alone:
                self.prefetch.begin()  # these copies follow the forward, and run while the backward computes
            dhidden = self._loss.run(hidden, packed.parts, backward=backward)
            self.times.end("loss")
            if is_deep:
                assert dhidden is not None
                trunk.backward(dhidden)
                self.times.end("backward")
            self._loss.settle()
            self.times.end("loss")
        return packed.parts


def pack(
    requests: Sequence[Request],
    rows: Sequence[Row],
    device: torch.device,
    *,
    by_adapter: bool = False,
    are_set: Collection[str] = (),
) -> Packed:
    """Concatenate requests; `rows[i]` is the adapter of request i.

    `by_adapter`: see `row_order`. `are_set`: adapters whose gradients the pass is to set (`Segment`).
    """
    tokens, positions, segments = [], [], []
    lengths: list[int] = []
    counts: list[int] = []
    parts: dict[int, Part] = {}
    start = 0
    for index in row_order(requests, rows, by_adapter=by_adapter):
        request, adapter = requests[index], rows[index].groups
        stop = start + request.num_tokens
        for datum in request.item.data:
            tokens.append(datum.tokens)
            positions.append(np.arange(len(datum.tokens)))
        lengths.extend(request.loss.lengths)
        counts.append(len(request.loss.lengths))
        is_set = request.item.adapter_id in are_set
        segments.append(Segment(start, stop, adapter, is_set))
        parts[index] = Part(start=start, stop=stop, adapter=adapter, loss=request.loss, is_set=is_set)
        start = stop
    rows_of_pass = np.stack([np.concatenate(tokens), np.concatenate(positions)]).astype(np.int64)
    on_its_device = on_device(rows_of_pass, device)  # (2, T), together
    return Packed(
        tokens=on_its_device[0],
        positions=on_its_device[1],
        lengths=lengths,
        counts=counts,
        segments=segments,
        parts=[parts[index] for index in range(len(requests))],
    )


def row_order(requests: Sequence[Request], rows: Sequence[Row], *, by_adapter: bool = False) -> list[int]:
    """Return indices of requests in the order of their rows: requests that can be one batch are adjacent.

    First each adapter's first request, then each one's second, and so on, so that gradients are added in order. With
    `by_adapter` each adapter's requests are adjacent, for kernels that take adapters of any number of rows at once.
    """
    rounds: Counter[int] = Counter()
    keys: list[tuple[float, ...]] = []
    for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
        adapter = row.groups
        if by_adapter:
            keys.append((row.slab.number, adapter.slot, index))
        else:
            place = (row.slab.number, adapter.scaling)
            keys.append((rounds[id(row)], *place, request.num_tokens, adapter.slot, index))
        rounds[id(row)] += 1
    return [int(key[-1]) for key in sorted(keys)]


def _num_targets(datum: Datum) -> int:
    targets = datum.loss_inputs.get("target_tokens", datum.tokens)
    return targets.shape[1] if targets.ndim == 2 else 1


def pass_error(error: Exception) -> ItemError:
    """Return the error of a request whose packed pass failed. The request itself was checked before."""
    if isinstance(error, RowMemoryError):
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=str(error))
    if is_out_of_memory(error):
        message = "there is not enough memory for this alone; send shorter sequences"
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
    return ItemError(code=ErrorCode.INTERNAL, message="the worker failed to run this; its log has the reason")

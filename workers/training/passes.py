"""One packed pass after another: requests in, log-probabilities out, gradients added to the adapters' rows.

Knows the base model, the bank, packing and the losses; not batches, seqs, or what a failure does to an adapter's order.
Memory decides, never bits: how many tokens are one pass, and whether layers run again in the backward.

Main invariant: a request that cannot be run leaves its neighbours' results and gradients as they would be without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from workers.bank.bank import Bank, Row
from workers.contract.messages import Datum, ErrorCode, ItemError, PassItem
from workers.host.allocator import is_out_of_memory, without_holes
from workers.model.base_model import BaseModel
from workers.rows import rank_class
from workers.training.device_logits import DeviceLoss
from workers.training.logits import ChunkedLoss, Part, PassLoss
from workers.training.losses import prepare
from workers.training.memory import Load, PassMemory, Recompute
from workers.training.packing import Packed, Request, pack

logger = logging.getLogger(__name__)

USED_FRACTION = 0.8
"""Of the memory that is free, what the tensors of a pass may take: between them the heap has gaps (see
`scripts/bench/memory.py`), kernels have buffers of their own, and others go on working."""


@dataclass(slots=True)
class Outcome:
    """How one request went: it has a part or an error, or a part whose numbers are not finite and an error."""

    part: Part | None = None
    error: ItemError | None = None
    engine_s: float = 0.0


class PassRunner:
    """Runs packed passes on one base model and bank. One thread only."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        clock: Callable[[], float],
        free_bytes: Callable[[], int],
        recompute: Recompute = "auto",
    ) -> None:
        """`free_bytes` is what this engine may still allocate, measured when it is called."""
        self.base_model = base_model
        self.bank = bank
        make_loss = DeviceLoss if base_model.is_deferred else ChunkedLoss
        self._loss: PassLoss = make_loss(base_model.unembedding, base_model.vocab_size)
        self._clock = clock
        self._free_bytes = free_bytes
        self._recompute = recompute
        self._memory = PassMemory(
            base_model.model,
            base_model.config,
            base_model.group_shapes,
            is_deferred=base_model.is_deferred,
            makes_masks=base_model.attend_packed([1], [1]).makes_masks,
        )
        self._room_bytes = 0
        self.beside: Callable[[], None] = lambda: None
        """Work for the host in every pass, while the device computes the forward that it has been handed."""
        self.measure()

    def measure(self) -> None:
        """Look how much memory passes may take from now on."""
        self._room_bytes = int(USED_FRACTION * self._free_bytes())

    def fitting_tokens(self) -> int | None:
        """The longest sequence that can be trained in the memory measured last, by an adapter of the largest rank.

        None: anything that the model takes. So much and no more is promised for one canonical chunk, too.
        """
        longest = max(self.base_model.max_seq_len, self.base_model.chunk_tokens)
        rank = rank_class(self.base_model.max_rank)
        alone = self._memory.num_fitting(
            self._room_bytes,
            lambda num_tokens: Load(num_tokens=num_tokens, lengths=[num_tokens], rank=rank),
            longest,
            backward=True,
            recompute=self._recompute != "off",
        )
        return None if alone == longest else alone

    def pass_tokens(self, items: Sequence[PassItem], tokens_max: int) -> int:
        """The most tokens, up to `tokens_max`, of one pass of some of these that keeps what layers compute.

        With "on", of one that does not. A request that is longer runs alone.
        """
        entries = {item.adapter_id: self.bank.entry(item.adapter_id) for item in items if item.adapter_id in self.bank}
        pending = sorted((entry.layout.num_values for entry in entries.values() if entry.has_grad), reverse=True)
        lengths = tuple({len(datum.tokens) for item in items for datum in item.data})

        def load(num_tokens: int) -> Load:
            return Load(
                num_tokens=num_tokens,
                lengths=lengths,
                rank=max((entry.layout.padded_rank for entry in entries.values()), default=0),
                num_adapters=min(len(entries), self.bank.num_slots),
                num_targets=max((_num_targets(datum) for item in items for datum in item.data), default=1),
                pending_values=sum(pending[: self.bank.num_slots]),
            )

        backward = any(item.backward for item in items)
        recompute = self._recompute == "on"
        return self._memory.num_fitting(self._room_bytes, load, tokens_max, backward=backward, recompute=recompute)

    def _must_recompute(self, packed: Packed, rows: Sequence[Row], num_pending: int) -> bool:
        """Whether layers of this pass run again in its backward."""
        if self._recompute != "auto":
            return self._recompute == "on"
        adapters = {id(row): row.slab.layout for row in rows}
        load = Load(
            num_tokens=packed.tokens.shape[0],
            lengths=packed.lengths,
            rank=max(layout.padded_rank for layout in adapters.values()),
            num_adapters=len(adapters),
            num_targets=max(part.logprobs.shape[1] for part in packed.parts),
            pending_values=num_pending,
        )
        return self._memory.peak_bytes(load, backward=True) > self._room_bytes

    def checked(self, item: PassItem) -> Request:
        """Raises ValueError, with a message for the user, unless the item can run."""
        longest = self.base_model.max_seq_len
        for index, datum in enumerate(item.data):
            if len(datum.tokens) > longest:
                raise ValueError(f"datum {index} has {len(datum.tokens)} tokens; the model takes at most {longest}")
        return Request(item=item, loss=prepare(item.data, item.loss_fn, item.loss_config, self.base_model.vocab_size))

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Run requests of at most `num_slots` adapters, forwards and backwards apart; outcomes in their order."""
        outcomes: dict[int, Outcome] = {}
        for backward in (True, False):
            indices = [i for i, request in enumerate(requests) if request.item.backward == backward]
            chosen = [requests[index] for index in indices]
            if chosen:
                outcomes.update(zip(indices, self._halving(chosen, backward=backward), strict=True))
        return [outcomes[index] for index in range(len(requests))]

    def _halving(self, requests: Sequence[Request], *, backward: bool, must_recompute: bool = False) -> list[Outcome]:
        """One packed pass. If it cannot be done, its halves, down to the request that cannot be done alone.

        One that finds no memory alone is tried once more with its layers run twice, if that may be chosen: whoever let
        it in has counted on that.
        """
        begin_s = self._clock()
        keys = [request.item.adapter_id for request in requests]
        backup: dict[str, torch.Tensor] = {}
        has_begun = False
        try:
            if backward:
                self._keep_pending_gradients(keys, backup)
            has_begun = True
            num_pending = sum(gradient.numel() for gradient in backup.values())
            parts = self._pass(requests, num_pending, backward=backward, must_recompute=must_recompute)
        except Exception as error:
            # An exception's traceback holds the pass's tensors; they must go before the halves are tried.
            failure = failure_of(error)
            logger.warning("a pass of %d requests failed: %s", len(requests), failure.message, exc_info=error)
            del error
        else:
            engine_s = self._clock() - begin_s
            num_tokens = sum(request.num_tokens for request in requests)
            return [
                Outcome(part, None if part.is_finite else _non_finite(), engine_s * request.num_tokens / num_tokens)
                for request, part in zip(requests, parts, strict=True)
            ]
        for key in set(keys) if backward and has_begun else ():
            self.bank.restore_grad(key, backup.get(key))
        if len(requests) == 1:
            if (
                failure.code is ErrorCode.OUT_OF_MEMORY
                and backward
                and not must_recompute
                and self._recompute == "auto"
            ):
                return self._halving(requests, backward=True, must_recompute=True)
            return [Outcome(error=failure, engine_s=self._clock() - begin_s)]
        middle = len(requests) // 2
        return [
            *self._halving(requests[:middle], backward=backward),
            *self._halving(requests[middle:], backward=backward),
        ]

    def _keep_pending_gradients(self, keys: Sequence[str], backup: dict[str, torch.Tensor]) -> None:
        """Copy the gradients that a pass will add to, for the case that it must be undone."""
        for key in dict.fromkeys(keys):
            gradient = self.bank.read(key).grad
            if gradient is not None:
                backup[key] = gradient.clone()

    def _pass(
        self, requests: Sequence[Request], num_pending: int, *, backward: bool, must_recompute: bool
    ) -> list[Part]:
        """Forward, losses and backward of all requests at once; gradients are added to the adapters' rows.

        `num_pending` values of gradients have been copied for this pass.
        """
        keys = [request.item.adapter_id for request in requests]
        rows = self.bank.acquire(keys)
        is_fused = self.base_model.current.fuse is not None
        packed = pack(requests, rows, self.base_model.device, by_adapter=is_fused)
        if backward:
            for key in keys:
                self.bank.entry(key).has_grad = True
        # A pass in which only unembeddings are adapted ends at the last hidden states.
        is_deep = backward and any(views is not None for row in rows for views in row.groups.groups[:-1])
        recompute = is_deep and (must_recompute or self._must_recompute(packed, rows, num_pending))
        is_tight = recompute and self.base_model.device.type == "cpu"
        with torch.set_grad_enabled(is_deep), without_holes() if is_tight else nullcontext():
            attend = self.base_model.attend_packed(packed.lengths, packed.counts)
            hidden = self.base_model.forward(
                packed.tokens, packed.positions, packed.segments, attend, recompute=recompute
            )
            self.beside()  # copies from here on follow the forward, and run beside the backward
            dhidden = self._loss.run(hidden.detach(), packed.parts, backward=backward)
            if is_deep:
                torch.autograd.backward(hidden, dhidden)
            self._loss.settle()
        return packed.parts


def _num_targets(datum: Datum) -> int:
    targets = datum.loss_inputs.get("target_tokens", datum.tokens)
    return targets.shape[1] if targets.ndim == 2 else 1


def _non_finite() -> ItemError:
    return ItemError(
        code=ErrorCode.NON_FINITE,
        message=(
            "the loss or its gradient is infinite or not a number, and was not applied; look for extreme values in the "
            "loss inputs, or a learning rate that has driven the adapter away"
        ),
    )


def failure_of(error: Exception) -> ItemError:
    """What an item answers when an error that is no fault of the user's ended it. Never a stack or a path."""
    if is_out_of_memory(error):
        message = "there is not enough memory for this alone; send shorter sequences"
        return ItemError(code=ErrorCode.OUT_OF_MEMORY, message=message)
    return ItemError(code=ErrorCode.INTERNAL, message="the worker failed to run this; its log has the reason")

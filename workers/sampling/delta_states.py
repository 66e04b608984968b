"""The states of a hybrid's linear attention for all samples: which slots have which, and the passes that move them on.

A layer of linear attention keeps no keys and values, but a state for each sequence, however long it is, and the last
inputs of its convolution. A slot has those of all layers. A state changes with every token, so a pass reads one slot
and writes another: a pass that failed can be run again, and samples that go on from one prompt read the same slot.

A prompt and each sequence are owners, with places for two slots: the valid one, and the one that a pass writes. A slot
that no owner holds may stay as a *checkpoint*, the state at the end of a shared block of prompt tokens, until it is
needed otherwise: the least recently used leaves first.

Does not depend on requests, or on the rule itself (`model.delta_rule`).

Main invariants: owners' places together are never more than the slots, so an owner can always take a slot for a place.
A held slot is written only by the pass that its owner took it for.

Dimensions: S sequences, N slots, W weights of a convolution, C values before it, H key heads, G value heads for each
key head, E key head dimension, P value head dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.host.uploads import on_device
from workers.model.base_model import BaseModel
from workers.model.delta_rule import DeltaInputs, DeltaWeights, chunked, step
from workers.model.packed_delta import CHUNK_TOKENS, chunk_tokens, group_values_max
from workers.sampling.delta_steps import can_step, step_slots
from workers.sampling.kv_cache import Prefix

OWNER_PLACES = 2
"""Slots that an owner may hold at a time."""


class StatePool:
    """The slots 0 to `num_slots` - 1; none for a model without linear attention. Used by one thread only."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.owner_places = OWNER_PLACES if num_slots else 0
        self._free = list(reversed(range(num_slots)))
        self.untouched = set(self._free)
        """Slots that were never taken, so that a CPU has not given them memory yet."""
        self.num_places = 0
        """Of all owners."""
        self._holders = [0] * num_slots
        self._prefix_of: dict[int, Prefix] = {}
        self._idle: OrderedDict[Prefix, None] = OrderedDict()
        """Checkpoints that no owner holds, the least recently used first."""

    def reserve(self, num_owners: int) -> bool:
        """Give places to owners, to all or to none; return whether there were enough."""
        wanted = self.num_places + num_owners * self.owner_places
        if wanted > self.num_slots:
            return False
        self.num_places = wanted
        return True

    def reserve_spare(self) -> bool:
        """Give one more place to an owner; return whether there was one."""
        has_room = self.num_places < self.num_slots
        self.num_places += has_room
        return has_room

    def unreserve(self, num_places: int) -> None:
        """Withdraw places that hold no slot."""
        assert 0 <= num_places <= self.num_places
        self.num_places -= num_places

    def take(self) -> int:
        """Return a slot for a place, held once."""
        if not self._free:
            self.forget(next(iter(self._idle)))
        slot = self._free.pop()
        self.untouched.discard(slot)
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Hold a checkpoint's slot, for a place."""
        if not self._holders[slot]:
            del self._idle[self._prefix_of[slot]]
        self._holders[slot] += 1

    def release(self, slot: int) -> None:
        """Undo `take` or `hold`; the place stays its owner's."""
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        if slot in self._prefix_of:
            self._idle[self._prefix_of[slot]] = None
        else:
            self._free.append(slot)

    def keep(self, prefix: Prefix, slot: int) -> bool:
        """Make a held slot the checkpoint of a shared block; return False if it has one, or is not found any more."""
        if prefix.state is not None or prefix.is_dropped:
            return False
        prefix.state = slot
        self._prefix_of[slot] = prefix
        return True

    def forget(self, prefix: Prefix) -> None:
        """Drop the checkpoint of a shared block, if it has one; its owners keep the slot."""
        if prefix.state is None:
            return
        slot, prefix.state = prefix.state, None
        del self._prefix_of[slot]
        if prefix in self._idle:
            del self._idle[prefix]
            self._free.append(slot)


class StateOwner:
    """The state of one prompt or sequence. Its places were reserved before."""

    def __init__(self, pool: StatePool) -> None:
        self._pool = pool
        self._num_places = pool.owner_places
        self.current: int | None = None
        """The slot with the state after the last computed token; None: nothing is computed."""
        self._next: int | None = None
        self._spare: int | None = None

    def adopt(self, slot: int) -> None:
        """Go on from a checkpoint."""
        self._release_current()
        self._pool.hold(slot)
        self.current = slot

    def writable(self) -> int:
        """Return the slot that the next pass writes; the same one again after a failed pass."""
        if self._next is None:
            self._next = self._pool.take()
        return self._next

    def commit(self) -> None:
        """Go on from the slot that the last pass wrote."""
        assert self._next is not None, "no pass wrote a state"
        self._release_current()
        self.current, self._next = self._next, None

    def spare(self) -> int | None:
        """Return one more slot that the next pass writes, for a checkpoint; the same one again after a failed pass.

        None: all places are taken.
        """
        if self._spare is None and self._pool.reserve_spare():
            self._spare = self._pool.take()
        return self._spare

    def keep_spare(self, prefix: Prefix | None) -> Prefix | None:
        """Make the slot of `spare`, if there is one, the checkpoint of a shared block, and give it back.

        Return the block if it has the slot now. None: only give the slot back.
        """
        if self._spare is None:
            return None
        is_kept = prefix is not None and self._pool.keep(prefix, self._spare)
        self._pool.release(self._spare)
        self._pool.unreserve(1)
        self._spare = None
        return prefix if is_kept else None

    def end_writing(self) -> None:
        """Give back the second place: the state is final."""
        assert self._next is None
        self._pool.unreserve(1)
        self._num_places -= 1

    def close(self, *, keeps_places: bool = False) -> None:
        """Release all slots; and the places, unless another owner follows in them."""
        self._release_current()
        self.keep_spare(None)
        if self._next is not None:
            self._pool.release(self._next)
            self._next = None
        if not keeps_places:
            self._pool.unreserve(self._num_places)
            self._num_places = 0

    def _release_current(self) -> None:
        if self.current is not None:
            self._pool.release(self.current)
            self.current = None


@dataclass(frozen=True, slots=True)
class StateMove:
    """How a pass moves one state on."""

    read: int | None
    """None: the state of zeros, with which a prompt begins."""
    write: int
    checkpoint: tuple[int, int] | None = None
    """A position inside of the rows, counted from the first of them, and the slot for the state there."""


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Consecutive rows of a pass that are a prompt's tokens, from a multiple of the largest chunk size on."""

    start: int
    stop: int
    move: StateMove


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A layer's memory of all slots, to read and write."""

    inputs: Tensor
    """(N, W - 1, C): the last inputs of the convolutions."""
    states: Tensor
    """(N, H, G, E, P), fp32."""
    widths: Sequence[int]
    """Of queries, keys and values among the C."""

    def split(self, inputs: Tensor) -> Sequence[Tensor]:
        """Return the queries', keys' and values' part of inputs (..., C)."""
        parts: Sequence[Tensor] = inputs.split(list(self.widths), -1)
        return parts


class DeltaStates:
    """The memory of all slots. On a CPU, slots that were never written take no memory."""

    def __init__(self, model: BaseModel, num_slots: int) -> None:
        """Allocate the slots of a hybrid; raises the library's error if there is not enough memory."""
        shape = model.delta_shape
        assert shape is not None
        self._widths = shape.conv_widths
        sizes = (len(model.delta_layers), num_slots)
        heads = (shape.num_key_heads, shape.heads_per_key, shape.key_dim, shape.value_dim)
        self.device = model.device
        self.has_kernel = can_step(model.device, model.dtype, shape)
        """Whether next tokens are computed by a kernel of our own."""
        self._inputs = torch.empty(*sizes, shape.history, sum(self._widths), dtype=model.dtype, device=model.device)
        self._states = torch.empty(*sizes, *heads, dtype=torch.float32, device=model.device)

    def begin(self, chunks: Sequence[StateChunk], tokens: Sequence[tuple[int, StateMove]]) -> StepDelta:
        """Return the linear attention of a pass with these chunks, and next tokens at these rows."""
        return StepDelta(self, chunks, tokens)

    def layer(self, layer: int) -> LayerStates:
        """Return a layer's memory."""
        return LayerStates(self._inputs[layer], self._states[layer], self._widths)


def state_bytes(model: BaseModel) -> int:
    """Return the bytes of a slot; 0 for a model without linear attention."""
    shape = model.delta_shape
    if shape is None:
        return 0
    inputs = shape.history * sum(shape.conv_widths) * int(model.dtype.itemsize)
    states = shape.num_value_heads * shape.key_dim * shape.value_dim * int(torch.float32.itemsize)
    return len(model.delta_layers) * (inputs + states)


class StepDelta:
    """Implements `model.packed_delta.Recur` for one pass."""

    def __init__(
        self, states: DeltaStates, chunks: Sequence[StateChunk], tokens: Sequence[tuple[int, StateMove]]
    ) -> None:
        self._memory = states
        self._chunks = chunks
        self._rows, self._reads, self._writes = (
            on_device(part, states.device)
            for part in (
                [row for row, _ in tokens],
                [move.read for _, move in tokens if move.read is not None],
                [move.write for _, move in tokens],
            )
        )
        assert len(self._reads) == len(self._rows), "a sequence without its prompt's state"

    def __call__(self, layer: int, weights: DeltaWeights, inputs: DeltaInputs) -> Tensor:
        """See `Recur`."""
        memory = self._memory.layer(layer)
        is_all = len(self._rows) == len(inputs.gate)
        out = (torch.empty_like if is_all else torch.zeros_like)(inputs.gate)  # (T, V)
        for chunk in self._chunks:
            self._prompt(chunk, weights, inputs, memory, out)
        if self._memory.has_kernel and len(self._rows):
            places = self._rows, self._reads, self._writes
            step_slots(out, inputs, weights, (memory.inputs, memory.states), places)
            return out
        num_together = max(1, group_values_max(self._memory.device) // memory.states[0].numel())
        for start in range(0, len(self._rows), num_together):
            self._next(slice(start, start + num_together), weights, inputs, memory, out)
        return out

    def _next(
        self, tokens: slice, weights: DeltaWeights, inputs: DeltaInputs, memory: LayerStates, out: Tensor
    ) -> None:
        """Compute some of the next tokens, (S,)."""
        rows, reads, writes = (part[tokens] for part in (self._rows, self._reads, self._writes))
        own = DeltaInputs.of([tensor.index_select(0, rows) for tensor in inputs.tensors()])
        before, state = memory.inputs.index_select(0, reads), memory.states.index_select(0, reads)
        result = step(own, weights, memory.split(before), state)
        out.index_copy_(0, rows, result.to(out.dtype))
        memory.states.index_copy_(0, writes, state)
        memory.inputs.index_copy_(0, writes, torch.cat([before[:, 1:], torch.cat(list(own.qkv), -1).unsqueeze(1)], 1))

    def _prompt(
        self, chunk: StateChunk, weights: DeltaWeights, inputs: DeltaInputs, memory: LayerStates, out: Tensor
    ) -> None:
        """Compute a prompt's tokens: whole chunks first, then the rest in a chunk of its own size."""
        history, states = memory.inputs, memory.states
        move, length = chunk.move, chunk.stop - chunk.start
        before = torch.zeros_like(history[0]) if move.read is None else history[move.read]  # (W - 1, C)
        state = (torch.zeros_like(states[0]) if move.read is None else states[move.read]).unsqueeze(0)
        own = [tensor[chunk.start : chunk.stop] for tensor in inputs.tensors()]
        rows = torch.cat([before, torch.cat(own[:3], -1)])  # (W - 1 + tokens, C)
        slots = {length: move.write} | ({} if move.checkpoint is None else dict([move.checkpoint]))
        whole = length // CHUNK_TOKENS[-1] * CHUNK_TOKENS[-1]
        for start, stop in pairwise(sorted({0, whole, *slots})):
            size = chunk_tokens(stop - start)
            padding = -(stop - start) % size
            windows = F.pad(rows[start : stop + len(before)], (0, 0, 0, padding))
            windows = windows.unfold(0, len(before) + size, size).transpose(1, 2)  # (chunks, W - 1 + size, C)
            others = [F.pad(part[start:stop], (0, 0, 0, padding)).view(len(windows), size, -1) for part in own[3:]]
            is_token = None
            if padding:
                is_token = (torch.arange(len(windows) * size, device=rows.device) < stop - start).view(-1, size)
            made = DeltaInputs.of([*memory.split(windows), *others])
            result, last = chunked(made, weights, is_token, [1] * len(windows), state)
            assert last is not None
            state = last
            out[chunk.start + start : chunk.start + stop] = result.flatten(0, 1)[: stop - start]
            if stop in slots:
                states[slots[stop]], history[slots[stop]] = state[0], rows[stop : stop + len(before)]

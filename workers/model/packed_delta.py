"""The gated delta rule over packed rows: whole sequences, one after another, each from a state of zeros.

Sequences are cut into chunks at positions of their own, with a chunk size that follows from their own length. Groups of
whole sequences with one chunk size are computed at a time, as many as the processor's cache holds, and far more on a
GPU: `delta_rule` takes the first chunks of all of them, then the second ones, and so on.

The backward keeps the inputs alone and computes each group again: the tensors of a chunk are many times larger.

Does not depend on models, adapters or tenants.

Main invariant: a sequence's output and gradient depend only on its own rows. Rows of no sequence get zeros.

Dimensions: T rows of the pass, N chunks of a group, C tokens of a chunk, W weights of a convolution, V values of all
value heads together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.host.uploads import on_device
from workers.model.delta_rule import DeltaInputs, DeltaShape, DeltaWeights, chunked

CHUNK_TOKENS = (16, 32, 64)
"""Chunk sizes. A sequence has the smallest that holds it whole, or else the largest."""
GROUP_VALUES = 1 << 20
"""Values of a group's queries, keys or values, of all value heads: 4 MB, about a share of the processor's last cache.
With 16 value heads of 128 these are 8 chunks of 64."""
DEVICE_GROUP_VALUES = 1 << 24
"""The same on a GPU, where each group costs hundreds of launches: with 32 value heads of 128 these are 4,096 tokens,
whose backward takes 2 GB."""
ALONE = 0
"""The same where each sequence is a group."""


class Recur(Protocol):
    """The linear attention of a pass: the seam between the base model and its callers, beside `attention.Attend`."""

    def __call__(self, layer: int, weights: DeltaWeights, inputs: DeltaInputs) -> Tensor:
        """Return the results (T, V) of what a layer's linears give, (T, ...) each; `layer` counts such layers from 0.

        T includes padding rows at the end, whose results are ignored but must be finite.
        """


def chunk_tokens(length: int) -> int:
    """Return the chunk size of a sequence."""
    return next((size for size in CHUNK_TOKENS if length <= size), CHUNK_TOKENS[-1])


def group_values_max(device: torch.device) -> int:
    """Return the values of a group's queries, keys or values at most, unless a single sequence has more."""
    return GROUP_VALUES if device.type == "cpu" else DEVICE_GROUP_VALUES


def group_values(shape: DeltaShape, num_tokens: int, lengths: Sequence[int], values_max: int, *, backward: bool) -> int:
    """Return the values in fp32 that the rule of a pass takes for one group, besides its inputs and results.

    At most, and by operations of torch at most a fifth more than it takes: a count of all tensors for several shapes.
    `lengths`: of the sequences; each length once is enough. `values_max`: see `group_values_max`.
    """
    padded = {length: -(-length // chunk_tokens(length)) * chunk_tokens(length) for length in lengths}
    all_tokens = max(num_tokens * tokens / length for length, tokens in padded.items())
    most = max(values_max // shape.token_values, *padded.values())
    heads, chunk = shape.num_value_heads, chunk_tokens(max(lengths))
    of_rows, of_pairs, of_heads = (8, 8, 6) if backward else (4, 4, 5)
    of_token = of_rows * sum(shape.conv_widths) + heads * (
        of_pairs * chunk + of_heads * (shape.key_dim + shape.value_dim)
    )
    return int(min(all_tokens, most)) * of_token


Rows = Tensor | slice
"""Rows of a tensor: a slice if they follow each other, which is read without a copy and written as one block."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a group, and where their rows are in the pass. Positions count the flat rows of chunks."""

    size: int
    """C."""
    counts: list[int]
    """Sequences with a first chunk, with a second one, and so on; see `delta_rule.chunked`."""
    rows: Tensor
    """(N, W - 1 + C) int64: each chunk's rows of the pass, after those of the tokens before it; any where is none."""
    missing: Tensor
    """Positions in `rows` where there is none."""
    is_token: Tensor | None
    """(N, C) whether there is a row; None: everywhere."""
    tokens: Rows
    """The rows of the pass of (N, C); any where is none."""
    own: tuple[Rows, Rows]
    """Positions of the chunks' tokens in (N, C), and their rows of the pass, which rise."""
    before: tuple[Tensor, Tensor]
    """Positions of the tokens before the chunks in (N, W - 1), and their rows of the pass."""

    def gather(self, inputs: DeltaInputs) -> DeltaInputs:
        """Return the chunks' inputs; those of the pass, or copies."""
        num, width = self.rows.shape
        qkv = [rows.index_select(0, self.rows.view(-1)).index_fill_(0, self.missing, 0.0) for rows in inputs.qkv]
        others = [_taken(rows, self.tokens) for rows in inputs.tensors()[3:]]
        return DeltaInputs.of([*(r.view(num, width, -1) for r in qkv), *(r.view(num, self.size, -1) for r in others)])

    def gather_tokens(self, rows: Tensor) -> Tensor:
        """Return the tokens' values (N, C, F), of rows of the pass (T, F), with zeros at padding."""
        own = _taken(rows, self.tokens).view(len(self.rows), self.size, -1)
        return own if self.is_token is None else own.masked_fill(~self.is_token.unsqueeze(-1), 0.0)

    def scatter(self, chunks: Tensor, rows: Tensor) -> None:
        """Copy the tokens' results (N, C, F) to rows of the pass (T, F)."""
        positions, own = self.own
        values = _taken(chunks.reshape(-1, chunks.shape[-1]), positions)
        if isinstance(own, slice):
            rows[own].copy_(values)
        else:
            rows.index_copy_(0, own, values)

    def scatter_gradients(self, gradients: DeltaInputs, rows: DeltaInputs) -> None:
        """Set `rows`, of the pass, to the gradients of what `gather` returned. A token's own chunk counts first."""
        positions, before = self.before
        for part, target in zip(gradients.tensors(), rows.tensors(), strict=True):
            history = part.shape[1] - self.size
            self.scatter(part[:, history:], target)
            if history and len(before):
                target.index_add_(0, before, part[:, :history].reshape(-1, part.shape[2]).index_select(0, positions))


def _taken(rows: Tensor, which: Rows) -> Tensor:
    """Return rows of (T, F): a view if they follow each other, or else a copy."""
    return rows[which] if isinstance(which, slice) else rows.index_select(0, which)


class PackedDelta:
    """Implements `Recur` for whole sequences, one after another from row 0. Differentiable."""

    def __init__(self, lengths: Sequence[int], device: torch.device, values_max: int | None = None) -> None:
        """Take the values of a group at most; None: `group_values_max`."""
        self._lengths = lengths
        self._device = device
        self._values_max = group_values_max(device) if values_max is None else values_max
        self._num_rows = sum(lengths)
        self._groups: dict[tuple[int, int], list[Chunks]] = {}
        """By what cuts them: the values of a token, and W - 1. All layers of most models have the same."""

    def __call__(self, layer: int, weights: DeltaWeights, inputs: DeltaInputs) -> Tensor:
        """See `Recur`."""
        groups = self._cut(weights)
        if torch.is_grad_enabled():
            out: Tensor = _PackedFunction.apply(weights, groups, self._num_rows, *inputs.tensors())  # type: ignore[no-untyped-call]
            return out
        return _run(weights, groups, self._num_rows, inputs)

    def _cut(self, weights: DeltaWeights) -> list[Chunks]:
        token_values = weights.shape.token_values
        key = token_values, weights.shape.history
        if key not in self._groups:
            starts = np.cumsum([0, *self._lengths])[:-1].tolist()
            sequences = list(zip(starts, self._lengths, strict=True))
            self._groups[key] = [
                _chunks(own, size, weights.shape.history, self._device)
                for size, own in _grouped(sequences, self._values_max // token_values)
            ]
        return self._groups[key]


def _grouped(sequences: Sequence[tuple[int, int]], tokens_max: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield chunk sizes, and sequences (start, length) that are computed together: the longest first.

    A group has at most `tokens_max` tokens, padding included, or a single sequence.
    """
    ordered = sorted(sequences, key=lambda sequence: (-chunk_tokens(sequence[1]), -sequence[1], sequence[0]))
    for size, alike in groupby(ordered, key=lambda sequence: chunk_tokens(sequence[1])):
        group: list[tuple[int, int]] = []
        num_tokens = 0
        for start, length in alike:
            padded = -(-length // size) * size
            if group and num_tokens + padded > tokens_max:
                yield size, group
                group, num_tokens = [], 0
            group.append((start, length))
            num_tokens += padded
        yield size, group


def _chunks(sequences: Sequence[tuple[int, int]], size: int, history: int, device: torch.device) -> Chunks:
    """Return the chunks of sequences (start, length), the longest first."""
    begins, lengths = (np.array(part, np.int64) for part in zip(*sequences, strict=True))
    num_chunks = -(-lengths // size)
    counts = [int((num_chunks > number).sum()) for number in range(int(num_chunks[0]))]
    of_chunk = np.concatenate([np.arange(count) for count in counts])  # (N,)
    numbers = np.repeat(np.arange(len(counts)), counts)
    first = begins[of_chunk][:, None]
    rows = first + (numbers * size)[:, None] + np.arange(-history, size)  # (N, W - 1 + C)
    exists = (rows >= first) & (rows < first + lengths[of_chunk][:, None])
    is_token = exists[:, history:]

    of_tokens = rows[:, history:].ravel()
    positions = np.flatnonzero(is_token)
    positions = positions[np.argsort(of_tokens[positions])]
    before = np.flatnonzero(exists[:, :history])
    return Chunks(
        size=size,
        counts=counts,
        rows=on_device(np.where(exists, rows, first), device),
        missing=on_device(np.flatnonzero(~exists), device),
        is_token=None if is_token.all() else on_device(is_token, device),
        tokens=_rows(np.where(is_token, rows[:, history:], first).ravel(), device),
        own=(_rows(positions, device), _rows(of_tokens[positions], device)),
        before=(on_device(before, device), on_device(rows[:, :history].ravel()[before], device)),
    )


def _rows(numbers: NDArray[np.int64], device: torch.device) -> Rows:
    """Return row numbers on a device, or as a slice."""
    begin, end = int(numbers[0]), int(numbers[0]) + len(numbers)
    return slice(begin, end) if np.array_equal(numbers, np.arange(begin, end)) else on_device(numbers, device)


def _run(weights: DeltaWeights, groups: Sequence[Chunks], num_rows: int, inputs: DeltaInputs) -> Tensor:
    make = torch.empty_like if num_rows == len(inputs.gate) else torch.zeros_like
    out = make(inputs.gate)  # (T, V)
    for chunks in groups:
        result, _ = chunked(chunks.gather(inputs), weights, chunks.is_token, chunks.counts, None)
        chunks.scatter(result.to(out.dtype), out)
    return out


class _PackedFunction(torch.autograd.Function):
    """The rule of all groups as one operation of autograd, which keeps only its inputs (T, ...)."""

    @staticmethod
    def forward(ctx: Any, weights: DeltaWeights, groups: Sequence[Chunks], num_rows: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.weights, ctx.groups, ctx.num_rows = weights, groups, num_rows
        return _run(weights, groups, num_rows, DeltaInputs.of(tensors))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        inputs = DeltaInputs.of(ctx.saved_tensors)
        make = dout.new_empty if ctx.num_rows == len(dout) else dout.new_zeros
        widths = [tensor.shape[1] for tensor in inputs.tensors()]
        # Of queries, keys and values as columns of one tensor: their linears are one product.
        qkv = make((len(dout), sum(widths[:3]))).split(widths[:3], 1)
        gradients = DeltaInputs.of([*qkv, *(make((len(dout), width)) for width in widths[3:])])
        for chunks in ctx.groups:
            leaves = [tensor.requires_grad_() for tensor in chunks.gather(inputs).tensors()]
            with torch.enable_grad():
                result, _ = chunked(DeltaInputs.of(leaves), ctx.weights, chunks.is_token, chunks.counts, None)
            dresult = chunks.gather_tokens(dout).float()
            chunks.scatter_gradients(DeltaInputs.of(torch.autograd.grad(result, leaves, dresult)), gradients)
        return None, None, None, *gradients.tensors()

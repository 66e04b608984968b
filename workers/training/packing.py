"""Packs the sequences of many requests into the rows of one pass, without padding between them.

Depends on requests and rows of the bank; not on models or formulas of losses.

Main invariant: one segment for each request (here: a canonical chunk), its sequences in request order; the requests of
one adapter in the given order. A request's results do not depend on the place of its rows.

Dimensions: T rows of the pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.bank.entries import Row
from workers.contract.messages import PassItem
from workers.model.segments import Segment
from workers.training.logits import Part
from workers.training.losses import RequestLoss


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


def pack(requests: Sequence[Request], rows: Sequence[Row], device: torch.device, *, by_adapter: bool = False) -> Packed:
    """Concatenate requests; `rows[i]` is the adapter of request i. `by_adapter`: see `row_order`."""
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
        segments.append(Segment(start, stop, adapter))
        parts[index] = Part(start=start, stop=stop, adapter=adapter, loss=request.loss)
        start = stop
    return Packed(
        tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int64)).to(device),
        positions=torch.from_numpy(np.concatenate(positions)).to(device),
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
        place = (id(row.slab), adapter.scaling)
        if by_adapter:
            keys.append((*place, adapter.slot, index))
        else:
            keys.append((rounds[id(row)], *place, request.num_tokens, adapter.slot, index))
        rounds[id(row)] += 1
    return [int(key[-1]) for key in sorted(keys)]

"""Losses of given logits: what a `DeviceLoss` makes of them, by torch or by kernels, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.numerics.harness import make_data
from tests.support.numerics.random_adapters import Slab
from workers.model.linears import CurrentPass, Kept, LinearGroup
from workers.model.segments import Routing
from workers.rows import GroupShape
from workers.training.device_logits import DeviceLoss
from workers.training.logits import Part
from workers.training.losses import LOSSES, RequestLoss, prepare


class GivenLogits(LinearGroup):
    """Stands for an unembedding: a hidden state is the number of its row of logits. It keeps d(loss)/d(logits)."""

    def __init__(self, logits: Tensor) -> None:
        vocab_size = logits.shape[1]
        shape = GroupShape(index=0, kind="frozen", names=("lm_head",), d_in=1, d_outs=(vocab_size,))
        linear = nn.Linear(1, vocab_size, bias=False, device=logits.device, dtype=logits.dtype)
        super().__init__(shape, [linear], CurrentPass())
        self._logits = logits
        self.gradient = torch.full_like(logits, -7.0)

    def forward(
        self, x: Tensor, routing: Routing, outs: Sequence[Tensor | None] | None = None
    ) -> tuple[list[Tensor], Kept]:
        """Return a copy of the logits of rows."""
        del routing, outs
        return [self._logits[x[:, 0].long()]], []

    def backward(self, x: Tensor, kept: Kept, dys: Sequence[Tensor], *, needs_dx: bool = True) -> Tensor | None:
        """Keep the gradient of rows."""
        del kept, needs_dx
        self.gradient[x[:, 0].long()] = dys[0]
        return torch.zeros_like(x)


def random_loss(
    loss_fn: str, num_tokens: int, vocab_size: int, *, num_targets: int | None = None, seed: int = 0
) -> RequestLoss:
    """Return a request of two sequences, or of one token. Of many targets, a row names some more than once."""
    rng = np.random.default_rng(seed)
    lengths = [num_tokens] if num_tokens == 1 else [num_tokens // 2, num_tokens - num_tokens // 2]
    named = rng.integers(0, vocab_size, max(1, num_targets // 2)) if num_targets else vocab_size
    data = []
    for datum in make_data(loss_fn, lengths, seed, num_targets):
        shape, tokens = datum.loss_inputs["target_tokens"].shape, datum.tokens % vocab_size
        drawn = rng.choice(named, shape).astype(np.int32)
        data.append(replace(datum, tokens=tokens, loss_inputs={**datum.loss_inputs, "target_tokens": drawn}))
    return prepare(data, loss_fn, {}, vocab_size)


def requests_of_every_kind(vocab_size: int) -> list[RequestLoss]:
    """Return requests of every loss, of many targets, and of one token."""
    requests = [random_loss(name, 5 + number, vocab_size, seed=number) for number, name in enumerate(LOSSES)]
    requests += [random_loss("cross_entropy", 3, vocab_size, num_targets=number) for number in (2, 33, 150)]
    return [*requests, random_loss("cross_entropy", 1, vocab_size)]


def logits_for(requests: Sequence[RequestLoss], vocab_size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return random logits (T, V) of the requests' tokens."""
    num_rows = sum(len(request.targets) for request in requests)
    generator = torch.Generator().manual_seed(vocab_size)
    return (3 * torch.randn(num_rows, vocab_size, generator=generator)).to(device, dtype)


@dataclass(frozen=True, slots=True)
class Losses:
    """The results of requests."""

    parts: list[Part]
    gradient: Tensor
    """d(loss)/d(logits) (T, V)."""

    def rows(self, index: int) -> Tensor:
        """Return the gradient of a request's rows."""
        return self.gradient[self.parts[index].start : self.parts[index].stop]


def losses_of(
    requests: Sequence[RequestLoss], logits: Tensor, *, has_kernels: bool, block_rows: int | None = None
) -> Losses:
    """Compute the losses of requests, one after another, in blocks of so many rows; None: of the usual number."""
    adapter = Slab.of(8, ("attn",), 1, torch.float32).rows[0]
    parts: list[Part] = []
    for request in requests:
        start = parts[-1].stop if parts else 0
        parts.append(Part(start=start, stop=start + len(request.targets), adapter=adapter, loss=request))
    unembedding: Any = GivenLogits(logits)
    loss = DeviceLoss(unembedding, logits.shape[1], has_kernels=has_kernels)
    loss.block_rows = block_rows or loss.block_rows
    hidden = torch.arange(len(logits), dtype=torch.float32, device=logits.device).unsqueeze(1)
    assert loss.run(hidden, parts, backward=True) is not None
    loss.settle()
    return Losses(parts, unembedding.gradient)

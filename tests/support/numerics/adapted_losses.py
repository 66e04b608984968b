"""Losses of hidden states through an unembedding with adapters, by torch or by kernels, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.numerics.random_adapters import Slab
from workers.model.fused_runs import training_runs
from workers.model.linears import CurrentPass, LinearGroup
from workers.rows import AdapterViews, GroupShape
from workers.training.device_logits import DeviceLoss
from workers.training.logits import Part
from workers.training.losses import RequestLoss

D_IN = 24


def shapes(vocab_size: int) -> tuple[GroupShape, ...]:
    """Return those of an unembedding, and of a linear that is not there: its adapters adapt nothing here."""
    unembedding = GroupShape(index=0, kind="unembed", names=("lm_head",), d_in=D_IN, d_outs=(vocab_size,))
    return unembedding, GroupShape(index=1, kind="attn", names=("o",), d_in=D_IN, d_outs=(D_IN,))


def adapters_of(vocab_size: int, dtype: torch.dtype) -> list[AdapterViews]:
    """Return adapters of two ranks, and between them one that does not adapt the unembedding."""
    own = shapes(vocab_size)
    small = Slab.of(8, ("unembed",), 2, dtype, shapes=own).rows
    other = Slab.of(16, ("attn",), 1, dtype, shapes=own).rows
    large = Slab.of(32, ("unembed", "attn"), 1, dtype, shapes=own).rows
    return [small[1], other[0], large[0], small[0]]


@dataclass(frozen=True, slots=True)
class Adapted:
    """The results of requests."""

    parts: list[Part]
    dhidden: Tensor
    """d(loss)/d(hidden states) (T, D)."""
    gradients: list[list[Tensor]]
    """Of A and B^T of each request's adapter."""


def losses_of(
    requests: Sequence[RequestLoss],
    adapters: Sequence[AdapterViews],
    hidden: Tensor,
    vocab_size: int,
    *,
    has_kernels: bool,
    block_rows: int = 64,
) -> Adapted:
    """Compute the losses of requests, one after another, each with its adapter, from hidden states (T, D)."""
    generator = torch.Generator().manual_seed(7)
    linear = nn.Linear(D_IN, vocab_size, bias=False)
    linear.weight.data = torch.randn(vocab_size, D_IN, generator=generator).to(hidden.dtype)
    unembedding = LinearGroup(shapes(vocab_size)[0], [linear], CurrentPass())
    unembedding.current.fuse = training_runs if has_kernels else None
    parts: list[Part] = []
    for request, adapter in zip(requests, adapters, strict=True):
        start = parts[-1].stop if parts else 0
        parts.append(Part(start=start, stop=start + len(request.targets), adapter=adapter, loss=request))
        for gradient in gradients_of(adapter):
            gradient.zero_()
    loss = DeviceLoss(unembedding, vocab_size, has_kernels=has_kernels)
    loss.block_rows = block_rows
    dhidden = loss.run(hidden, parts, backward=True)
    assert dhidden is not None
    loss.settle()
    return Adapted(parts, dhidden, [[own.clone() for own in gradients_of(adapter)] for adapter in adapters])


def gradients_of(adapter: AdapterViews) -> list[Any]:
    """Return the gradients of A and B^T; none, if the unembedding is not adapted."""
    views = adapter.groups[0]
    return [] if views is None else [views.A_grad, *views.B_grads]

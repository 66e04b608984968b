"""Losses of hidden states through an unembedding with adapters, by torch or by kernels, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.numerics.given_logits import random_loss
from tests.support.numerics.random_adapters import Slab
from workers.model.fused_runs import training_runs
from workers.model.linears import CurrentPass, LinearGroup
from workers.model.numerics import Numerics
from workers.rows import AdapterViews, GroupShape
from workers.training.device_logits import DeviceLoss
from workers.training.logits import Part
from workers.training.losses import RequestLoss

D_IN = 24


def shapes(vocab_size: int) -> tuple[GroupShape, ...]:
    """Return those of an unembedding, and of a linear that is not there: its adapters adapt nothing here."""
    unembedding = GroupShape(index=0, kind="unembed", names=("lm_head",), d_in=D_IN, d_outs=(vocab_size,))
    return unembedding, GroupShape(index=1, kind="attn", names=("o",), d_in=D_IN, d_outs=(D_IN,))


def adapters_of(vocab_size: int, dtype: torch.dtype, device: str = "cpu") -> list[AdapterViews]:
    """Return adapters of two ranks, and between them one that does not adapt the unembedding."""
    own = shapes(vocab_size)
    small = Slab.of(8, ("unembed",), 2, dtype, device, own).rows
    other = Slab.of(16, ("attn",), 1, dtype, device, own).rows
    large = Slab.of(32, ("unembed", "attn"), 1, dtype, device, own).rows
    return [small[1], other[0], large[0], small[0]]


def requests_of(vocab_size: int, num_targets: int | None = None) -> list[RequestLoss]:
    """Return a request for each of `adapters_of`."""
    names = ("cross_entropy", "importance_sampling", "cross_entropy", "gspo")
    return [
        random_loss(name, 5 + 3 * number, vocab_size, num_targets=num_targets if name == "cross_entropy" else None)
        for number, name in enumerate(names)
    ]


def hidden_for(requests: Sequence[RequestLoss], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return random hidden states (T, D) of the requests' tokens."""
    num_rows = sum(len(request.targets) for request in requests)
    return (torch.randn(num_rows, D_IN, generator=torch.Generator().manual_seed(1)) / 4).to(device, dtype)


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
    weight_scale: float = 1.0,
    exact: bool = False,
) -> Adapted:
    """Compute the losses of requests, one after another, each with its adapter, from hidden states (T, D).

    `weight_scale`: of the unembedding's random weights. `exact`: with the products of exact mode on a GPU.
    """
    generator = torch.Generator().manual_seed(7)
    linear = nn.Linear(D_IN, vocab_size, bias=False)
    weight = weight_scale * torch.randn(vocab_size, D_IN, generator=generator)
    linear.weight.data = weight.to(hidden.device, hidden.dtype)
    unembedding = LinearGroup(shapes(vocab_size)[0], [linear], CurrentPass())
    unembedding.use(Numerics(is_tiled=exact, can_batch=not exact))
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


def assert_close(actual: Adapted, expected: Adapted, tolerance: float) -> None:
    """`tolerance` is relative, of gradients to the largest value."""
    for mine, theirs in zip(actual.parts, expected.parts, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=tolerance, atol=tolerance)
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=tolerance, abs=tolerance)
    pairs = [(actual.dhidden, expected.dhidden)]
    pairs += [pair for own in zip(actual.gradients, expected.gradients, strict=True) for pair in zip(*own, strict=True)]
    for own, other in pairs:
        assert (own - other).abs().max() <= tolerance * other.abs().max()


def gradients_of(adapter: AdapterViews) -> list[Any]:
    """Return the gradients of A and B^T; none, if the unembedding is not adapted."""
    views = adapter.groups[0]
    return [] if views is None else [views.A_grad, *views.B_grads]

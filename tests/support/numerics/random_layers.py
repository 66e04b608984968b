"""Projections, gates and norms of a decoder layer with random values, by torch in fp32 and by kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.model.fused_modules import HeadNorms
from workers.model.layer_operations import add_norm, rotated_heads
from workers.model.sampling_layers import Projected, SplitProjections

EPS = 1e-5
"""Of all norms."""


def draw(seed: int, shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Return values that are the same in every dtype: those of bf16."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device, dtype)


@dataclass(frozen=True)
class RandomHeads:
    """Projected heads of some rows, and gradients of what is made of them."""

    counts: tuple[int, int]
    """H, K."""
    projected: Projected
    gradients: list[Tensor]
    """Of queries (T, H, E), keys and values (T, K, E), with gaps between rows and between heads."""

    @classmethod
    def of(
        cls,
        num_rows: int,
        counts: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype,
        *,
        has_norms: bool,
        device: str = "cpu",
    ) -> RandomHeads:
        """Draw them; rows of the projections have gaps."""
        num_heads, num_keys = counts
        width = (num_heads + 2 * num_keys) * head_dim
        rows = draw(1, (num_rows, width + 16), dtype, device)[:, :width]
        cos, sin = (draw(seed, (num_rows, head_dim), dtype, device) for seed in (2, 3))
        norms = None
        if has_norms:
            norms = HeadNorms(draw(4, (head_dim,), dtype, device), draw(5, (head_dim,), dtype, device), EPS)
        gradients = [
            draw(seed, (num_rows, count + 1, head_dim + 8), dtype, device)[:, :count, :head_dim]
            for seed, count in ((6, num_heads), (7, num_keys), (8, num_keys))
        ]
        return cls(counts, Projected(rows, cos, sin, norms, 1.0), gradients)

    def by_operations(self) -> list[Tensor]:
        """Return queries (T, H, E), keys, values (T, K, E) and the gradient of the projections, all in fp32."""
        given = self.projected
        rows = given.rows.float().detach().requires_grad_()
        norms = given.norms and HeadNorms(given.norms.query.float(), given.norms.key.float(), given.norms.eps)
        heads: list[Tensor] = []

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
            heads.extend(part.squeeze(0).transpose(0, 1) for part in (query, key, value))
            return query

        projected = replace(given, rows=rows, cos=given.cos.float(), sin=given.sin.float(), norms=norms)
        SplitProjections(attend, *self.counts).projected(0, projected)
        gradients = torch.autograd.grad(heads, rows, [gradient.float() for gradient in self.gradients])
        return [part.detach() for part in (*heads, *gradients)]

    def by_kernels(self) -> list[Tensor]:
        """Return the same in the dtype of the projections, by our own kernels."""
        given = self.projected
        rows = given.rows.detach().requires_grad_()
        heads = rotated_heads(rows, given.cos, given.sin, given.norms, self.counts[0])
        return [*(part.detach() for part in heads), *torch.autograd.grad(heads, rows, self.gradients)]


def random_gate(num_rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return gate_up (T, 2 F), with large values too, and a gradient (T, F); rows have gaps."""
    gate_up = draw(1, (num_rows, 2 * width + 16), dtype, device)[:, : 2 * width]
    gate_up[:, :: max(width // 3, 1)] *= 100
    return gate_up, draw(2, (num_rows, width + 8), dtype, device)[:, :width]


def random_norm(
    num_rows: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden and added (T, D), gradients of their sum and of it normalised (T, D), and a weight (D,).

    There are gaps between the rows of all.
    """
    hidden, added, dtotal, dnormalised = (
        draw(seed, (num_rows, width + 8), dtype, device)[:, :width] for seed in (1, 2, 3, 5)
    )
    return hidden, added, dtotal, dnormalised, draw(4, (width,), dtype, device)


def gated_by_operations(gate_up: Tensor, dout: Tensor) -> list[Tensor]:
    """Return silu(gate) * up (T, F) of gate_up (T, 2 F), and the gradient of gate_up, both in fp32."""
    rows = gate_up.float().detach().requires_grad_()
    gate, up = rows.chunk(2, 1)
    out = F.silu(gate) * up
    return [out.detach(), *torch.autograd.grad(out, rows, dout.float())]


def gated_by_kernels(gate_up: Tensor, dout: Tensor) -> list[Tensor]:
    """Return the same in the dtype of gate_up, by our own kernels."""
    out, dgate_up = torch.empty(dout.shape).to(gate_up), torch.empty(gate_up.shape).to(gate_up)
    torch.ops.tinkerpool.gate(out, gate_up)
    torch.ops.tinkerpool.gate_backward(dgate_up, dout, gate_up)
    return [out, dgate_up]


def norm_by_operations(total: Tensor, dtotal: Tensor, dnormalised: Tensor, weight: Tensor) -> list[Tensor]:
    """Return a sum (T, D) normalised, and its gradient by both paths, in fp32."""
    rows = total.float().requires_grad_()
    normalised = F.rms_norm(rows, weight.shape, weight.float(), EPS)
    (gradient,) = torch.autograd.grad(normalised, rows, dnormalised.float())
    return [normalised.detach(), dtotal.float() + gradient]


def norm_by_kernels(hidden: Tensor, added: Tensor, dtotal: Tensor, dnormalised: Tensor, weight: Tensor) -> list[Tensor]:
    """Return the sum (T, D) of two parts, it normalised, and the gradient of both parts."""
    first, second = (part.detach().requires_grad_() for part in (hidden, added))
    both = add_norm(first, second, weight, EPS)
    own, other = torch.autograd.grad(both, [first, second], [dtotal.clone(), dnormalised])
    assert torch.allclose(own, other, rtol=0, atol=0, equal_nan=True)
    return [*(each.detach() for each in both), own]

"""RMS normalisation that replaces the eager one of transformers.

For fp32 on a CPU with a backward written by hand; otherwise by the library's fused kernel. A module is replaced only if
the replacement gives the same numbers as the module's own forward.

Does not depend on models.

Main invariant: a row's result depends only on that row.

Dimensions: T rows (all leading dimensions), D features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOW_PRECISION_TOLERANCE = 2.0**-7
"""Relative difference from a module's own result in bf16, which is rounded to 8 bits before and after the weight."""


def _inverse(x: Tensor, eps: float) -> Tensor:
    """Return 1 / rms(x) (..., 1): sqrt(D) / |x|, with eps inside the root."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


class _RmsNormFunction(torch.autograd.Function):
    """y = x / rms(x) * w for a frozen w; x (..., D), w (D,)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        # With u = x * inverse:  dx = inverse * (w dy - u * mean(u * w dy)).
        x, weight, inverse = ctx.saved_tensors
        dx = dy * weight  # (..., D)
        total = (dx * x).sum(-1, keepdim=True).mul_(inverse).mul_(inverse)  # (..., 1)
        return dx.addcmul_(x, total, value=-1 / x.shape[-1]).mul_(inverse), None, None


class FusedRmsNorm(nn.Module):
    """Normalises the last dimension; `weight` (D,) is the factor itself (Gemma's 1 + w already added)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) for x (..., D)."""
        if not torch.is_grad_enabled():
            assert isinstance(self.weight, Tensor)
            return (x * _inverse(x, self.eps)).mul_(self.weight)
        out: Tensor = _RmsNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class LibraryRmsNorm(nn.Module):
    """Like `FusedRmsNorm`, by the library's kernel: sums in fp32, rounded to the dtype of x once."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) for x (..., D)."""
        assert isinstance(self.weight, Tensor)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def fuse_rms_norms(model: nn.Module) -> int:
    """Replace every RMS normalisation that a replacement reproduces to rounding; return how many."""
    num_fused = 0
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        fused = _fused(module)
        if fused is not None:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], fused)
            num_fused += 1
    return num_fused


@torch.no_grad()
def _fused(module: nn.Module) -> FusedRmsNorm | LibraryRmsNorm | None:
    """Return the replacement of a module, with either convention for its weight; None if neither fits."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    is_full = weight.dtype == torch.float32
    make = FusedRmsNorm if is_full and weight.device.type == "cpu" else LibraryRmsNorm
    rtol = 1e-5 if is_full else LOW_PRECISION_TOLERANCE
    x = torch.linspace(-2, 3, 4 * weight.numel(), device=weight.device).view(4, -1).sin().to(weight.dtype)
    expected = module(x)
    for factor in (weight, 1 + weight):
        # 1 + w must not lose bits: the comparison would not show an error that is the same in all rows.
        is_same = factor is weight or torch.equal(factor.float(), 1 + weight.float())
        fused = make(factor, eps)
        if is_same and torch.allclose(fused(x), expected, rtol=rtol, atol=1e-6):
            return fused
    return None

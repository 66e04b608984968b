"""RMS normalisation, rotary position embedding and gates of MLPs that replace the eager ones of transformers.

Norms: for fp32 on a CPU with a backward written by hand; otherwise by the library's fused kernel. Rotary embedding:
transformers calls a global function of the model's module, so each attention layer gets its own copy of `forward`, in
which that name is our function; layers of other models do not change. Gates: for fp32 on a CPU, where the backward
writes both gradients into one tensor, because their linears are one product. A module or layer is left alone if its
replacement gives other numbers than its own code.

Does not depend on models beyond names of classes and of that function.

Main invariant: a row's result depends only on that row.

Dimensions: T rows (of a norm: all leading dimensions), D features, H heads, E head dimension (rotated in halves), F
features of a gate.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x (..., D), normalised over its last dimension, times a frozen weight (D,).

    Except for fp32 on a CPU by the library's kernel: sums in fp32, rounded to the dtype of x once.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    if not torch.is_grad_enabled():
        return (x * _inverse(x, eps)).mul_(weight)
    out: Tensor = _RmsNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class FusedRmsNorm(nn.Module):
    """Normalises the last dimension; `weight` (D,) is the factor itself (Gemma's 1 + w already added)."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone(), persistent=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., D) for x (..., D)."""
        assert isinstance(self.weight, Tensor)
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms of a layer's query and key heads."""

    query: Tensor
    """(E,)"""
    key: Tensor
    """(E,)"""
    eps: float


def fuse_rms_norms(model: nn.Module) -> None:
    """Replace every RMS normalisation that a replacement reproduces to rounding."""
    for name, module in list(model.named_modules()):
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        fused = _fused(module)
        if fused is not None:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], fused)


@torch.no_grad()
def _fused(module: nn.Module) -> FusedRmsNorm | None:
    """Return the replacement of a module, with either convention for its weight; None if neither fits."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    rtol = 1e-5 if weight.dtype == torch.float32 else LOW_PRECISION_TOLERANCE
    x = torch.linspace(-2, 3, 4 * weight.numel(), device=weight.device).view(4, -1).sin().to(weight.dtype)
    expected = module(x)
    for factor in (weight, 1 + weight):
        # 1 + w must not lose bits: the comparison would not show an error that is the same in all rows.
        is_same = factor is weight or torch.equal(factor.float(), 1 + weight.float())
        fused = FusedRmsNorm(factor, eps)
        if is_same and torch.allclose(fused(x), expected, rtol=rtol, atol=1e-6):
            return fused
    return None


NAME = "apply_rotary_pos_emb"


def _rotated(x: Tensor, cos: Tensor, sin_first: Tensor, sin_second: Tensor) -> Tensor:
    """Return x cos + (-x2 sin1, x1 sin2), with x1 and x2 the halves of x (1, H, T, E), cos (1, 1, T, E), and sin1 and
    sin2 the halves of the sines (1, 1, T, E / 2), which may be in fp32 beside an x in bf16. In the dtype of x."""
    y = x * cos
    first, second = x.chunk(2, -1)
    y_first, y_second = y.chunk(2, -1)  # one call for two views: with few rows the calls take the time
    y_first.addcmul_(second, sin_first, value=-1)
    y_second.addcmul_(first, sin_second)
    return y.to(x.dtype)


class _RotaryFunction(torch.autograd.Function):
    """`_rotated`, and its derivative by x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin_first: Tensor, sin_second: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin_first, sin_second)
        return _rotated(x, cos, sin_first, sin_second)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin_first, sin_second = ctx.saved_tensors
        dx = dy * cos
        first, second = dy.chunk(2, -1)
        dx_first, dx_second = dx.chunk(2, -1)
        dx_second.addcmul_(first, sin_first, value=-1)
        dx_first.addcmul_(second, sin_second)
        return dx.to(dy.dtype), None, None, None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return queries (1, H, T, E) and keys, rotated by cos and sin (1, T, R); R < E: only the first R values are."""
    if (width := cos.shape[-1]) < q.shape[-1]:
        first = apply_rotary(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
        return torch.cat([first[0], q[..., width:]], -1), torch.cat([first[1], k[..., width:]], -1)
    angles = (cos.unsqueeze(unsqueeze_dim), *sin.unsqueeze(unsqueeze_dim).chunk(2, -1))
    if not torch.is_grad_enabled():
        return _rotated(q, *angles), _rotated(k, *angles)
    rotated = [_RotaryFunction.apply(x, *angles) for x in (q, k)]  # type: ignore[no-untyped-call]
    return rotated[0], rotated[1]


def fuse_rotary(model: nn.Module) -> None:
    """Let every attention layer that uses the shared function use ours."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)  # what wraps it renames arguments of earlier versions
        if not hasattr(module, "layer_idx") or not isinstance(forward, FunctionType):
            continue
        theirs = forward.__globals__.get(NAME)
        if NAME in forward.__code__.co_names and theirs is not None and _is_same(theirs):
            ours = FunctionType(
                forward.__code__,
                {**forward.__globals__, NAME: apply_rotary},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            ours.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(ours, module)


@torch.no_grad()
def _is_same(theirs: Any) -> bool:
    """Return whether a function rotates as ours: whole heads, and a part of each if it takes one."""
    q, k = (torch.linspace(-1, 2, num_heads * 3 * 8).sin().view(1, num_heads, 3, 8) for num_heads in (4, 2))
    whole, part = (torch.linspace(0, 3, 3 * width).view(1, 3, width) for width in (8, 4))

    def rotated(angles: Tensor) -> Any:
        try:
            return theirs(q, k, angles.cos(), angles.sin())
        except (TypeError, ValueError, RuntimeError):
            return None

    if rotated(whole) is None:
        return False
    return all(
        torch.allclose(mine, other, atol=1e-6)
        for angles in (whole, part)
        if (expected := rotated(angles)) is not None
        for mine, other in zip(apply_rotary(q, k, angles.cos(), angles.sin()), expected, strict=True)
    )


class _GateFunction(torch.autograd.Function):
    """silu(gate) * up; all (..., F)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        activated = F.silu(gate)
        ctx.save_for_backward(gate, up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, activated = ctx.saved_tensors
        width = dy.shape[-1]
        dgate, dup = dy.new_empty(*dy.shape[:-1], 2 * width).split(width, -1)
        torch.mul(dy, up, out=dgate)
        torch.ops.aten.silu_backward.grad_input(dgate, gate, grad_input=dgate)
        torch.mul(dy, activated, out=dup)
        return dgate, dup


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; all (..., F)."""
    if gate.device.type != "cpu" or gate.dtype != torch.float32 or not torch.is_grad_enabled():
        return F.silu(gate) * up
    out: Tensor = _GateFunction.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """Return (..., D) for x (..., D)."""
    out: Tensor = mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x)))
    return out


def fuse_gates(model: nn.Module) -> None:
    """Let every MLP whose code is that of `_gated_mlp` have its gradients in one tensor."""
    for module in model.modules():
        if hasattr(module, "act_fn") and _is_gated_mlp(module):
            module.forward = MethodType(_gated_mlp, module)


def _is_gated_mlp(module: Any) -> bool:
    """Return whether a module computes as `_gated_mlp`; tries its code with other functions for its linears."""
    x = torch.linspace(-2, 3, 8).view(1, 2, 4)
    parts = SimpleNamespace(gate_proj=torch.sin, up_proj=torch.exp, down_proj=torch.cos, act_fn=module.act_fn)
    try:
        return torch.equal(type(module).forward(parts, x), _gated_mlp(parts, x))
    except (AttributeError, TypeError, ValueError, RuntimeError):  # it has other parts, or takes something else
        return False

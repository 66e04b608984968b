"""Layers that run again in the backward, so that only their inputs stay in memory meanwhile. The bits are the same.

Does not depend on what a layer computes.

Dimensions: T rows of the pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.linears import CurrentPass

Run = Callable[..., Tensor | tuple[Tensor, ...]]
"""A layer: tensors -> a tensor or several."""


class Recomputation:
    """Wraps the forwards of a model's decoder layers. One per base model; used by one thread."""

    def __init__(self, layers: Iterable[nn.Module], current: CurrentPass) -> None:
        self._is_on = False
        self._current = current
        for layer in layers:
            layer.forward = partial(self._run, layer.forward)

    def switch(self, *, on: bool) -> None:
        """Choose whether the layers of the next forward with gradients keep only their input."""
        self._is_on = on

    def _run(self, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run a layer in its place, as transformers calls it: hidden states (1, T, D) -> hidden states (1, T, D)."""

        def run(hidden: Tensor) -> Tensor:
            out = layer(hidden, *args, **kwargs)
            if not isinstance(out, Tensor):
                raise ValueError("the model's decoder layers return more than hidden states, which is not supported")
            return out

        if self._is_on and torch.is_grad_enabled():
            out: Tensor = recomputed(run, self._current, hidden)
            return out
        return run(hidden)


def recomputed(run: Run, current: CurrentPass, *inputs: Tensor) -> Any:
    """Return the result of `run` for inputs, which are all that is kept of it for the backward."""
    return _LayerFunction.apply(current.anchor, run, current, *inputs)  # type: ignore[no-untyped-call]


class _LayerFunction(torch.autograd.Function):
    """A layer as one operation of autograd, which keeps only its inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Run, current: CurrentPass, *inputs: Tensor) -> Any:
        del anchor  # see `CurrentPass.anchor`
        ctx.save_for_backward(*inputs)
        ctx.run, ctx.current, ctx.routing = run, current, current.routing
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.current.routing is ctx.routing, "another forward ran before this backward"
        needs_grad = ctx.needs_input_grad[3:]
        again = [
            kept.detach().requires_grad_(needed) for kept, needed in zip(ctx.saved_tensors, needs_grad, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.run(*again)
        torch.autograd.backward(out, douts)
        return None, None, None, *(each.grad for each in again)

"""Runs decoder layers again in the backward instead of keeping all that they computed (gradient checkpointing).

Knows that a layer is a function of hidden states; not what is inside, nor when it pays (see `memory`).

Main invariant: the bits are the same with and without. What a layer computes is computed by the same kernels from the
same input; its adapters' gradients, which the backward adds as a side effect, are added once, by the second run, in the
order of a backward that kept everything. Whatever else a pass has in its layers (which rows go through which adapter,
how to attend) must still be what it was, so the backward must run before the next forward.

Dimensions: T rows of the pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.lora import CurrentPass


class Recomputation:
    """Takes the place of the forwards of a model's decoder layers. One per base model; used by one thread."""

    def __init__(self, layers: Iterable[nn.Module], current: CurrentPass) -> None:
        self.is_on = False
        """Whether layers that are run with gradients enabled keep nothing but their input."""
        self._current = current
        for layer in layers:
            layer.forward = partial(self._run, layer.forward)

    def _run(self, layer: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What transformers calls in place of a layer: hidden states (1, T, D) first -> hidden states (1, T, D)."""

        def run(hidden: Tensor) -> Tensor:
            out = layer(hidden, *args, **kwargs)
            if not isinstance(out, Tensor):
                raise ValueError("the model's decoder layers return more than hidden states, which is not supported")
            return out

        if self.is_on and torch.is_grad_enabled():
            out: Tensor = _LayerFunction.apply(  # type: ignore[no-untyped-call]
                hidden, self._current.anchor, run, self._current
            )
            return out
        return run(hidden)


class _LayerFunction(torch.autograd.Function):
    """Autograd sees a layer as one operation of its input (1, T, D), which is all that is kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, run: Callable[[Tensor], Tensor], current: CurrentPass
    ) -> Tensor:
        del anchor  # see `CurrentPass.anchor`
        ctx.save_for_backward(hidden)
        ctx.run, ctx.current, ctx.routing = run, current, current.routing
        return run(hidden)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, None, None, None]:
        assert ctx.current.routing is ctx.routing, "another forward ran before this backward"
        (hidden,) = ctx.saved_tensors
        again = hidden.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            out = ctx.run(again)
        torch.autograd.backward(out, dout)
        return again.grad, None, None, None

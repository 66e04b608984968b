"""Recomputation of decoder layers in the backward, instead of keeping their results (gradient checkpointing).

Does not depend on the inside of a layer, which is a function of hidden states; `training.memory` chooses the passes.

Main invariant: the bits are the same with and without. A layer runs the same kernels on the same input both times, and
its adapters' gradients are added once, by the second run, in the order of a backward without recomputation. The second
run reads the state of the pass (`CurrentPass`), so the backward must run before the next forward.

Dimensions: T rows of the pass, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.lora.routing import CurrentPass


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
            out: Tensor = _LayerFunction.apply(  # type: ignore[no-untyped-call]
                hidden, self._current.anchor, run, self._current
            )
            return out
        return run(hidden)


class _LayerFunction(torch.autograd.Function):
    """A layer as one operation of autograd, which keeps only its input (1, T, D)."""

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

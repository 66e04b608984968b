"""Gates of MLPs: the bits of torch's own operations, and gradients side by side."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Gemma2Config, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from workers.model.frozen_products import joined
from workers.model.fused_modules import GATE_BLOCK_VALUES, fuse_gates, gated

WIDE = GATE_BLOCK_VALUES // 64
"""Features of a gate of which more than 64 rows are computed in blocks."""


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def gates(num_rows: int, width: int, *, are_columns: bool = True) -> tuple[Tensor, Tensor]:
    """Return gate and up: columns of one tensor, as one product gives them, or tensors of their own."""
    gate, up = (3 * values(1, num_rows, 2 * width)).split(width, -1)
    if not are_columns:
        gate, up = gate.contiguous(), up.contiguous()
    return gate.requires_grad_(), up.requires_grad_()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.sampled_from((WIDE, 1792, 96, 4100)), st.booleans(), st.sampled_from((1, 2)))
def test_a_gate_has_the_bits_of_separate_operations(
    num_rows: int, width: int, are_columns: bool, num_threads: int
) -> None:
    gate, up = gates(num_rows, width, are_columns=are_columns)
    dout = values(1, num_rows, width)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        out, expected = gated(gate, up), F.silu(gate) * up
        assert torch.equal(out, expected)
        for gradient, expected_gradient in zip(
            torch.autograd.grad(out, [gate, up], dout), torch.autograd.grad(expected, [gate, up], dout), strict=True
        ):
            assert torch.equal(gradient, expected_gradient)
    finally:
        torch.set_num_threads(before)


def test_gradients_of_a_gate_need_no_copy_to_be_one_tensor() -> None:
    gate, up = gates(65, WIDE)
    gradients = torch.autograd.grad(gated(gate, up).sum(), [gate, up])
    rows = [gradient.squeeze(0) for gradient in gradients]
    both = joined(rows)
    assert both.data_ptr() == rows[0].data_ptr()
    assert torch.equal(both, torch.cat(rows, 1))


def test_only_neighbours_in_one_tensor_are_joined_without_a_copy() -> None:
    left, middle, right = values(5, 12).split((3, 4, 5), 1)
    assert joined([left]) is left
    assert joined([left, middle, right]).data_ptr() == left.data_ptr()
    for parts in (
        [left, middle],
        [left, right],
        [middle, right],
        [left, right, middle],
        [left.clone(), middle.clone()],
    ):
        both = joined(parts)
        assert both.data_ptr() not in {part.data_ptr() for part in parts}
        assert torch.equal(both, torch.cat(parts, 1))


def test_only_mlps_that_multiply_silu_of_their_gate_are_replaced() -> None:
    class Subtracting(LlamaMLP):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)) - self.up_proj(x))

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    llama, subtracting = LlamaMLP(LlamaConfig(**shape)), Subtracting(LlamaConfig(**shape))
    gelu = Gemma2MLP(Gemma2Config(**shape))
    assert fuse_gates(nn.ModuleList([llama, subtracting, gelu])) == 1
    assert "forward" in vars(llama)
    assert not {"forward"} & (vars(subtracting).keys() | vars(gelu).keys())
    x = values(2, 3, 16)
    assert torch.equal(llama(x), LlamaMLP.forward(llama, x))

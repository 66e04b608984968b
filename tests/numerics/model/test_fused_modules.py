"""Gates of MLPs against autograd, and which MLPs get them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from workers.model.frozen_products import joined
from workers.model.fused_modules import fuse_gates, fuse_rotary, gated


@pytest.mark.parametrize(("num_rows", "width"), [(1, 1), (5, 24), (37, 100), (256, 512)])
def test_gradients_of_a_gate_have_the_bits_of_autograd_and_reach_the_product_behind_them_without_a_copy(
    num_rows: int, width: int
) -> None:
    torch.manual_seed(0)
    columns = torch.randn(num_rows, 2 * width)
    dy = torch.randn(num_rows, width)
    leaves = [part.detach().requires_grad_() for part in columns.split(width, 1)]
    expected = F.silu(leaves[0]) * leaves[1]
    out = gated(*leaves)
    gradients = torch.autograd.grad(out, leaves, dy)
    torch.testing.assert_close(
        (out, *gradients), (expected, *torch.autograd.grad(expected, leaves, dy)), rtol=0, atol=0
    )
    assert joined(gradients).data_ptr() == gradients[0].data_ptr()


def halved(mlp: Any, x: Tensor) -> Any:
    """Compute an MLP with the parts of the others."""
    return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x) * 0.5)


def dropping(mlp: Any, x: Tensor) -> Any:
    """Compute an MLP with a part more than the others."""
    return mlp.dropout(Qwen3MLP.forward(mlp, x))


@pytest.mark.parametrize(
    ("mlp_class", "activation", "is_fused"),
    [
        (Qwen3MLP, "silu", True),
        (LlamaMLP, "silu", True),
        (Qwen3MLP, "gelu", False),
        (Gemma3MLP, "gelu_pytorch_tanh", False),
        (type("HalvedMLP", (Qwen3MLP,), {"forward": halved}), "silu", False),
        (type("DroppingMLP", (Qwen3MLP,), {"forward": dropping}), "silu", False),
    ],
)
def test_an_mlp_of_another_form_keeps_its_own_code(mlp_class: Any, activation: str, is_fused: bool) -> None:
    config = SimpleNamespace(
        hidden_size=8, intermediate_size=16, hidden_act=activation, hidden_activation=activation, mlp_bias=False
    )
    mlp = mlp_class(config)
    mlp.dropout = nn.Identity()
    x = torch.randn(3, 8)
    expected = mlp(x)
    fuse_gates(nn.ModuleList([mlp]))
    assert ("forward" in vars(mlp)) == is_fused
    assert torch.equal(mlp(x), expected)


@torch.no_grad()
def test_attention_rotates_by_our_function_also_where_its_forward_is_wrapped(any_model_directory: Path) -> None:
    """Since version 5.24 of transformers a wrapper of `forward` renames arguments of earlier versions."""
    model = AutoModelForCausalLM.from_pretrained(any_model_directory)
    if model.config.model_type == "gpt_oss":
        pytest.skip("its function takes half of the angles")
    tokens = torch.arange(3, 20)[None]
    expected = model(input_ids=tokens, use_cache=False).logits
    fuse_rotary(model)
    layers = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "q_proj")]
    assert layers
    assert all("forward" in vars(layer) for layer in layers)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)

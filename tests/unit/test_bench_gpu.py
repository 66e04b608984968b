"""What the GPU benchmark counts, checked against the model itself. What it measures needs a GPU."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from bench_gpu import SHAPES, Case, make_data, train_flops_per_token


def test_flops_are_four_for_each_weight_of_a_linear_six_for_the_adapter_and_attention() -> None:
    config = Qwen3Config(**SHAPES["tiny"])
    model = AutoModelForCausalLM.from_config(config)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    base = sum(linear.weight.numel() for linear in linears)
    adapter = 8 * sum(linear.in_features + linear.out_features for linear in linears)
    attention = config.num_hidden_layers * 7 * 2 * 64 * 100 / 2  # 64: four heads of 16
    assert train_flops_per_token(config, 100, 8) == 4 * base + 6 * adapter + attention


def test_case_is_read_from_text_and_gives_every_tenant_its_own_tokens() -> None:
    case = Case.read("3x2x16")
    assert (str(case), case.total_tokens) == ("3 x 2 x 16", 96)
    first, second = (make_data(case, 100, tenant) for tenant in range(2))
    assert len(first) == len(second) == 2
    assert first[0].tokens.tolist() != second[0].tokens.tolist()
    assert first[0].loss_inputs["target_tokens"][:-1].tolist() == first[0].tokens[1:].tolist()

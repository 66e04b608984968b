"""Decoder layers in few kernels train as transformers' modules do, in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.by_kernels import FEW, fused, spoil_new_gradients
from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import sums_in_order
from tests.support.numerics.tenants import assert_same, train
from workers.model.base_model import BaseModel
from workers.model.pretrained import UnsupportedModelError
from workers.selftest.training_kernels import check_training_kernels
from workers.training import device_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_base_models")]


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
@pytest.mark.parametrize("recompute", ["off", "on"])
def test_kernels_train_as_the_modules_do(model_directories: dict[str, Path], architecture: str, recompute: str) -> None:
    path = model_directories[architecture]
    expected = observe(Driver(path), FEW)
    apart = distance(observe(fused(path, recompute=recompute), FEW), expected)
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4


def test_kernels_train_as_the_modules_do_where_linears_have_biases(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path)
    expected = observe(Driver(tmp_path), FEW)
    apart = distance(observe(fused(tmp_path), FEW), expected)
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_co_batched_tenant_has_the_bits_of_solo_in_exact_mode(qwen3: Path, dtype: str) -> None:
    config: dict[str, Any] = {"dtype": dtype, "exact": True}
    driver, solo = fused(qwen3, **config), [fused(qwen3, **config) for _ in FEW]
    with sums_in_order():
        expected = {each.key: train(own, [each], num_steps=1)[each.key] for own, each in zip(solo, FEW, strict=True)}
        assert_same(train(driver, FEW, num_steps=1), expected)
    info = driver.engine.base_model.info(is_thread_count_invariant=True, are_samples_batch_invariant=True)
    assert info.is_exact
    assert "exact in tiles" in info.fingerprint


@pytest.mark.parametrize("make_driver", [Driver, fused], ids=["modules", "kernels"])
def test_what_is_in_the_memory_of_a_gradient_before_its_first_pass_reaches_nothing(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, make_driver: Callable[..., Driver]
) -> None:
    monkeypatch.setattr(device_logits, "block_rows_of", lambda *_, **__: 4)  # an adapter has rows in several
    config = {"dtype": "bfloat16"} if make_driver is fused else {}
    with monkeypatch.context() as patched:
        patched.setattr(BaseModel, "sets_gradients", False)
        expected = train(make_driver(qwen3, **config), FEW, num_steps=2)
    set_by_passes = spoil_new_gradients(monkeypatch)
    assert_same(train(make_driver(qwen3, **config), FEW, num_steps=2), expected)
    assert any(set_by_passes) == (make_driver is fused)


def test_kernels_with_other_gradients_are_not_used(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = fused(qwen3)
    model = driver.engine.base_model
    check_training_kernels(model)
    assert model.trains_by_kernels
    assert model.training_layers is not None
    wrong = importlib.import_module("workers.model.adapter_kernels")
    monkeypatch.setattr(wrong, "expand_inputs", lambda *_: None)  # a kernel that does nothing
    check_training_kernels(model)
    assert not model.trains_by_kernels
    assert model.training_layers is None
    assert "trains without kernels of our own" in caplog.text
    expected = observe(Driver(qwen3), FEW)
    assert distance(observe(driver, FEW), expected).gradients < 1e-4


def test_exact_mode_is_refused_with_kernels_that_give_other_gradients(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused(qwen3, exact=True).engine.base_model
    monkeypatch.setattr(importlib.import_module("workers.model.gate_kernels"), "expand_gate_backward", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="exact mode is not possible"):
        check_training_kernels(model)

"""Decoder layers in few kernels: their numbers are those of transformers' modules; which models have them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig

from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_steps import RandomStep
from tests.support.numerics.samplers import Sampling, make_sampler, request
from tests.support.numerics.slow_pages import slow_pages
from workers.model import base_model
from workers.model.base_model import BaseModel
from workers.model.fused_runs import forward_runs
from workers.model.sampling_layers import SamplingLayers, SplitProjections
from workers.model.usual_layers import UsualModel, has_form
from workers.sampling.attention.pages import PagedAttention, PageKernel, triton_pages

pytestmark = pytest.mark.usefixtures("own_base_models")


def with_layers(model: BaseModel, *, has_gate: bool = False) -> BaseModel:
    """Give a model on a CPU the layers that a GPU has."""
    assert has_form(model.model, model.head_dim)
    model.sampling_layers = SamplingLayers(UsualModel(model.model), has_gate=has_gate)
    model.use(model.numerics)
    return model


def test_layers_give_the_numbers_of_the_modules(any_model_directory: Path) -> None:
    model = Driver(any_model_directory).engine.base_model
    if model.has_sliding_window:
        pytest.skip("models with sliding windows attend by blocks")
    if model.delta_layers or model.expert_layers:
        pytest.skip("hybrids and mixtures have layers of another form")
    tokens, lengths = torch.arange(3, 40), [30, 7]
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = model.attend_packed(lengths, [1, 1])
    with torch.no_grad():
        expected = model.forward(tokens, positions, (), packed)
        projected = SplitProjections(packed, model.num_heads, model.num_key_value_heads)
        before = model.num_base_matmuls
        actual = with_layers(model).forward(tokens, positions, (), projected)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert model.num_base_matmuls - before == 7 * model.num_layers


def test_training_has_the_same_bits_with_the_weights_joined(qwen3: Path) -> None:
    tokens, positions = torch.arange(3, 40), torch.arange(37)
    model = Driver(qwen3).engine.base_model

    def hidden() -> torch.Tensor:
        return model.forward(tokens, positions, (), model.attend_packed([37], [1])).detach()

    before = hidden()
    with_layers(model)
    assert torch.equal(hidden(), before)


def test_a_model_that_multiplies_its_sums_samples_by_its_modules(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Granite has the names of the form, and other sums."""
    config = GraniteConfig(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        residual_multiplier=0.3,
        attention_multiplier=0.25,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    # patched: a CPU has no kernels, and the probe needs none
    monkeypatch.setattr(base_model, "can_run", lambda *_: True)
    monkeypatch.setattr(UsualModel, "has_silu", False)
    usual, other = BaseModel(qwen3), BaseModel(tmp_path)
    assert other.sampling_layers is not None
    for model in (usual, other):
        model.probe()
    assert usual.sampling_layers is not None
    assert other.sampling_layers is None
    assert "samples by transformers' modules" in caplog.text


@pytest.mark.parametrize("way", ["right", "wrong", "does not compile", "does not compile with adapters"])
def test_a_model_whose_products_of_few_rows_are_wrong_leaves_them_to_the_library(
    qwen3: Path, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interpret()
    # patched: a CPU has no kernels
    monkeypatch.setattr(base_model, "can_run", lambda *_: True)
    kernels = importlib.import_module("workers.model.few_rows_kernels")
    multiply_few, launched = kernels.multiply_few, list[tuple[int, bool]]()

    def noted(out: torch.Tensor, *operands: Any) -> None:
        tiles = operands[9]
        if way == "does not compile" or (way == "does not compile with adapters" and tiles is not None):
            raise RuntimeError(way)
        launched.append((len(out), tiles is not None))
        multiply_few(out, *operands)
        if way == "wrong":
            out[-1] += 1

    monkeypatch.setattr(kernels, "multiply_few", noted)
    model = BaseModel(qwen3)
    model.training_layers = None  # their attention is a GPU's
    model.probe()
    if way == "right":
        assert set(launched) == {(24, False), (11, False), (24, True), (11, True)}, "each sequence by itself"
    assert model.sampling_layers is not None
    assert model.sampling_layers.takes_few == (way == "right")
    assert ("decodes by the library's products" in caplog.text) == (way != "right")


@pytest.mark.parametrize(("num_heads", "head_dim", "has_norms"), [((4, 2), 16, True), ((3, 1), 24, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_projections_is_that_of_separate_operations(
    num_heads: tuple[int, int], head_dim: int, dtype: torch.dtype, *, has_norms: bool
) -> None:
    """The kernels around attention, with next tokens and chunks in one step."""
    interpret()
    step = RandomStep.of(num_heads, head_dim, dtype, has_norms=has_norms)
    cache, projected = step.cache, step.projected
    filled = [part.clone() for part in cache.layer(0)]
    attend = PagedAttention(cache, slow_pages, step.tables)
    expected = SplitProjections(attend, *num_heads).projected(0, projected)
    written = [part.clone() for part in cache.layer(0)]
    for part, before in zip(cache.layer(0), filled, strict=True):
        part.copy_(before)
    with metered() as moved:
        actual = attend.projected(0, projected)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-5
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for part, right in zip(cache.layer(0), written, strict=True):
        torch.testing.assert_close(part, right, rtol=tolerance, atol=tolerance)
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [slow_pages, triton_pages])
def test_samples_by_layers_and_pages_are_those_by_modules_and_blocks(qwen3: Path, kernel: PageKernel) -> None:
    interpret()
    driver = Driver(qwen3)
    by_blocks = Sampling(driver, make_sampler(driver))
    by_blocks.publish("a", "b")
    wanted = [
        request("one", "a/v", length=5, num_samples=3, max_tokens=4, seed=1),
        request("two", "", length=270, num_samples=1, max_tokens=3, seed=2, prompt_logprobs=True),
        request("three", "b/v", length=40, num_samples=2, max_tokens=3, seed=3, top_p=0.8),
    ]
    expected = by_blocks.sequences(*wanted)
    with_layers(driver.engine.base_model, has_gate=True).current.fuse_forward = forward_runs
    by_pages = Sampling(driver, make_sampler(driver, 400, kernel))
    for mine, theirs in zip(by_pages.sequences(*wanted), expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)

"""Layers that run again in the backward have the bits of layers that kept their activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.numerics.harness import Driver, make_data, make_spec
from tests.support.numerics.tenants import TENANTS, assert_same, train
from workers.contract.settings import EngineSettings
from workers.model.attention import PackedAttention
from workers.model.linears import MultiLoraLinear
from workers.selftest.loading import load_base_model
from workers.training import passes

pytestmark = pytest.mark.slow


def inner_linears(driver: Driver) -> int:
    return sum(isinstance(module, MultiLoraLinear) for module in driver.engine.base_model.model.model.modules())


def test_results_gradients_and_weights_have_the_same_bits_with_and_without_recomputed_layers(
    model_directory: Path,
) -> None:
    traces = {mode: train(Driver(model_directory, recompute=mode), TENANTS, num_steps=2) for mode in ("on", "off")}
    assert_same(traces["on"], traces["off"])


def test_layers_run_twice_only_in_a_pass_with_a_backward_through_them(qwen3: Path) -> None:
    drivers = {mode: Driver(qwen3, recompute=mode) for mode in ("on", "off")}
    data = make_data("cross_entropy", [20])
    counts: dict[str, list[int]] = {}
    for mode, driver in drivers.items():
        driver.install(make_spec("a"), make_spec("head", train_attn=False, train_mlp=False))
        items = (driver.backward("a", data), driver.forward("a", data), driver.backward("head", data))
        counts[mode] = [driver.num_base_matmuls(item) for item in items]
    extra = [on - off for on, off in zip(counts["on"], counts["off"], strict=True)]
    assert extra == [inner_linears(drivers["on"]), 0, 0]


def test_only_a_pass_with_recomputed_layers_maps_its_memory_outside_the_heap(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free blocks in the heap would take more of the scarce memory. Patched: the heap's state is not visible."""
    entered: list[bool] = []

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(passes, "without_holes", noted)
    counts = []
    for mode in ("on", "off"):
        driver = Driver(qwen3, recompute=mode)
        driver.install(make_spec("a"))
        data = make_data("cross_entropy", [20])
        driver.train(driver.backward("a", data), driver.forward("a", data))
        counts.append(len(entered))
    assert counts == [1, 1]


def test_a_backward_after_another_forward_is_an_error_and_not_another_gradient(qwen3: Path) -> None:
    model = load_base_model(EngineSettings(model_path=str(qwen3)))
    tokens, positions = torch.arange(16), torch.arange(16)
    hidden = model.forward(tokens, positions, (), PackedAttention([16]), recompute=True)
    with torch.no_grad():
        model.forward(tokens, positions, (), PackedAttention([16]))
    with pytest.raises(AssertionError, match="another forward"):
        hidden.sum().backward()

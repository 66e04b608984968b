"""The estimate of a pass's memory against a count of its tensors on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.bench.gpu.cases import Case
from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute": "on", "exact": True},
        pytest.param({"recompute": "on"}, marks=pytest.mark.long),
        pytest.param({"exact": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "load"), [("0.6b@3", Case(4, 4, 64)), pytest.param("8b@4", Case(4, 1, 512), marks=pytest.mark.long)]
)
def test_the_estimate_is_between_the_peak_memory_of_a_pass_and_little_more(
    fake_gpu: FakeCudaProcess, name: str, load: Case, settings: dict[str, Any]
) -> None:
    assert_estimated(fake_gpu, name, load, settings)


def test_the_estimate_of_a_deep_model_has_what_each_layer_keeps_for_running_again(fake_gpu: FakeCudaProcess) -> None:
    assert_estimated(fake_gpu, "0.6b@14", Case(4, 4, 256), {"recompute": "on"})


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"recompute": "on"}], ids=str)
@pytest.mark.parametrize("name", ["9b-hybrid@4", "30b-a3b@3"])
def test_the_estimate_holds_for_a_hybrid_and_a_mixture(
    fake_gpu: FakeCudaProcess, name: str, settings: dict[str, Any]
) -> None:
    assert_estimated(fake_gpu, name, Case(4, 4, 64), settings)


def assert_estimated(fake_gpu: FakeCudaProcess, name: str, load: Case, settings: dict[str, Any]) -> None:
    scenario = "tests.support.fake_cuda.scenarios:memory_of_a_pass"
    peak, estimate, buffers = fake_gpu.call(scenario, name, load, **settings)
    assert peak <= estimate - buffers
    assert estimate <= 1.5 * (peak + buffers)

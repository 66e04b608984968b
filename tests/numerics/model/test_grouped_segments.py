"""Grouped matmul of all segments gives the results of one product per segment.

The library has it on a CPU too, as a loop, so all but its speed can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mini_model import build_mini_model
from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from tests.support.numerics.tenants import TENANTS, train
from workers.model.grouped_segments import GroupedRun, can_group, group_segments
from workers.model.segments import Segment
from workers.rows import AdapterViews, GroupShape

pytestmark = pytest.mark.usefixtures("own_base_models")


@pytest.fixture(scope="module")
def even_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with widths that are multiples of 8."""
    return build_mini_model(tmp_path_factory.mktemp("even") / "qwen3", "qwen3", vocab_size=264)


def grouped(model: Path, **config: Any) -> Driver:
    driver = Driver(model, **config)
    driver.engine.base_model.current.fuse = group_segments
    return driver


def test_grouped_matmul_equals_one_product_per_segment(even_vocabulary: Path) -> None:
    apart = distance(observe(grouped(even_vocabulary), TENANTS), observe(Driver(even_vocabulary), TENANTS))
    assert apart.logprobs < 1e-5
    assert apart.gradients < 1e-5


def test_experts_adapted_by_grouped_matmul_equal_those_of_one_product_per_share(tmp_path: Path) -> None:
    mixture = build_mini_model(tmp_path / "qwen3-moe", "qwen3-moe", vocab_size=264)
    apart = distance(observe(grouped(mixture), TENANTS), observe(Driver(mixture), TENANTS))
    assert apart.logprobs < 3e-5
    assert apart.gradients < 3e-5


@pytest.mark.slow
def test_grouped_matmul_in_bf16_is_as_close_to_fp32_as_one_product_per_segment(even_vocabulary: Path) -> None:
    expected = observe(Driver(even_vocabulary), TENANTS)
    one_by_one = distance(observe(Driver(even_vocabulary, dtype="bfloat16"), TENANTS), expected)
    together = distance(observe(grouped(even_vocabulary, dtype="bfloat16"), TENANTS), expected)
    assert together.logprobs < 2 * one_by_one.logprobs
    assert together.gradients < 2 * one_by_one.gradients


def test_adapters_of_several_scalings_are_computed_together(even_vocabulary: Path) -> None:
    tenants = [
        Tenant(spec=replace(make_spec(key, 4), alpha=alpha), passes=[make_data("cross_entropy", [9, 20], ord(key))])
        for key, alpha in (("a", 4.0), ("b", 32.0), ("c", 7.0))
    ]
    # Of two steps, because B is zero before the first.
    actual, expected = (train(make(even_vocabulary), tenants, num_steps=2) for make in (grouped, Driver))
    apart = distance(actual, expected)
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-4


def test_slots_with_gaps_between_them_get_their_own_gradients(even_vocabulary: Path) -> None:
    def gradients(driver: Driver) -> dict[str, torch.Tensor]:
        keys = ["a", "b", "c", "d"]
        driver.install(*(make_spec(key) for key in keys))
        for key in keys:  # each gets the next slot, and a B that is not zero
            driver.train(driver.backward(key, make_data("cross_entropy", [20])), driver.step(key))
        driver.train(*(driver.backward(key, make_data("cross_entropy", [9, 14], ord(key))) for key in "ad"))
        return {key: driver.gradient(key) for key in keys}

    expected, actual = gradients(Driver(even_vocabulary)), gradients(grouped(even_vocabulary))
    for key in "ad":
        torch.testing.assert_close(actual[key], expected[key], rtol=1e-4, atol=1e-6)
    for key in "bc":
        assert not actual[key].any()


def test_overflow_of_one_tenant_reaches_no_other_through_grouped_matmul(even_vocabulary: Path) -> None:
    sound = [Tenant(spec=make_spec(name), passes=[make_data("cross_entropy", [24], ord(name))]) for name in "ac"]
    driver, undisturbed = grouped(even_vocabulary), grouped(even_vocabulary)
    driver.install(*(tenant.spec for tenant in sound), make_spec("b"))
    undisturbed.install(*(tenant.spec for tenant in sound))
    (row,) = driver.engine.bank.acquire(["b"])
    row.weights.fill_(float("nan"))
    items = {key: driver.backward(key, make_data("cross_entropy", [24], ord(key))) for key in "abc"}
    results = dict(zip(items, driver.run(*items.values()), strict=True))
    undisturbed.train(*(undisturbed.backward(tenant.key, tenant.passes[0]) for tenant in sound))
    assert results["b"].error is not None
    for key in "ac":
        assert results[key].error is None
        torch.testing.assert_close(driver.gradient(key), undisturbed.gradient(key), rtol=1e-4, atol=1e-6)


def _segments(*rows: tuple[int, int, int, float], slab: tuple[()] = ()) -> list[Segment]:
    """Segments of (start, stop, slot, scaling)."""
    return [Segment(start, stop, AdapterViews(slab, (), slot, scaling)) for start, stop, slot, scaling in rows]


@pytest.mark.parametrize(
    ("segments", "num_runs"),
    [
        pytest.param(_segments((0, 5, 0, 4.0), (5, 30, 3, 4.0), (30, 31, 7, 4.0)), 1, id="any lengths and gaps"),
        pytest.param(_segments((0, 5, 2, 4.0), (5, 9, 2, 4.0), (9, 12, 3, 4.0)), 1, id="one adapter's own requests"),
        pytest.param(_segments((0, 5, 2, 4.0), (5, 9, 1, 4.0)), 2, id="a lower slot"),
        pytest.param(_segments((0, 5, 1, 4.0), (5, 9, 2, 8.0)), 1, id="another scaling"),
        pytest.param(_segments((0, 5, 1, 4.0), (6, 9, 2, 4.0)), 2, id="rows of the base model between them"),
    ],
)
def test_segments_are_in_as_few_runs_as_the_kernel_allows(segments: list[Segment], num_runs: int) -> None:
    runs = group_segments(segments)
    assert len(runs) == num_runs
    assert (runs[0].start, runs[-1].stop) == (segments[0].start, segments[-1].stop)


def test_segments_of_two_slabs_are_in_two_runs() -> None:
    first, second = AdapterViews([None], (), 0, 4.0), AdapterViews([None], (), 1, 4.0)
    run = GroupedRun(Segment(0, 5, first))
    assert not run.try_add(Segment(5, 9, second))


def test_only_gpus_with_the_kernel_use_grouped_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowed(capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16, d_out: int = 64) -> bool:
        report: Callable[..., tuple[int, int]] = lambda *_: capability  # noqa: E731
        monkeypatch.setattr(torch.cuda, "get_device_capability", report)  # of GPUs that are not here
        shape = GroupShape(index=0, kind="mlp", names=("a",), d_in=64, d_outs=(d_out,))
        gate = GroupShape(index=1, kind="frozen", names=("b",), d_in=64, d_outs=(1,))  # of no adapter
        return can_group(torch.device("cuda"), dtype, [shape, gate])

    assert allowed((9, 0))
    assert allowed((10, 0))
    assert not allowed((8, 0))
    assert not allowed((12, 0))
    assert not allowed((9, 0), torch.float32)
    assert not allowed((9, 0), d_out=258)
    assert not can_group(torch.device("cpu"), torch.bfloat16, [])

"""Training on a GPU: a CPU's fp32 numbers, to rounding; in exact mode no neighbour changes a bit."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.numerics.agreement import GRADIENTS, LOGPROBS, SMOOTH, distance, observe
from tests.support.numerics.harness import Driver, Tenant, code, make_data, make_spec
from tests.support.numerics.tenants import TENANTS, assert_same, train
from workers.contract.messages import AdamParams, ErrorCode
from workers.model.fused_runs import training_runs
from workers.model.pretrained import UnsupportedModelError

pytestmark = pytest.mark.gpu


def on_gpu(model: Path, **config: Any) -> Driver:
    """Return a driver on the GPU; skips what exact mode refuses of a hybrid, with the reason."""
    try:
        return Driver(model, **{"device": "cuda", **config})
    except UnsupportedModelError as error:
        if config.get("exact") and "in linear attention" in str(error):
            pytest.skip(str(error))
        raise


def test_fp32_on_the_gpu_is_fp32_on_the_cpu(even_model: Path) -> None:
    apart = distance(observe(on_gpu(even_model, dtype="float32"), TENANTS), observe(Driver(even_model), TENANTS))
    assert apart.logprobs < 1e-4
    assert apart.gradients < 1e-3


@pytest.mark.parametrize("exact", [False, True])
def test_bf16_on_the_gpu_is_fp32_on_the_cpu_to_rounding(even_model: Path, exact: bool) -> None:
    apart = distance(observe(on_gpu(even_model, exact=exact), SMOOTH), observe(Driver(even_model), SMOOTH))
    assert 0 < apart.logprobs < LOGPROBS
    assert 0 < apart.gradients < GRADIENTS


def test_bf16_is_the_default_on_a_gpu(even_qwen3: Path) -> None:
    base_model = on_gpu(even_qwen3).engine.base_model
    assert base_model.dtype == torch.bfloat16
    assert base_model.current.fuse is training_runs
    assert base_model.training_layers is not None


def test_exact_mode_has_kernels_graphs_and_calls_that_requests_share(even_qwen3: Path) -> None:
    base_model = on_gpu(even_qwen3, exact=True).engine.base_model
    assert base_model.current.fuse is training_runs
    assert base_model.has_pass_graphs
    attend = base_model.attend_packed([3, 4], [1, 1])
    assert attend.fewest_sequences is not None


def test_our_kernels_agree_with_one_product_per_segment(even_model: Path) -> None:
    fused, one_by_one = on_gpu(even_model), on_gpu(even_model)
    one_by_one.engine.base_model.current.fuse = None
    one_by_one.engine.base_model.training_layers = None
    expected = observe(Driver(even_model), SMOOTH)
    together, apart = (distance(observe(driver, SMOOTH), expected) for driver in (fused, one_by_one))
    assert together.gradients < 2 * apart.gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_co_batched_tenant_has_the_bits_of_solo_in_exact_mode(even_model: Path, dtype: str) -> None:
    config = {"dtype": dtype, "exact": True}
    for tenant in TENANTS:
        solo = train(on_gpu(even_model, **config), [tenant], num_steps=2)
        for tenants in (TENANTS, TENANTS[::-1]):
            together = train(on_gpu(even_model, **config), tenants, num_steps=2)
            assert_same({tenant.key: together[tenant.key]}, solo)


def test_exact_mode_gives_the_same_bits_again(even_qwen3: Path) -> None:
    first, second = (train(on_gpu(even_qwen3, exact=True), TENANTS, num_steps=2) for _ in range(2))
    assert_same(first, second)


def test_training_lowers_the_loss_as_on_the_cpu(even_qwen3: Path) -> None:
    data = make_data("cross_entropy", [40, 30])
    for datum in data:
        datum.loss_inputs["weights"][:] = 1.0

    def losses(driver: Driver) -> list[float]:
        driver.install(make_spec("a"))
        sums = []
        for _ in range(8):
            result, _ = driver.train(driver.backward("a", data), driver.step("a", AdamParams(learning_rate=3e-3)))
            sums.append(result.metrics["loss:sum"])
        return sums

    expected, actual = losses(Driver(even_qwen3)), losses(on_gpu(even_qwen3))
    assert actual[-1] < 0.9 * actual[0]
    assert actual == pytest.approx(expected, rel=0.02)


def test_tenant_whose_numbers_overflow_fails_without_others(even_qwen3: Path) -> None:
    sound = [Tenant(spec=make_spec(name), passes=[make_data("cross_entropy", [24], ord(name))]) for name in "ac"]
    driver = on_gpu(even_qwen3)
    driver.install(make_spec("b"), *(tenant.spec for tenant in sound))
    (row,) = driver.engine.bank.acquire(["b"])
    row.weights.fill_(float("nan"))
    row.refresh()
    items = {key: driver.backward(key, make_data("cross_entropy", [24], ord(key))) for key in "abc"}
    results = dict(zip(items, driver.run(*items.values()), strict=True))
    assert code(results["b"]) == ErrorCode.NON_FINITE
    for key in "ac":
        assert results[key].error is None
        assert driver.gradient(key).isfinite().all()
        assert driver.gradient(key).any()


def test_state_moves_between_gpu_and_cpu_without_changing_a_bit(even_qwen3: Path) -> None:
    gpu, cpu = on_gpu(even_qwen3), Driver(even_qwen3)
    gpu.install(make_spec("a"))
    gpu.train(gpu.backward("a", make_data("cross_entropy", [20])), gpu.step("a"))
    state = gpu.state("a")
    cpu.install(make_spec("a"), state=state)
    assert cpu.state("a").weights == state.weights
    assert cpu.state("a").optimizer == state.optimizer


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "ppo"])
def test_waits_for_the_device_do_not_grow_with_requests(even_qwen3: Path, loss_fn: str) -> None:
    def num_waits(num_tenants: int) -> int:
        driver = on_gpu(even_qwen3)
        keys = [f"t{number}" for number in range(num_tenants)]
        driver.install(*(make_spec(key) for key in keys))
        counts = []
        for _ in range(2):  # the first batch allocates
            passes = [driver.backward(key, make_data(loss_fn, [20, 30]), loss_fn) for key in keys]
            steps = [driver.step(key) for key in keys]
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    driver.train(*passes, *steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            counts.append(sum("synchronizing CUDA operation" in str(warning.message) for warning in seen))
        return counts[-1]

    assert 0 < num_waits(1) == num_waits(6) <= 10


def test_a_pass_frees_the_memory_that_it_took(even_qwen3: Path) -> None:
    driver = on_gpu(even_qwen3)
    driver.install(make_spec("a"))
    data = make_data("cross_entropy", [100] * 4)
    driver.train(driver.backward("a", data), driver.step("a"))
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        driver.train(driver.backward("a", data), driver.step("a"))
    assert torch.cuda.memory_allocated() <= before + (1 << 16)

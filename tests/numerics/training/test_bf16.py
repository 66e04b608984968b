"""A bf16 base model: adapters stay fp32, the layers use a bf16 copy, and results are those of fp32 to rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.numerics.agreement import GRADIENTS, HYBRID_FACTOR, LOGPROBS, SMOOTH, distance, observe
from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from workers.contract.messages import AdamParams, Datum


def assert_compute_copies_are_fresh(driver: Driver, *keys: str) -> None:
    for row in driver.engine.bank.acquire(keys):
        assert row.weights.dtype == torch.float32
        assert row.compute is not None
        assert torch.equal(row.compute, row.weights.bfloat16())


def factor_of(model_directory: Path) -> int:
    if Driver(model_directory).engine.base_model.expert_layers:
        pytest.skip("in bf16 some tokens go to other experts: test_experts.py counts them")
    return HYBRID_FACTOR if Driver(model_directory).engine.base_model.delta_layers else 1


@pytest.mark.slow
def test_log_probabilities_and_gradients_are_those_of_fp32_to_rounding(model_directory: Path) -> None:
    expected = observe(Driver(model_directory), SMOOTH)
    apart = distance(observe(Driver(model_directory, dtype="bfloat16"), SMOOTH), expected)
    factor = factor_of(model_directory)
    assert 0 < apart.logprobs < factor * LOGPROBS
    assert 0 < apart.gradients < factor * GRADIENTS


@pytest.mark.slow
def test_log_probabilities_and_gradients_at_temperatures_are_those_of_fp32_to_rounding(model_directory: Path) -> None:
    data = tuple(
        Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, "logprobs": datum.loss_inputs["logprobs"] - 9})
        for datum in make_data("stable_reinforce", [30, 4])
    )  # the sampler found the tokens so unlikely that every weight is 1 in both dtypes
    tenants = [Tenant(spec=make_spec("a"), loss_fn="stable_reinforce", passes=[data])]
    expected = observe(Driver(model_directory), tenants)
    apart = distance(observe(Driver(model_directory, dtype="bfloat16"), tenants), expected)
    factor = factor_of(model_directory)
    assert 0 < apart.logprobs < factor * LOGPROBS / 0.6
    assert 0 < apart.gradients < factor * GRADIENTS


def test_steps_too_small_for_bf16_add_up(qwen3: Path) -> None:
    driver = Driver(qwen3, dtype="bfloat16")
    driver.install(make_spec("a"))
    (row,) = driver.engine.bank.acquire(["a"])
    before = row.weights.clone()
    data = make_data("cross_entropy", [20])
    params = AdamParams(learning_rate=2.0**-12)  # A is up to 1/8, and an eighth of a step of bf16 there
    for _ in range(6):
        driver.train(driver.backward("a", data), driver.step("a", params))
    (row,) = driver.engine.bank.acquire(["a"])
    moved = (row.weights - before).abs().max()
    assert 4 * 2.0**-12 < moved < 7 * 2.0**-12
    assert_compute_copies_are_fresh(driver, "a")


def test_every_write_of_weights_refreshes_the_copy_that_layers_use(qwen3: Path) -> None:
    driver = Driver(qwen3, dtype="bfloat16", num_slots=2)
    driver.install(make_spec("a"), make_spec("b"))
    data = make_data("cross_entropy", [20])
    for key in "ab":
        driver.train(driver.backward(key, data), driver.step(key))
    assert_compute_copies_are_fresh(driver, "a", "b")
    driver.train(driver.save("a", publish_as="version"))  # evicts the other
    assert_compute_copies_are_fresh(driver, "a", "version")
    assert_compute_copies_are_fresh(driver, "b", "a")
    driver.engine.bank.replace("a", driver.engine.bank.entry("b").read())
    assert_compute_copies_are_fresh(driver, "a")


def test_fingerprint_names_the_dtype_and_exact_mode(qwen3: Path) -> None:
    fingerprints = [
        Driver(qwen3, **config).engine.info.fingerprint
        for config in ({}, {"dtype": "bfloat16"}, {"exact": True}, {"dtype": "bfloat16", "exact": True})
    ]
    assert len(set(fingerprints)) == 4
    assert "bfloat16" not in fingerprints[0]
    assert "exact" not in fingerprints[0]

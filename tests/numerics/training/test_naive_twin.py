"""The packed pass has the losses, log-probabilities and gradients of the naive twin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.harness import Driver, Tenant, make_data, make_spec
from tests.support.numerics.naive import NaiveModel, naive_pass
from workers.contract.adapted_modules import leaf_names
from workers.contract.messages import AdamParams, AdapterSpec

LENGTHS = [5, 17, 17, 33, 9, 1]


def assert_close(actual: Tensor, expected: Tensor, what: str, rounding: float = 1e-5) -> None:
    """Assert equality to 1e-5 of the largest value: fp32, summed in another order."""
    tolerance = rounding * (1 + float(expected.abs().max()))
    assert float((actual - expected).abs().max()) <= tolerance, what


def warmed_up(model: Path, tenants: list[Tenant]) -> Driver:
    """Return an engine with adapters after one step, so that B is not zero."""
    driver = Driver(model)
    driver.install(*(tenant.spec for tenant in tenants))
    warm_up = make_data("cross_entropy", [40])
    driver.train(*(driver.backward(tenant.key, warm_up) for tenant in tenants))
    driver.train(*(driver.step(tenant.key, AdamParams(learning_rate=3e-2)) for tenant in tenants))
    return driver


@pytest.mark.slow
def test_packed_pass_equals_one_sequence_at_a_time(model_directory: Path) -> None:
    tenants = [
        Tenant(spec=make_spec("sft", 8), passes=[make_data("cross_entropy", LENGTHS)]),
        Tenant(spec=make_spec("many", 2), passes=[make_data("cross_entropy", [12, 23], num_targets=4)]),
        Tenant(spec=make_spec("ppo", 16), passes=[make_data("ppo", LENGTHS)], loss_fn="ppo"),
        Tenant(
            spec=make_spec("attn", 4, train_mlp=False, train_unembed=False),
            passes=[make_data("dro", [29])],
            loss_fn="dro",
        ),
        Tenant(
            spec=make_spec("head", 4, train_attn=False, train_mlp=False), passes=[make_data("cross_entropy", [300])]
        ),
        Tenant(spec=make_spec("gspo", 1, alpha=4.0), passes=[make_data("gspo", [19, 280])], loss_fn="gspo"),
        Tenant(
            spec=make_spec("drawn", 8),
            passes=[make_data("stable_reinforce", [*LENGTHS, 280])],
            loss_fn="stable_reinforce",
        ),
    ]
    driver = warmed_up(model_directory, tenants)
    model = driver.engine.base_model
    # Of experts behind linear attention the twin's gradients in fp32 differ by 1.2e-5 from its own in fp64.
    rounding = 3e-5 if model.delta_layers and model.expert_layers else 1e-5
    results = driver.train(*(driver.backward(t.key, t.passes[0], t.loss_fn) for t in tenants))
    for tenant, result in zip(tenants, results, strict=True):
        naive = NaiveModel(model_directory, tenant.spec, driver.weights(tenant.key))
        loss, logprobs, gradients = naive_pass(naive, tenant.passes[0], tenant.loss_fn, {})
        assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-3)
        for actual, expected in zip(result.logprobs, logprobs, strict=True):
            assert actual.shape == tuple(expected.shape)
            assert actual.dtype == np.float32
            assert_close(torch.from_numpy(actual), expected, "log-probabilities")
        actual_gradients = driver.gradients(tenant.key)
        assert actual_gradients.keys() == gradients.keys()
        for name, expected in gradients.items():
            assert_close(actual_gradients[name], expected, f"{tenant.key}: gradient of {name}", rounding)


def test_forward_gives_the_log_probabilities_of_a_forward_backward_and_no_gradient(model_directory: Path) -> None:
    data = make_data("cross_entropy", LENGTHS)
    driver = warmed_up(model_directory, [Tenant(spec=make_spec("a"), passes=[])])
    forward, backward = driver.run(driver.forward("a", data), driver.backward("a", data))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(forward.logprobs, backward.logprobs, strict=True))
    assert forward.metrics == backward.metrics
    gradient = driver.gradient("a")
    driver.train(driver.forward("a", data))
    assert torch.equal(driver.gradient("a"), gradient)


def test_gradients_add_up_over_requests(qwen3: Path) -> None:
    data = [make_data("cross_entropy", [13, 20], seed) for seed in range(3)]
    driver = warmed_up(qwen3, [Tenant(spec=make_spec("a"), passes=[])])
    for request in data:
        driver.train(driver.backward("a", request))
    naive = NaiveModel(qwen3, make_spec("a"), driver.weights("a"))
    *_, gradients = [naive_pass(naive, request, "cross_entropy", {})[-1] for request in data]
    for name, actual in driver.gradients("a").items():
        assert_close(actual, gradients[name], name)


@pytest.mark.parametrize("flags", [{"train_attn": False}, {"train_mlp": False}, {"train_unembed": False}], ids=str)
def test_flags_choose_the_modules_that_are_trained(model_directory: Path, flags: dict[str, bool]) -> None:
    spec: AdapterSpec = make_spec("a", **flags)
    driver = Driver(model_directory)
    driver.install(spec)
    driver.train(driver.backward("a", make_data("cross_entropy", [20])))
    leaves = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in driver.weights("a")}
    assert leaves == set(leaf_names(driver.engine.info.modules, *spec.kinds))

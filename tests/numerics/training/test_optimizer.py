"""AdamW per adapter against torch's own, and the metrics of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.numerics.harness import Driver, code, make_data, make_spec, message_of
from workers.contract.messages import AdamParams, ErrorCode

STEPS = (
    AdamParams(learning_rate=1e-2),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.999, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5),
    AdamParams(learning_rate=0.0),
    AdamParams(learning_rate=1e-3, eps=1e-3, weight_decay=1.0, grad_clip_norm=1e6),
)


def test_steps_equal_torch_adamw_with_each_steps_own_hyperparameters(qwen3: Path) -> None:
    driver = Driver(qwen3)
    driver.install(make_spec("a", 4), make_spec("b", 16))
    parameters = {name: torch.nn.Parameter(matrix) for name, matrix in driver.weights("a").items()}
    optimizer = torch.optim.AdamW(parameters.values(), foreach=False)
    for number, params in enumerate(STEPS):
        data = make_data("cross_entropy", [20, 13], number)
        driver.train(driver.backward("a", data), driver.backward("b", data))
        before = driver.weights("a")
        for name, gradient in driver.gradients("a").items():
            parameters[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), params.grad_clip_norm or 1e30)
        optimizer.param_groups[0].update(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
        )
        optimizer.step()
        result, _ = driver.train(driver.step("a", params), driver.step("b", AdamParams()))
        for name, matrix in driver.weights("a").items():
            torch.testing.assert_close(matrix, parameters[name].detach(), rtol=2e-5, atol=2e-6)
        change = torch.cat([(matrix - before[name]).flatten() for name, matrix in driver.weights("a").items()])
        assert result.metrics["grad_norm:last"] == pytest.approx(float(norm), rel=1e-4)
        assert result.metrics["update_norm:last"] == pytest.approx(float(change.norm()), rel=1e-3, abs=1e-6)
        whole = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        assert result.metrics["adapter_norm:last"] == pytest.approx(float(whole.norm()), rel=1e-4)
        assert result.metrics["num_datums:sum"] == 2
        assert not driver.gradient("a").any()


def test_step_without_gradients_steps_with_a_zero_gradient(qwen3: Path) -> None:
    driver = Driver(qwen3)
    driver.install(make_spec("a"))
    before = driver.weights("a")
    (result,) = driver.train(driver.step("a", AdamParams(learning_rate=0.1, weight_decay=0.5)))
    assert result.metrics["grad_norm:last"] == 0
    assert result.metrics["num_datums:sum"] == 0
    for name, matrix in driver.weights("a").items():
        torch.testing.assert_close(matrix, before[name] * (1 - 0.1 * 0.5))


def test_padding_of_a_rank_stays_zero(qwen3: Path) -> None:
    driver = Driver(qwen3)
    driver.install(make_spec("a", 2))
    for number in range(3):
        driver.train(driver.backward("a", make_data("cross_entropy", [30], number)))
        driver.train(driver.step("a", AdamParams(learning_rate=0.1, weight_decay=0.1)))
    entry = driver.engine.bank.entry("a")
    host = driver.engine.bank.entry("a").read()
    for vector in (host.weights, host.exp_avg, host.exp_avg_sq):
        assert vector is not None
        padding = vector.clone()
        for _, matrix in entry.layout.matrices(padding.numpy(), 2):
            matrix.fill(0)
        assert vector.any()
        assert not padding.any()


@pytest.mark.parametrize("value", [1e25, float("inf"), float("nan")])
def test_gradient_whose_norm_is_not_finite_changes_neither_weights_nor_moments(qwen3: Path, value: float) -> None:
    """Values of 1e25 are finite, but their squares would make the second moment infinite in all later steps."""
    driver = Driver(qwen3)
    driver.install(make_spec("a"))
    driver.train(driver.backward("a", make_data("cross_entropy", [20])), driver.step("a"))
    driver.train(driver.backward("a", make_data("cross_entropy", [20])))
    (row,) = driver.engine.bank.acquire(["a"])
    vectors = (row.weights, row.exp_avg, row.exp_avg_sq)
    copies = [vector.clone() for vector in vectors if vector is not None]
    assert row.grad is not None
    row.grad[:100] = value
    (result,) = driver.run(driver.step("a", AdamParams(grad_clip_norm=1.0)))
    assert code(result) == ErrorCode.NON_FINITE
    assert all(torch.equal(a, b) for a, b in zip(vectors, copies, strict=True) if a is not None)
    assert driver.engine.bank.entry("a").read().grad is None


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (AdamParams(learning_rate=float("nan")), "learning_rate"),
        (AdamParams(learning_rate=-1.0), "learning_rate"),
        (AdamParams(beta1=1.0), "beta1"),
        (AdamParams(beta2=-0.1), "beta2"),
        (AdamParams(eps=0.0), "eps"),
        (AdamParams(weight_decay=float("inf")), "weight_decay"),
        (AdamParams(grad_clip_norm=-1.0), "grad_clip_norm"),
    ],
)
def test_invalid_hyperparameters_are_refused_and_the_gradient_is_dropped(
    qwen3: Path, params: AdamParams, field: str
) -> None:
    driver = Driver(qwen3)
    driver.install(make_spec("a"))
    driver.train(driver.backward("a", make_data("cross_entropy", [20])))
    before = driver.weights("a")
    (result,) = driver.run(driver.step("a", params))
    assert code(result) == ErrorCode.INVALID_ARGUMENT
    assert field in message_of(result)
    assert all(torch.equal(before[name], matrix) for name, matrix in driver.weights("a").items())
    assert not driver.gradient("a").any()
    driver.train(driver.backward("a", make_data("cross_entropy", [20])), driver.step("a"))

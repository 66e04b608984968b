"""Losses and steps that wait once for the device have the results of those that wait each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.harness import Driver, Tenant, assemble_again, code, make_data, make_spec
from tests.support.numerics.tenants import TENANTS
from workers.bank.bank import Bank
from workers.bank.entries import Row
from workers.contract.messages import AdamParams, ErrorCode
from workers.rows import GroupShape
from workers.training import device_logits, optim
from workers.training.device_logits import DeviceLoss
from workers.training.optim import NonFiniteStepError, Step, StepNorms, adamw_step, adamw_steps

pytestmark = pytest.mark.usefixtures("own_base_models")


def deferred(model: Path, **config: Any) -> Driver:
    """Return an engine that waits once, in fp32 on a CPU, where both ways can run."""
    driver = Driver(model, **config)
    base_model = driver.engine.base_model
    base_model.is_deferred = True
    assemble_again(driver.engine)
    return driver


@pytest.mark.parametrize("block_rows", [None, 16], ids=["whole requests", "parts of requests"])
def test_results_gradients_and_steps_are_those_of_the_cpu(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, block_rows: int | None
) -> None:
    if block_rows is not None:  # real blocks of logits are longer than these sequences
        monkeypatch.setattr(device_logits, "block_rows_of", lambda *_, **__: block_rows)
    expected, actual = observe(Driver(qwen3), TENANTS), observe(deferred(qwen3), TENANTS)
    apart = distance(actual, expected)
    assert apart.logprobs < 1e-5
    assert apart.gradients < 1e-5
    for key, trace in expected.items():
        for mine, theirs in zip(actual[key].metrics, trace.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_request_whose_loss_overflows_fails_without_its_neighbours(
    qwen3: Path, loss_fn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = [Tenant(spec=make_spec(name), passes=[make_data("cross_entropy", [24], ord(name))]) for name in "ac"]
    driver, undisturbed = deferred(qwen3), deferred(qwen3)
    driver.install(make_spec("b"), *(tenant.spec for tenant in sound))
    undisturbed.install(*(tenant.spec for tenant in sound))
    data = make_data(loss_fn, [24])
    name = "weights" if loss_fn == "cross_entropy" else "advantages"
    data[0].loss_inputs[name][5] = float("inf")
    gradients: list[torch.Tensor | None] = []
    run = DeviceLoss.run

    def recording(self: DeviceLoss, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        gradients.append(run(self, *args, **kwargs))
        return gradients[-1]

    backward = [driver.backward(tenant.key, tenant.passes[0]) for tenant in sound]
    with monkeypatch.context() as patch:
        patch.setattr(DeviceLoss, "run", recording)  # the gradient of hidden states is in no result
        first, failed, last = driver.run(backward[0], driver.backward("b", data, loss_fn), backward[1])
    (gradient,) = gradients
    assert gradient is not None
    assert gradient.isfinite().all(), "infinite slopes are not propagated"
    solo = undisturbed.train(*(undisturbed.backward(tenant.key, tenant.passes[0]) for tenant in sound))
    assert code(failed) == ErrorCode.NON_FINITE
    for mine, theirs in zip((first, last), solo, strict=True):
        assert mine.error is None
        assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-5)
    for tenant in sound:
        torch.testing.assert_close(driver.gradient(tenant.key), undisturbed.gradient(tenant.key))


def test_each_step_of_a_batch_has_its_own_result(qwen3: Path) -> None:
    driver = deferred(qwen3)
    driver.install(*(make_spec(key) for key in "abcd"))
    driver.train(*(driver.backward(key, make_data("cross_entropy", [20])) for key in "abc"))
    driver.engine.bank.acquire(["b"])[0].grad[3] = float("nan")  # type: ignore[index]
    before = driver.weights("b")
    stale = driver.step("d")
    driver.seqs["d"] = 5
    results = driver.run(
        driver.step("a"), driver.step("b"), driver.step("c", AdamParams(learning_rate=-1.0)), driver.step("d"), stale
    )
    codes = [None if result.error is None else result.error.code for result in results]
    assert codes == [None, ErrorCode.NON_FINITE, ErrorCode.INVALID_ARGUMENT, ErrorCode.OUT_OF_ORDER, None]
    assert results[0].metrics["num_datums:sum"] == 1
    assert all(torch.equal(value, before[name]) for name, value in driver.weights("b").items())
    assert not any(driver.gradient(key).any() for key in "abc")
    assert all(result.engine_s >= 0 for result in results)


SHAPE = GroupShape(index=0, kind="mlp", names=("up_proj",), d_in=24, d_outs=(40,))


def make_rows(count: int) -> list[Row]:
    bank = Bank([SHAPE], count, compute_dtype=torch.bfloat16)
    keys = [f"a{index}" for index in range(count)]
    for key in keys:
        bank.add(key, make_spec(key, train_attn=False, train_unembed=False))
    rows = bank.acquire(keys)
    for index, row in enumerate(rows):
        generator = torch.Generator().manual_seed(index)
        for vector in (row.weights, row.exp_avg, row.exp_avg_sq, row.grad):
            assert vector is not None
            vector.copy_(torch.randn(vector.shape, generator=generator).abs())
    return rows


def state(row: Row) -> list[torch.Tensor]:
    return [vector.clone() for vector in (row.weights, row.exp_avg, row.exp_avg_sq, row.grad) if vector is not None]


PARAMS = (
    AdamParams(learning_rate=0.1, weight_decay=0.1),
    AdamParams(learning_rate=0.1, weight_decay=0.1),
    AdamParams(learning_rate=0.01, grad_clip_norm=0.5),
    AdamParams(learning_rate=0.01, grad_clip_norm=1e9),
)


@pytest.mark.parametrize("kept_bytes_max", [1, optim.KEPT_BYTES_MAX])
def test_steps_together_are_the_steps_one_by_one(kept_bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "KEPT_BYTES_MAX", kept_bytes_max)  # real rows would need gigabytes
    rows, others = make_rows(4), make_rows(4)
    expected = [
        adamw_step(row, params, 3 + index) for index, (row, params) in enumerate(zip(others, PARAMS, strict=True))
    ]
    norms = adamw_steps(
        [
            Step(row=row, params=params, num_steps=3 + index)
            for index, (row, params) in enumerate(zip(rows, PARAMS, strict=True))
        ]
    )
    for row, other, norm, its in zip(rows, others, norms, expected, strict=True):
        assert isinstance(norm, StepNorms)
        assert (norm.gradient, norm.update, norm.adapter) == pytest.approx((its.gradient, its.update, its.adapter))
        for mine, theirs in zip(state(row), state(other), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert row.compute is not None
        assert torch.equal(row.compute, row.weights.bfloat16())


@pytest.mark.parametrize(
    ("gradient", "learning_rate", "reason"),
    [(float("nan"), 0.1, "the gradient's norm is nan"), (1.0, 3e38, "the norm of the weights would be inf")],
)
def test_step_that_is_not_finite_changes_no_weights_and_no_neighbour(
    gradient: float, learning_rate: float, reason: str
) -> None:
    rows, others = make_rows(2), make_rows(2)
    assert rows[0].grad is not None
    rows[0].grad[1] = gradient
    before = state(rows[0])
    params = (AdamParams(learning_rate=learning_rate), AdamParams(learning_rate=0.1))
    norms = adamw_steps([Step(row=row, params=own, num_steps=1) for row, own in zip(rows, params, strict=True)])
    assert isinstance(norms[0], NonFiniteStepError)
    assert reason in str(norms[0])
    for mine, theirs in zip(state(rows[0])[:3], before, strict=False):
        assert torch.equal(mine, theirs)
    adamw_step(others[1], params[1], 1)
    for mine, theirs in zip(state(rows[1]), state(others[1]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_step_without_memory_for_its_copies_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(2)
    before = [state(row) for row in rows]

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optim, "_Kept", full)  # stands for a GPU without free memory
    outcomes = adamw_steps([Step(row=row, params=PARAMS[0], num_steps=1) for row in rows])
    assert all(isinstance(outcome, torch.OutOfMemoryError) for outcome in outcomes)
    for row, vectors in zip(rows, before, strict=True):
        assert all(torch.equal(mine, old) for mine, old in zip(state(row), vectors, strict=True))

"""Snapshots in the middle of a gradient window: a copy made from one continues with the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load, save

from tests.support.numerics.harness import (
    Driver,
    Trace,
    code,
    make_data,
    make_spec,
    message_of,
    note,
    trained,
)
from workers.contract.messages import AdamParams, AdapterState, ErrorCode

PENDING = make_data("cross_entropy", [20, 11, 33])
REST = make_data("cross_entropy", [17, 8], 1)
STEP = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=5.0)
SPECS = {"a": make_spec("a"), "b": make_spec("b", 16), "padded": make_spec("padded", 3, train_mlp=False)}


@pytest.fixture
def driver(qwen3: Path) -> Driver:
    return started(qwen3)


def started(model: Path) -> Driver:
    """Return an engine of one slot, so that every other adapter is in host memory."""
    driver = Driver(model, num_slots=1)
    driver.install(*SPECS.values())
    return driver


def in_a_window(driver: Driver, key: str) -> None:
    """Run one request of one chunk and one of two, without a step."""
    driver.train(driver.backward(key, PENDING))
    driver.train(*driver.chunks(key, [REST, PENDING[:1]]))


def rest_of_the_run(driver: Driver, key: str) -> Trace:
    """Run the rest of the window and one more; return the trace."""
    trace = Trace()
    for _ in range(2):
        for result in driver.train(driver.backward(key, REST)):
            note(trace, result)
        trace.gradients.append(driver.gradient(key).numpy().tobytes())
        for result in driver.train(driver.step(key, STEP)):
            note(trace, result)
        trace.states.append(driver.state(key))
    return trace


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("key", ["a", "padded"])
@pytest.mark.parametrize("is_evicted", [False, True], ids=["in its slot", "evicted"])
def test_copy_made_in_the_middle_of_a_window_continues_with_the_same_bits(
    qwen3: Path, key: str, num_steps: int, is_evicted: bool
) -> None:
    undisturbed, first, second = started(qwen3), started(qwen3), started(qwen3)
    for each in (undisturbed, first):
        trained(each, key, num_steps)
        in_a_window(each, key)
    if is_evicted:
        first.train(first.backward("b", PENDING))
    assert (first.engine.bank.entry(key).row is None) == is_evicted
    snapshot = first.snapshot(key)
    assert snapshot.gradient is not None
    assert snapshot.num_datums == len(PENDING) + len(REST) + 1
    second.train(second.backward(key, REST))  # replaced, with its pending gradient
    second.install(SPECS[key], state=snapshot)
    assert second.snapshot(key) == snapshot
    trace = rest_of_the_run(undisturbed, key)
    assert trace.metrics[1]["num_datums:sum"] == snapshot.num_datums + len(REST)
    trace.assert_equal(rest_of_the_run(first, key))
    trace.assert_equal(rest_of_the_run(second, key))


def test_copy_that_is_evicted_before_it_continues_has_the_same_bits(driver: Driver, qwen3: Path) -> None:
    in_a_window(driver, "a")
    other = started(qwen3)
    other.install(SPECS["a"], state=driver.snapshot("a"))
    other.train(other.forward("a", REST), other.backward("b", REST))
    driver.train(driver.forward("a", REST))
    assert other.engine.bank.entry("a").row is None
    rest_of_the_run(driver, "a").assert_equal(rest_of_the_run(other, "a"))


def test_snapshot_between_windows_holds_no_gradient_and_the_copy_continues_with_the_same_bits(
    driver: Driver, qwen3: Path
) -> None:
    trained(driver, "a")
    driver.train(driver.forward("a", PENDING))
    snapshot = driver.snapshot("a")
    assert (snapshot.gradient, snapshot.num_datums) == (None, 0)
    other = started(qwen3)
    other.install(SPECS["a"], state=snapshot)
    assert not other.engine.bank.entry("a").has_grad
    rest_of_the_run(driver, "a").assert_equal(rest_of_the_run(other, "a"))


def test_snapshot_of_a_closed_window_holds_no_gradient(driver: Driver) -> None:
    in_a_window(driver, "a")
    (failed,) = driver.run(driver.backward("a", REST, "nonsense"))
    assert code(failed) == ErrorCode.INVALID_ARGUMENT
    snapshot = driver.snapshot("a")
    assert (snapshot.gradient, snapshot.num_datums) == (None, 0)


def test_gradient_that_was_installed_is_dropped_like_any_other(driver: Driver, qwen3: Path) -> None:
    in_a_window(driver, "a")
    copy, fresh = started(qwen3), started(qwen3)
    copy.install(SPECS["a"], state=driver.snapshot("a"))
    for each in (copy, fresh):
        each.train(each.backward("a", REST, drop_gradient=each is copy))
        (step,) = each.train(each.step("a"))
        assert step.metrics["num_datums:sum"] == len(REST)
    assert copy.state("a").weights == fresh.state("a").weights


def test_load_discards_the_pending_gradient_and_takes_none_from_a_state(driver: Driver) -> None:
    in_a_window(driver, "a")
    snapshot = driver.snapshot("a")
    for gradient in (snapshot.gradient, b"damaged"):
        driver.train(driver.backward("a", REST))
        driver.train(driver.load("a", dataclasses.replace(snapshot, gradient=gradient)))
        loaded = driver.snapshot("a")
        assert (loaded.gradient, loaded.num_datums) == (None, 0)
        (step,) = driver.train(driver.step("a"))
        assert (step.metrics["num_datums:sum"], step.metrics["grad_norm:last"]) == (0, 0)


def without_a_matrix(state: AdapterState) -> AdapterState:
    assert state.gradient is not None
    _, *tensors = load(state.gradient).items()
    return dataclasses.replace(state, gradient=bytes(save(dict(tensors))))


@pytest.mark.parametrize(
    "damage", [lambda state: dataclasses.replace(state, gradient=state.gradient[:-4]), without_a_matrix]
)
def test_damaged_gradient_is_data_loss(driver: Driver, damage: Callable[[AdapterState], AdapterState]) -> None:
    in_a_window(driver, "a")
    snapshot = driver.snapshot("a")
    driver.install(SPECS["a"], state=damage(snapshot))
    (result,) = driver.run(driver.step("a"))
    assert code(result) == ErrorCode.DATA_LOSS
    assert "gradients" in message_of(result)
    assert "a" not in driver.engine.bank


def test_gradient_that_overflowed_is_not_saved_and_its_step_still_fails(driver: Driver) -> None:
    """No install accepts such a gradient. Without it, a copy's step would succeed although this one's fails."""
    in_a_window(driver, "a")
    gradient = driver.engine.bank.acquire(["a"])[0].grad
    assert gradient is not None
    gradient[7] = float("inf")
    (refused,) = driver.run(driver.snapshot_item("a"))
    assert code(refused) == ErrorCode.NON_FINITE
    assert refused.state is None
    assert driver.state("a").gradient is None
    (step,) = driver.run(driver.step("a"))
    assert code(step) == ErrorCode.NON_FINITE
    trained(driver, "a")
    assert driver.snapshot("a").num_datums == 0

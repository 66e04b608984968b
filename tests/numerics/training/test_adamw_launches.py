"""AdamW by two launches, in Triton's interpreter, against torch's own in fp64 and the steps without them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.numerics.adamw_rows import (
    PARAMS,
    assert_stepped,
    by_torch,
    is_same,
    make_row,
    make_rows,
    state,
    steps_of,
)
from tests.support.numerics.harness import Driver, assemble_again, make_data, make_spec
from tests.support.numerics.interpreted import interpret, metered
from workers.bank.entries import RowNorms
from workers.contract.messages import AdamParams
from workers.model import base_model
from workers.model.gpu_operations import has_kernels
from workers.selftest import loading
from workers.training import adamw_launches, optim
from workers.training.adamw_launches import PARTS_MAX, part_values
from workers.training.optim import NonFiniteStepError, Step, StepNorms, adamw_steps

NAMES = ("weights", "exp_avg", "exp_avg_sq", "grad")


@contextmanager
def launches() -> Iterator[None]:
    """Let steps in this block be launches, as on a GPU, where an overflow is no warning."""
    interpret()
    with patch.object(optim, "has_kernels", lambda _: True), np.errstate(all="ignore"):
        yield


def launched(steps: Sequence[Step]) -> list[StepNorms | Exception]:
    with launches():
        return adamw_steps(steps)


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("parts_max", [2, PARTS_MAX], ids=["many blocks a part", "a block a part"])
def test_steps_of_rows_of_any_length_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch, parts_max: int, *, has_copy: bool
) -> None:
    interpret()
    from workers.training import adamw_kernels  # not before Triton is known to be there

    for module in (adamw_launches, adamw_kernels):
        monkeypatch.setattr(module, "PARTS_MAX", parts_max)  # a row with so many parts has a million values
    rows, others = make_rows(has_copy=has_copy), make_rows(has_copy=has_copy)
    for number in range(2):  # with norms that are not known, and with those of the step before
        steps = steps_of(rows, num_steps=3 + number)
        expected = [by_torch(step) for step in steps]
        slow = adamw_steps(steps_of(others, num_steps=3 + number))
        for step, norms, right, theirs in zip(steps, launched(steps), expected, slow, strict=True):
            assert_stepped(step, norms, right)
            assert isinstance(theirs, StepNorms)
        for row, other in zip(rows, others, strict=True):
            for mine, its in zip(state(row)[:3], state(other), strict=False):
                torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
            assert row.grad is not None
            assert other.grad is not None
            row.grad.copy_(torch.linspace(-2, 3, len(row.grad)))
            other.grad.copy_(row.grad)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    rows, reordered, solo = make_rows(), make_rows(), make_rows()
    together = launched(steps_of(rows))
    backwards = launched(steps_of(reordered)[::-1])[::-1]
    alone = [launched([step])[0] for step in steps_of(solo)]
    assert together == backwards == alone
    for one, two, three in zip(rows, reordered, solo, strict=True):
        assert is_same(state(one), state(two))
        assert is_same(state(one), state(three))


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_gradient_that_is_not_finite_changes_its_row_no_more_than_its_neighbours(value: float) -> None:
    """Values of 1e25 are finite, but their squares would make the second moment infinite in all later steps."""
    interpret()
    rows, sound = make_rows(), make_rows()
    assert rows[3].grad is not None
    rows[3].grad[5] = value
    before = state(rows[3])
    with metered() as moved:
        outcomes = launched(steps_of(rows))
    expected = launched(steps_of(sound))
    assert moved.num_launches == 2
    assert isinstance(outcomes[3], NonFiniteStepError)
    assert "the gradient's norm is " in str(outcomes[3])
    assert is_same(state(rows[3])[:3], before[:3])
    assert is_same(state(rows[3])[4:], before[4:])
    for index in (0, 1, 2, 4):
        assert outcomes[index] == expected[index]
        assert is_same(state(rows[index]), state(sound[index]))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("params", [AdamParams(learning_rate=3e38), AdamParams(learning_rate=1e30, weight_decay=1e30),
                                    AdamParams(eps=1e-50)], ids=str)  # fmt: skip
def test_step_whose_weights_overflow_changes_nothing(params: AdamParams, *, is_known: bool) -> None:
    interpret()
    rows, sound = make_rows(), make_rows()
    for row in (*rows, *sound):
        assert row.exp_avg is not None
        assert row.exp_avg_sq is not None
        row.exp_avg_sq[:] = 0  # so that a value may be divided by an epsilon that is zero in fp32
        if is_known:
            row.norms = RowNorms(float(row.weights.norm()), float(row.exp_avg.norm()))
    assert rows[3].grad is not None
    rows[3].grad.zero_()
    before = state(rows[3])
    with metered() as moved:
        outcomes = launched(steps_of(rows, [*PARAMS[:3], params, PARAMS[4]]))
    expected = launched(steps_of(sound))
    assert moved.num_launches == 4
    assert isinstance(outcomes[3], NonFiniteStepError)
    assert "the norm of the weights would be " in str(outcomes[3])
    assert is_same(state(rows[3]), before)
    for index in (0, 1, 2, 4):
        assert outcomes[index] == expected[index]
        assert is_same(state(rows[index]), state(sound[index]))


def test_a_step_with_copies_has_the_bits_of_one_without() -> None:
    interpret()
    rows, others = make_rows(), make_rows()
    for number in range(2):
        with metered() as fast:
            outcomes = launched(steps_of(rows, num_steps=1 + number))
        for other in others:
            other.norms = RowNorms(math.inf, math.inf)  # so that nothing is known of the new weights
        with metered() as slow:
            assert launched(steps_of(others, num_steps=1 + number)) == outcomes
        assert (fast.num_launches, slow.num_launches) == (2, 4)
        for row, other in zip(rows, others, strict=True):
            assert is_same(state(row), state(other))
            for vector in (row.grad, other.grad):
                assert vector is not None
                vector.copy_(torch.linspace(-1, 2, len(vector)))


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_second_moment_that_is_no_square_fails_the_step_and_stays(value: float) -> None:
    row = make_row(3000)
    assert row.exp_avg_sq is not None
    row.exp_avg_sq[2900] = value
    before = state(row)
    (outcome,) = launched([Step(row=row, params=AdamParams(), num_steps=1)])
    assert isinstance(outcome, NonFiniteStepError)
    for mine, old in zip(state(row)[:3], before, strict=False):
        assert torch.equal(mine.nan_to_num(7), old.nan_to_num(7))


def test_infinite_second_moment_moves_no_weight_as_by_torch() -> None:
    rows = [make_row(100), make_row(100)]
    for row in rows:
        assert row.exp_avg_sq is not None
        row.exp_avg_sq[:] = math.inf
    for number in range(2):
        ours, theirs = (Step(row=row, params=AdamParams(), num_steps=1 + number) for row in rows)
        for (outcome,) in (launched([ours]), adamw_steps([theirs])):
            assert isinstance(outcome, StepNorms)
            assert outcome.update == 0
    assert torch.equal(rows[0].weights, rows[1].weights)


def test_step_without_memory_for_its_copy_changes_nothing_and_its_neighbours_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = make_rows()
    before = state(rows[1])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(optim, "_Kept", full)  # stands for a GPU without free memory
    outcomes = launched(steps_of(rows, [replace(own, eps=1e-50) if own is PARAMS[1] else own for own in PARAMS]))
    assert isinstance(outcomes[1], torch.OutOfMemoryError)
    assert is_same(state(rows[1]), before)
    assert all(isinstance(outcome, StepNorms) for index, outcome in enumerate(outcomes) if index != 1)


def powers(least: int, most: int) -> st.SearchStrategy[float]:
    return st.floats(least, most).map(lambda power: float(10.0**power))


@settings(max_examples=40)
@given(
    learning_rate=powers(-30, 38),
    eps=powers(-50, 38),
    weight_decay=st.one_of(st.just(0.0), powers(-20, 38)),
    beta1=st.sampled_from([0.0, 0.9, 1 - 2.0**-53]),
    beta2=st.sampled_from([0.0, 0.95, 1 - 2.0**-53]),
    grad_clip_norm=st.one_of(st.just(0.0), powers(-30, 38)),
    scales=st.lists(powers(-30, 19), min_size=4, max_size=4),
    num_steps=st.sampled_from([1, 2, 100_000]),
)
def test_whatever_the_numbers_a_row_stays_finite_or_unchanged(
    scales: list[float], num_steps: int, **hyperparameters: float
) -> None:
    row = make_row(70)
    for name, scale in zip(NAMES, scales, strict=True):
        getattr(row, name).mul_(scale)
    for number in range(2):
        before = state(row)
        (outcome,) = launched([Step(row=row, params=AdamParams(**hyperparameters), num_steps=num_steps + number)])
        if isinstance(outcome, NonFiniteStepError):
            assert is_same(state(row)[:3], before[:3])
        assert all(vector.isfinite().all() for vector in state(row)[:3])
        assert row.grad is not None
        row.grad.copy_(torch.linspace(-1, 1, 70) * scales[3])


@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_launches_move_as_many_bytes_as_the_fake_device_counts(num_rows: int, *, has_copy: bool) -> None:
    interpret()
    rows = [make_row(12_000 + seed, seed, has_copy=has_copy) for seed in range(num_rows)]
    for bytes_a_value in ((47, 45), (35, 33)):  # with norms that are not known, and with those of the step before
        with metered() as moved:
            launched([Step(row=row, params=PARAMS[0], num_steps=1) for row in rows])
        assert moved.num_launches == moved.num_counted == 2
        assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.01)
        assert moved.num_bytes / sum(len(row.weights) for row in rows) < bytes_a_value[not has_copy]


def test_a_row_has_the_norms_that_its_step_has_left() -> None:
    rows = make_rows()
    launched(steps_of(rows))
    for row in rows:
        assert row.exp_avg is not None
        assert row.norms == pytest.approx((float(row.weights.norm()), float(row.exp_avg.norm())), rel=1e-5)


@pytest.mark.parametrize("num_values", [1, 2048, 2049, 2048 * PARTS_MAX, 2048 * PARTS_MAX + 1, 25_000_000, 2**33 + 1])
def test_a_row_of_any_length_has_few_parts(num_values: int) -> None:
    num_parts = -(-num_values // part_values(num_values))
    assert num_parts <= PARTS_MAX
    assert num_parts > PARTS_MAX // 2 or part_values(num_values) == 2048


def test_an_engine_whose_steps_are_launches_trains_as_one_whose_steps_are_not(
    qwen3: Path, own_base_models: None
) -> None:
    data, params = make_data("cross_entropy", [20]), AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)

    def train(driver: Driver) -> list[dict[str, float]]:
        driver.engine.base_model.is_deferred = True
        assemble_again(driver.engine)
        driver.install(make_spec("a", 4), make_spec("b", 16))
        found = []
        for _ in range(2):
            driver.train(driver.backward("a", data), driver.backward("b", data))
            results = driver.train(driver.step("a", params), driver.step("b", params))
            found += [dict(result.metrics) for result in results]
        return found

    ours, theirs = Driver(qwen3), Driver(qwen3)
    with launches():
        actual = train(ours)
    for mine, its in zip(actual, train(theirs), strict=True):
        assert mine == pytest.approx(its, rel=1e-4)
    for key in "ab":
        for name, matrix in theirs.weights(key).items():
            torch.testing.assert_close(ours.weights(key)[name], matrix, rtol=1e-4, atol=1e-5)


def test_a_cpu_has_no_such_launches() -> None:
    assert not has_kernels(torch.device("cpu"))


def test_the_fingerprint_says_which_of_losses_and_steps_are_launches(
    qwen3: Path, own_base_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint() -> str:
        model = Driver(qwen3).engine.base_model
        return model.info(is_thread_count_invariant=True, are_samples_batch_invariant=True).fingerprint

    by_torch = fingerprint()
    monkeypatch.setattr(base_model, "has_kernels", lambda _: True)
    monkeypatch.setattr(loading, "check_losses", lambda model: setattr(model, "scores_by_kernels", False))
    assert fingerprint() == f"{by_torch}; steps by kernels of our own"
    monkeypatch.setattr(loading, "check_losses", lambda _: None)
    assert fingerprint() == f"{by_torch}; losses and steps by kernels of our own"

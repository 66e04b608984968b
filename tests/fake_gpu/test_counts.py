"""What the engine takes on a GPU, counted without one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.common import Row
from scripts.bench.gpu.cases import SHAPES, Case
from scripts.bench.gpu_count.budgets import BUDGETS, rows_with_budgets
from tests.support.fake_cuda.processes import FakeCudaProcess

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_gpu")]  # one process, so that torch is imported once


def test_launches_of_a_step_do_not_grow_with_its_adapters(fake_gpu: FakeCudaProcess) -> None:
    few, many = (fake_gpu.call("scripts.bench.gpu_count.cases:training", "tiny", Case(num, 1, 16)) for num in (2, 6))
    for own, other in zip(few, many, strict=True):
        assert (own.num_kernels, own.num_operations) == (other.num_kernels, other.num_operations)


MODEL, FEW, MORE = "0.6b", 2, 4
NUM_LAYERS = SHAPES[MODEL]["num_hidden_layers"]
CASES = "scripts.bench.gpu_count.cases"
LOAD = Case(8, 4, 64)


@cache
def counted(fake_gpu: FakeCudaProcess, function: str, model: str, *args: Any) -> list[Row]:
    """Return the rows of a case, which several tests read."""
    rows: list[Row] = fake_gpu.call(f"{CASES}:{function}", model, *args)
    return rows


def test_a_training_step_waits_once_for_its_passes_and_once_for_its_steps(fake_gpu: FakeCudaProcess) -> None:
    passes, steps = counted(fake_gpu, "training_rows", f"{MODEL}@{FEW}", LOAD)
    assert (passes["waits"], steps["waits"]) == (1, 1)
    assert passes["kernels"] <= 349


def extended(few: Row, more: Row, num_layers: int) -> Row:
    """Return the row of a model with more layers: every layer takes as much as any other."""
    added = (num_layers - FEW) / (MORE - FEW)
    numbers = {key: few[key] + added * (more[key] - few[key]) for key in few if isinstance(few[key], int | float)}
    layer_kernels = (more["kernels"] - few["kernels"]) / (MORE - FEW)
    return few | numbers | {"model": MODEL, "layer_kernels": layer_kernels}


def rows_of(fake_gpu: FakeCudaProcess, function: str, *args: Any) -> list[Row]:
    """Return the rows of a case of the whole model, from two models with few layers: that takes seconds."""
    few, more = (counted(fake_gpu, function, f"{MODEL}@{layers}", *args) for layers in (FEW, MORE))
    return [extended(*both, NUM_LAYERS) for both in zip(few, more, strict=True)]


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("training_rows", (LOAD,)),
        ("loss", ()),
        ("decoding", (32, 0)),
        ("decoding", (32, 8)),
        pytest.param("decoding", (8, 8, 8192), marks=pytest.mark.long),
        ("prefill", (32,)),
    ],
    ids=str,
)
def test_no_count_rises(fake_gpu: FakeCudaProcess, function: str, args: tuple[Any, ...]) -> None:
    """If one falls, lower its number in `scripts/bench/gpu_count/budgets.py`."""
    found = rows_with_budgets(rows_of(fake_gpu, function, *args))
    assert found
    for budget, row in found:
        assert budget.measured(row) <= budget.today, f"{budget.case}: {budget.unit}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "args"), [("passes", (LOAD,)), ("decoding", (32, 0)), ("decoding", (32, 8))], ids=str
)
@pytest.mark.parametrize("model", ["9b-hybrid", "30b-a3b"])
def test_no_count_of_a_hybrid_or_a_mixture_rises(
    fake_gpu: FakeCudaProcess, model: str, function: str, args: tuple[Any, ...]
) -> None:
    few, more = (fake_gpu.call(f"{CASES}:{function}", f"{model}@{layers}", *args)[0] for layers in (4, 8))
    found = rows_with_budgets([few | {"layer_kernels": (more["kernels"] - few["kernels"]) / 4}])
    assert found
    for budget, row in found:
        assert budget.measured(row) <= budget.today, f"{budget.case}: {budget.unit}"


@pytest.mark.long
def test_kernels_of_a_mixture_do_not_depend_on_the_number_of_experts(fake_gpu: FakeCudaProcess) -> None:
    few, many = (fake_gpu.call("tests.support.fake_cuda.scenarios:kernels_of_experts", num) for num in (4, 64))
    assert few == many


@pytest.mark.long
def test_kernels_of_a_hybrids_decode_step_do_not_depend_on_the_number_of_sequences(fake_gpu: FakeCudaProcess) -> None:
    few, many = (fake_gpu.call(f"{CASES}:decoding", "9b-hybrid@4", number, 0)[0]["kernels"] for number in (16, 32))
    assert few == many


@pytest.mark.long
def test_every_layer_takes_as_much_as_any_other(fake_gpu: FakeCudaProcess) -> None:
    few, more, most = (fake_gpu.call(f"{CASES}:decoding", f"{MODEL}@{layers}", 32, 8)[0] for layers in (FEW, MORE, 7))
    expected = extended(few, more, 7)
    for key in ("kernels", "bytes", "flops", "waits", "to_host_bytes"):
        assert most[key] == expected[key]


def test_a_budget_names_a_case_once() -> None:
    assert len({(budget.model, budget.case, budget.key) for budget in BUDGETS}) == len(BUDGETS)


def test_what_a_case_takes_today_is_what_was_recorded_last() -> None:
    """A number that stays behind would let a count rise again unnoticed."""
    recorded = json.loads((Path(__file__).parents[2] / "docs" / "results" / "gpu_count.json").read_text("utf-8"))
    found = rows_with_budgets(recorded["tables"]["gpu-count"]["rows"])
    assert len(found) == len(BUDGETS)
    for budget, row in found:
        assert budget.is_current(row), f"{budget.model}, {budget.case}: {budget.unit}"


def test_all_budgets_of_sampling_are_met() -> None:
    """`test_no_count_rises` compares with what a case takes today."""
    assert all(budget.today <= budget.most for budget in BUDGETS if budget.group == "sampling")


@pytest.mark.parametrize(("has_kernels", "most"), [(True, 0), pytest.param(False, 50, marks=pytest.mark.long)])
def test_many_targets_of_a_token_take_few_kernels_more_than_one(
    fake_gpu: FakeCudaProcess, most: int, *, has_kernels: bool
) -> None:
    scenario = "tests.support.fake_cuda.scenarios:kernels_of_targets"
    one, many = (fake_gpu.call(scenario, number, has_kernels=has_kernels) for number in (1, 200))
    assert many - one <= most

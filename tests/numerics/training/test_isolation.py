"""A tenant's bits do not depend on co-batched tenants: results, gradients, weights, moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.numerics.cases import MODELS_BY_THREADS, long
from tests.support.numerics.harness import Driver, Tenant, Trace, code, make_data, make_spec, note, training_items
from tests.support.numerics.tenants import NUM_STEPS, TENANTS, assert_same, train
from workers.contract.messages import AdamParams, Batch, Datum, ErrorCode, Item, RequestBatch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("isolation")]  # one process, for what is computed once


def train_solo(model: Path, tenants: Sequence[Tenant], num_steps: int = NUM_STEPS) -> dict[str, Trace]:
    """Train each tenant on a separate engine."""
    return {tenant.key: train(Driver(model), [tenant], num_steps=num_steps)[tenant.key] for tenant in tenants}


@cache
def _solo_trace(model: Path, number: int, num_threads: int) -> Trace:
    """Return the trace of a tenant of `TENANTS` that trains on a separate engine with so many threads."""
    assert torch.get_num_threads() == num_threads
    return train_solo(model, [TENANTS[number]])[TENANTS[number].key]


def solo_traces(model: Path, numbers: Sequence[int] = range(len(TENANTS))) -> dict[str, Trace]:
    """Return the traces of some of `TENANTS`, each computed once in this process."""
    return {TENANTS[number].key: _solo_trace(model, number, torch.get_num_threads()) for number in numbers}


@pytest.mark.parametrize(("model_directory", "num_threads"), MODELS_BY_THREADS, indirect=["model_directory"])
def test_co_batched_tenant_gets_the_same_bits_as_solo(model_directory: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    solo = solo_traces(model_directory)
    assert_same(train(Driver(model_directory), TENANTS), solo)
    assert_same(train(Driver(model_directory), TENANTS[::-1]), solo)


def test_bits_do_not_depend_on_the_number_of_threads(each_kind: Path) -> None:
    """A pass uses fewer threads on busy cores."""
    traces = []
    for num_threads in (1, 2):
        torch.set_num_threads(2)
        driver = Driver(each_kind)
        with mock.patch.object(driver.engine, "_threads", None):
            torch.set_num_threads(num_threads)
            traces.append(train(driver, TENANTS))
    assert_same(*traces)


@pytest.mark.parametrize("length", [1, 17, *long(2, 16, 64)])
def test_tenants_of_equal_length_computed_as_one_batch_get_the_same_bits_as_solo(each_kind: Path, length: int) -> None:
    """Ranks of one class with three scalings, and of another class: batches end where scaling or class changes."""
    tenants = [
        Tenant(spec=make_spec(f"{name}{rank}", rank), passes=[make_data("cross_entropy", [length], rank)])
        for rank in (8, 4, 1, 16)
        for name in "ab"
    ]
    driver = Driver(each_kind)
    driver.install(make_spec("early"), make_spec("gap"))
    driver.train(*(driver.step(key) for key in ("early", "gap")))
    solo = train_solo(each_kind, tenants, num_steps=2)
    assert_same(train(driver, tenants, num_steps=2), solo)
    # Free slots in the middle: the next adapters are not in adjacent slots.
    driver.engine.run(Batch(epoch=1, cycle_id=1, removals=("early", "a8")))
    assert_same(train(driver, tenants[::-1], num_steps=2), solo)


def test_eight_tenants_on_two_slots_get_the_same_bits_as_solo(each_kind: Path) -> None:
    driver = Driver(each_kind, num_slots=2)
    assert_same(train(driver, TENANTS), solo_traces(each_kind))
    assert driver.engine.bank.num_resident <= 2
    assert driver.engine.bank.stats.num_evictions > len(TENANTS)


def test_eviction_in_the_middle_of_a_gradient_window_changes_no_bits(qwen3: Path) -> None:
    data = [make_data("cross_entropy", [13, 21], seed) for seed in range(3)]

    def run(evicting: bool) -> tuple[bytes, object]:
        driver = Driver(qwen3, num_slots=1 if evicting else 4)
        driver.install(make_spec("a"), make_spec("b", 16))
        for request in data:
            driver.train(driver.backward("a", request))
            if evicting:
                driver.train(driver.backward("b", request))
                assert driver.engine.bank.entry("a").row is None
        gradient = driver.gradient("a").numpy().tobytes()
        driver.train(driver.step("a"))
        state = driver.state("a")
        return gradient, state

    assert run(evicting=True) == run(evicting=False)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    others=st.lists(
        st.tuples(st.sampled_from([1, 8, 16]), st.lists(st.integers(1, 90), min_size=1, max_size=3)), max_size=4
    ),
    position=st.integers(0, 4),
)
def test_no_neighbours_lengths_or_ranks_change_a_bit(
    each_kind: Path, lengths: list[int], others: list[tuple[int, list[int]]], position: int
) -> None:
    tenant = Tenant(spec=make_spec("it", 4), passes=[make_data("cross_entropy", lengths)])
    neighbours = [
        Tenant(spec=make_spec(f"other{i}", rank), passes=[make_data("cross_entropy", other, i)])
        for i, (rank, other) in enumerate(others)
    ]
    neighbours.insert(min(position, len(neighbours)), tenant)
    together = train(Driver(each_kind), neighbours, num_steps=1)
    together["it"].assert_equal(train(Driver(each_kind), [tenant], num_steps=1)["it"])


def _with(data: Sequence[Datum], name: str, value: float) -> tuple[Datum, ...]:
    """Return the data with one value of a loss input replaced."""
    values: NDArray[np.float32] = data[0].loss_inputs[name].astype(np.float32)
    values[len(values) // 2] = value
    return (dataclasses.replace(data[0], loss_inputs={**data[0].loss_inputs, name: values}), *data[1:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_neighbour_with_values_that_are_not_finite_fails_without_others(each_kind: Path, value: float) -> None:
    good = [TENANTS[1], TENANTS[2]]
    driver = Driver(each_kind)
    driver.install(*(tenant.spec for tenant in good), make_spec("bad"))
    bad = _with(make_data("cross_entropy", [40, 40]), "weights", value)
    traces = {tenant.key: Trace() for tenant in good}
    for _ in range(NUM_STEPS):
        before = driver.weights("bad")
        first, second = (training_items(driver, tenant) for tenant in good)
        results = driver.run(*first, driver.backward("bad", bad, drop_gradient=True), *second)
        failed = results.pop(len(first))
        for item, result in zip([*first, *second], results, strict=True):
            note(traces[item.adapter_id], result)
        for tenant in good:
            traces[tenant.key].gradients.append(driver.gradient(tenant.key).numpy().tobytes())
        steps = driver.run(*(driver.step(tenant.key, tenant.params) for tenant in good), driver.step("bad"))
        for tenant, result in zip(good, steps[:-1], strict=True):
            note(traces[tenant.key], result)
        for tenant in good:
            traces[tenant.key].states.append(driver.state(tenant.key))
        # Either the loss or the norm of the gradient overflows; in both cases no step is taken.
        assert code(steps[-1]) == ErrorCode.NON_FINITE
        assert failed.error is None or failed.error.code == ErrorCode.NON_FINITE
        assert all(torch.equal(before[name], matrix) for name, matrix in driver.weights("bad").items())
        assert not driver.gradient("bad").any()
    assert_same(traces, solo_traces(each_kind, [1, 2]))


@pytest.mark.parametrize(
    "params", [AdamParams(learning_rate=1e4), AdamParams(learning_rate=1e37), AdamParams(weight_decay=50.0)], ids=str
)
def test_neighbour_with_a_huge_learning_rate_or_weight_decay_changes_nothing(
    each_kind: Path, params: AdamParams
) -> None:
    good = TENANTS[1]
    driver = Driver(each_kind)
    driver.install(good.spec, make_spec("wild"))
    trace = Trace()
    for _ in range(NUM_STEPS):
        (item,) = training_items(driver, good)
        result, _ = driver.run(item, driver.backward("wild", make_data("cross_entropy", [50]), drop_gradient=True))
        note(trace, result)
        trace.gradients.append(driver.gradient(good.key).numpy().tobytes())
        note(trace, driver.run(driver.step(good.key, good.params), driver.step("wild", params))[0])
        trace.states.append(driver.state(good.key))
    assert_same({good.key: trace}, solo_traces(each_kind, [1]))


@pytest.mark.parametrize("num_slots", [16, 1])
def test_batches_behind_a_failed_one_have_the_bits_of_a_run_without_it(qwen3: Path, num_slots: int) -> None:
    """All are in one batch of the worker; with 16 slots they run in one packed pass, beside another adapter."""
    bad = _with(make_data("cross_entropy", [17]), "weights", float("inf"))
    data = [make_data("cross_entropy", [13, 21], seed) for seed in range(4)]
    runs = []
    for has_failed in (True, False):
        driver = Driver(qwen3, num_slots=num_slots)
        driver.install(make_spec("a"), make_spec("b", 16))
        failing: list[Item] = []
        if has_failed:
            failing = [
                driver.backward("a", data[0], batch=RequestBatch(1, 3)),
                driver.backward("a", bad, batch=RequestBatch(1, 3)),
                driver.backward("a", data[1], batch=RequestBatch(1, 3)),
                driver.backward("a", bad, batch=RequestBatch(4, 4)),
            ]
        first = driver.seqs["a"] + 1
        fine: list[Item] = [
            *driver.chunks("a", [data[2], data[3]], batch=RequestBatch(first, first)),
            driver.backward("b", data[1]),
            driver.forward("a", data[0]),
            driver.backward("a", data[1]),
        ]
        results = driver.run(*failing, *fine)
        assert [result.error is None for result in results] == [True, False, False, False][: len(failing)] + [True] * 5
        steps = driver.train(driver.step("a"), driver.step("b"))
        assert [step.metrics["num_datums:sum"] for step in steps] == [6, 2]
        states = [dataclasses.replace(driver.state(key), applied_seq=0) for key in "ab"]
        runs.append((states, [array.tobytes() for result in results[-5:] for array in result.logprobs]))
    assert runs[0] == runs[1]

"""The kernel of linear attention's decode steps, in Triton's interpreter, against operations of torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_delta import ROWS, WRITES, RandomDelta
from tests.support.numerics.samplers import Sampling, assert_same_bits, make_sampler, prompt_of, request, sampling
from workers.contract.messages import SampledSequence
from workers.model.delta_rule import DeltaShape
from workers.sampling import delta_states, delta_steps
from workers.sampling.delta_steps import HEAD_VALUES_MAX, can_step
from workers.selftest import sequence_invariance

MINIATURE, REAL = DeltaShape(2, 4, 16, 16, 3), DeltaShape(16, 32, 128, 128, 3)
SHAPES = [MINIATURE, REAL, DeltaShape(3, 9, 24, 40, 1), DeltaShape(2, 2, 8, 16, 0)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_that_of_separate_operations_and_changes_no_other_slot(shape: DeltaShape, dtype: torch.dtype) -> None:
    interpret()
    given = RandomDelta.of(shape, dtype)
    out, history, states = given.by_kernel()
    expected, expected_history, expected_states = given.by_operations()
    # In bf16 the interpreter cuts values off where a GPU rounds.
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(out.float(), expected, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)
    assert torch.equal(history.float(), expected_history)
    others = [slot for slot in range(len(states)) if slot not in WRITES]
    assert torch.equal(states[others], given.states[others])


@pytest.mark.parametrize("shape", [MINIATURE, SHAPES[2]], ids=str)
def test_a_sequence_has_the_same_bits_whatever_else_is_in_the_step(shape: DeltaShape) -> None:
    interpret()
    given = RandomDelta.of(shape, torch.bfloat16)
    whole = given.by_kernel()
    for number, (row, slot) in enumerate(zip(ROWS, WRITES, strict=True)):
        solo = given.only([number]).by_kernel()
        for together, alone, place in zip(whole, solo, (row, slot, slot), strict=True):
            assert torch.equal(together[place], alone[place])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["inputs", "strength", "states", "history"])
def test_values_that_are_not_finite_stay_in_their_sequence(where: str, value: float) -> None:
    interpret()
    bad = 1
    given = RandomDelta.of(MINIATURE, torch.float32)
    clean = given.by_kernel()
    if where == "inputs":
        for tensor in given.inputs.tensors():
            tensor[ROWS[bad]] = value
    elif where == "strength":
        given.inputs.strength[ROWS[bad]] = value
    else:
        getattr(given, where)[given.reads[bad]] = value
    with np.errstate(all="ignore"):
        found = given.by_kernel()
    is_diverged = where != "strength" or math.isnan(value)  # the strength of an infinite one is 1
    assert found[0][ROWS[bad]].isfinite().all() != is_diverged
    for number, (row, slot) in enumerate(zip(ROWS, WRITES, strict=True)):
        for part, before, place in zip(found, clean, (row, slot, slot), strict=True):
            assert torch.equal(part[place], before[place]) or number == bad


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_launches_and_traffic_are_what_the_fake_device_counts(shape: DeltaShape) -> None:
    interpret()
    given = RandomDelta.of(shape, torch.bfloat16)
    with metered() as moved:
        given.by_kernel()
    assert moved.num_launches == moved.num_counted == 1
    assert moved.num_bytes == moved.num_counted_bytes


def test_the_kernel_takes_heads_whose_states_fit_into_registers_and_models_in_bf16_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not can_step(CPU, torch.bfloat16, MINIATURE)
    monkeypatch.setattr(delta_steps, "can_run", lambda _, dtype: dtype == torch.bfloat16)
    assert not can_step(CPU, torch.float32, MINIATURE)
    for key_dim, value_dim, fits in ((128, 128, True), (129, 65, False), (65, 128, True), (256, 64, True)):
        assert can_step(CPU, torch.bfloat16, DeltaShape(1, 1, key_dim, value_dim, 3)) == fits
    assert REAL.key_dim * REAL.value_dim == HEAD_VALUES_MAX


def test_the_trial_of_a_model_finds_a_kernel_whose_bits_depend_on_the_other_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interpret()
    weights = RandomDelta.of(MINIATURE, torch.float32).weights
    monkeypatch.setattr(sequence_invariance, "can_step", lambda *_: True)
    monkeypatch.setattr(sequence_invariance, "NUM_SEQUENCES", 4)  # the interpreter is slow
    monkeypatch.setattr(sequence_invariance, "STEP_SEQUENCES", (1, 3))
    with metered() as moved:
        assert sequence_invariance.keeps_sequences(weights, torch.float32)
    assert moved.num_launches

    def by_number(out: Tensor, *others: Any) -> None:
        delta_steps.step_slots(out, *others)
        out += len(out)

    monkeypatch.setattr(sequence_invariance, "step_slots", by_number)
    assert not sequence_invariance.keeps_sequences(weights, torch.float32)


def tokens_of(sequences: tuple[SampledSequence, ...]) -> list[list[int]]:
    return [sequence.tokens.tolist() for sequence in sequences]


def logprobs_of(sequences: tuple[SampledSequence, ...]) -> list[float]:
    return [logprob for sequence in sequences for logprob in sequence.logprobs]


def test_samples_by_the_kernel_are_those_of_separate_operations_and_have_the_bits_of_each_solo(
    model_directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in parts, so that some share their steps with next tokens of other requests."""
    interpret()
    s = sampling(model_directories["qwen3.5"], prefill_tokens_max=64)
    s.publish("a")
    wanted = [
        request("long", "a/v", prompt=prompt_of(200), max_tokens=5, num_samples=2),
        request("short", prompt=prompt_of(9), max_tokens=8, num_samples=3, seed=4),
    ]
    by_operations = s.sequences(*wanted)
    monkeypatch.setattr(delta_states, "can_step", lambda *_: True)
    with metered() as moved:
        by_kernel = Sampling(s.driver, make_sampler(s.driver, prefill_tokens_max=64)).sequences(*wanted)
    assert moved.num_launches
    for one, expected, actual in zip(wanted, by_operations, by_kernel, strict=True):
        assert tokens_of(actual) == tokens_of(expected)
        np.testing.assert_allclose(logprobs_of(actual), logprobs_of(expected), rtol=0, atol=1e-4)
        (solo,) = Sampling(s.driver, make_sampler(s.driver)).sequences(one)
        assert_same_bits(actual, solo)

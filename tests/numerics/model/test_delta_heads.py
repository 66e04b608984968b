"""The kernels of linear attention's heads, in Triton's interpreter, against operations of torch in fp32."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_delta import RandomChunks
from workers.model import base_model, delta_heads
from workers.model.delta_heads import can_convolve, convolved_by_kernels
from workers.model.delta_rule import DeltaShape, DeltaWeights, convolved_heads
from workers.model.packed_delta import PackedDelta
from workers.selftest import sequence_invariance, training_kernels
from workers.selftest.sequence_invariance import keeps_sequences, packed_results, random_rows

CPU = torch.device("cpu")
LENGTHS = [None, 1.0, 128**-0.5]
SIZES = [((1, 64), (2, 128)), ((2, 32), (3, 80)), ((2, 16), (1, 6)), ((1, 40), (1, 256)), ((2, 1), (2, 16))]
"""N and C, H and E; fewer tokens than a program has, more, and no multiple of them."""
SEQUENCES, FEW = (70, 2), (17, 2, 1)
"""Lengths of sequences, few and short ones: the interpreter is slow."""


def random_chunks(length: float | None, dtype: torch.dtype = torch.float32) -> RandomChunks:
    return RandomChunks.of((4, 40), (2, 16), dtype, length)


@pytest.fixture
def weights(model_directories: dict[str, Path]) -> DeltaWeights:
    """Of a layer whose heads are computed by kernels."""
    interpret()
    model = Driver(model_directories["qwen3.5"]).engine.base_model
    return replace(model.delta_layers[0].delta_weights, convolve=convolved_by_kernels)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("sizes", "heads"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_the_gradients_of_rows_are_those_of_separate_operations(
    sizes: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, length: float | None
) -> None:
    interpret()
    given = RandomChunks.of(sizes, heads, dtype, length)
    (out, drows), (expected, expected_drows) = given.by_kernels(), given.by_operations()
    assert (out.dtype, drows.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    # In bf16 the interpreter cuts values off where a GPU rounds.
    rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(drows.float(), expected_drows, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_has_the_same_bits_whatever_else_is_in_the_call(length: float | None) -> None:
    interpret()
    given = random_chunks(length, torch.bfloat16)
    together = given.by_kernels()
    for chunks in (slice(0, 1), slice(1, 3)):
        for whole, own in zip(together, given.only(chunks).by_kernels(), strict=True):
            assert torch.equal(whole[chunks], own)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["rows", "gradient"])
def test_values_that_are_not_finite_stay_in_their_chunk(where: str, value: float) -> None:
    interpret()
    given = random_chunks(1.0)
    clean = given.by_kernels()
    getattr(given, where)[1] = value
    with np.errstate(all="ignore"):
        found = given.by_kernels()
    assert not found[1][1].isfinite().any()
    for part, before in zip(found, clean, strict=True):
        assert torch.equal(part[[0, 2, 3]], before[[0, 2, 3]])


def test_rows_are_read_and_gradients_are_taken_where_they_are() -> None:
    """Rows are a part of wider ones, as in sampling; gradients are transposed, as products give them, or broadcast."""
    interpret()
    given = random_chunks(0.5)
    expected = given.by_kernels()
    wide = torch.randn(4, 50, 100)
    wide[:, 2:45, 10:42] = given.rows
    transposed = given.gradient.transpose(2, 3).contiguous().transpose(2, 3)
    swapped = given.gradient.transpose(1, 2).contiguous().transpose(1, 2)
    for gradient in (transposed, swapped):
        moved = replace(given, rows=wide[:, 2:45, 10:42], gradient=gradient)
        for actual, right in zip(moved.by_kernels(), expected, strict=True):
            assert torch.equal(actual, right)
    broadcast = replace(given, gradient=torch.ones(()).expand_as(given.gradient))
    torch.testing.assert_close(broadcast.by_kernels(), broadcast.by_operations(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sizes", "heads"), SIZES)
def test_launches_and_traffic_are_what_the_fake_device_counts(sizes: tuple[int, int], heads: tuple[int, int]) -> None:
    interpret()
    given = RandomChunks.of(sizes, heads, torch.bfloat16, 1.0)
    with metered() as moved:
        given.by_kernels()
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == moved.num_counted_bytes


def test_the_kernels_take_convolutions_of_four_tokens_of_models_in_bf16_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not can_convolve(CPU, torch.bfloat16, DeltaShape(2, 4, 16, 16, 3))
    monkeypatch.setattr(delta_heads, "can_run", lambda _, dtype: dtype == torch.bfloat16)
    for history, dtype, can in ((3, torch.bfloat16, True), (3, torch.float32, False), (2, torch.bfloat16, False)):
        assert can_convolve(CPU, dtype, DeltaShape(2, 4, 16, 16, history)) == can


def test_a_layer_has_the_results_and_gradients_of_separate_operations(weights: DeltaWeights) -> None:
    rows = [part[: sum(SEQUENCES)] for part in random_rows(weights, torch.float32)]
    expected, actual = (
        packed_results(PackedDelta(SEQUENCES, CPU), used, rows)
        for used in (replace(weights, convolve=convolved_heads), weights)
    )
    for theirs, own in zip(expected, actual, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


def test_the_trial_of_a_model_finds_heads_whose_bits_depend_on_the_other_chunks(
    weights: DeltaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_invariance, "TRIAL_LENGTHS", FEW)
    assert keeps_sequences(weights, torch.float32)

    def by_number(rows: Tensor, weights: Tensor, num_heads: int, length: float | None) -> Tensor:
        return convolved_by_kernels(rows, weights, num_heads, length) + len(rows)

    assert not keeps_sequences(replace(weights, convolve=by_number), torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("own_base_models")
def test_a_model_whose_heads_have_other_gradients_by_kernels_trains_without_kernels(
    model_directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret()
    monkeypatch.setattr(base_model, "can_convolve", lambda *_: True)
    monkeypatch.setattr(training_kernels, "LENGTHS", FEW)
    model = Driver(model_directories["qwen3.5"]).engine.base_model
    model._has_kernels = True
    model.use(model.numerics)
    training_kernels.check_training_kernels(model)
    assert {layer.delta_weights.convolve for layer in model.delta_layers} == {convolved_by_kernels}
    wrong = importlib.import_module("workers.model.delta_head_kernels")
    monkeypatch.setattr(wrong, "convolve_backward", lambda dinputs, *_: dinputs.zero_())
    training_kernels.check_training_kernels(model)
    assert not model.trains_by_kernels
    assert {layer.delta_weights.convolve for layer in model.delta_layers} == {convolved_heads}

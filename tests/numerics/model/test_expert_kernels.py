"""What kernels of our own add to a layer of experts, in Triton's interpreter, against products of shares."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from tests.support.numerics.random_experts import ATTENTION, LARGE, Layer, Rows
from workers.model.expert_groups import GroupedDispatch, GroupedSegments
from workers.model.segments import Routing

NUM_ROWS = 130
MANY = [(0, 3, 20), (LARGE, 22, 30), (1, 30, 60), (0, 60, 75), (0, 75, 110), (ATTENTION, 110, 115), (LARGE, 129, 130)]
"""Rows of no adapter, adjacent segments of one, and adapters of three slabs, of which one adapts no experts."""


@pytest.fixture(params=["qwen3-moe", "gpt-oss"])
def either(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Layer:
    """A layer with gates before all others, or in turn with them."""
    return layer_of(model_directories[request.param], "float32")


@pytest.fixture
def layer(model_directories: dict[str, Path]) -> Layer:
    """A layer in bf16."""
    return layer_of(model_directories["qwen3-moe"], "bfloat16")


def layer_of(directory: Path, dtype: str) -> Layer:
    """Return a layer of a model, whose adapters are computed by the interpreter."""
    interpret()
    return Layer(Driver(directory, dtype=dtype).engine.base_model, NUM_ROWS)


@pytest.mark.parametrize("segments", [[], [(0, 0, NUM_ROWS)], [(1, 1, 2)], [(ATTENTION, 0, 9)], MANY], ids=str)
def test_rows_that_a_device_sorts_have_the_results_of_those_that_the_host_sorts(
    either: Layer, segments: list[Rows]
) -> None:
    expected, actual = either.results(segments), either.results(segments, is_grouped=True)
    for one, other in zip(actual.all, expected.all, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_results_in_bf16_are_those_of_shares(layer: Layer) -> None:
    expected, actual = layer.results(MANY), layer.results(MANY, is_grouped=True)
    for one, other in zip(actual.all, expected.all, strict=True):
        assert float((one - other).float().norm()) <= 2.0**-6 * float(other.float().norm())


def test_a_pass_without_a_backward_has_the_output_of_one_with(either: Layer) -> None:
    expected = either.results(MANY).of_rows[0]
    assert float((either.sampled(MANY) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_experts_that_an_adapter_sends_no_rows_get_no_gradient(either: Layer) -> None:
    either.choices[:100] = [0, 1]  # tiles of several
    either.choices[100:] = [3, 1]
    segments = [(0, 0, 100), (LARGE, 100, 120)]
    expected, actual = either.results(segments), either.results(segments, is_grouped=True)
    for one, other in zip(actual.gradients, expected.gradients, strict=True):
        assert torch.equal(one == 0, other == 0)
    for one, other in zip(actual.all, expected.all, strict=True):
        assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())


def test_a_row_that_is_not_finite_reaches_no_other_adapter(layer: Layer) -> None:
    segments = [(0, 0, 40), (1, 40, 100)]
    clean = layer.results(segments, is_grouped=True)
    layer.x[40:100], layer.dout[40:100] = float("nan"), float("nan")
    spoiled = layer.results(segments, is_grouped=True)
    assert torch.equal(spoiled.gradients[0], clean.gradients[0])
    assert spoiled.gradients[1].isnan().any()
    for one, other in zip(spoiled.of_rows, clean.of_rows, strict=True):
        assert torch.equal(one[:40], other[:40])
        assert torch.equal(one[100:], other[100:])


@pytest.mark.parametrize("has_backward", [True, False])
def test_what_an_adapter_adds_does_not_depend_on_others(layer: Layer, *, has_backward: bool) -> None:
    with sums_in_order():
        together = layer.added(MANY, has_backward=has_backward)
    for slot in (0, 1, LARGE):
        own = [segment for segment in MANY if segment[0] == slot]
        with sums_in_order():
            solo = layer.added(own, has_backward=has_backward)
        assert torch.equal(together.gradients[slot], solo.gradients[slot])
        for one, other in zip(together.of_rows, solo.of_rows, strict=True):
            assert all(torch.equal(one[start:stop], other[start:stop]) for _, start, stop in own)
            assert all(one[start:stop].any() for _, start, stop in own)


@pytest.mark.parametrize("has_backward", [True, False])
def test_what_is_added_to_a_row_does_not_depend_on_other_rows_of_its_adapter(
    layer: Layer, *, has_backward: bool
) -> None:
    together = layer.added([(0, 3, 128)], has_backward=has_backward)
    solo = layer.added([(0, 120, 121)], has_backward=has_backward)
    for one, other in zip(together.of_rows, solo.of_rows, strict=True):
        assert torch.equal(one[120], other[120])


def test_a_layer_takes_as_many_launches_whatever_the_adapters(layer: Layer) -> None:
    for segments in ([(0, 0, 40)], MANY):
        with metered() as forward:
            layer.added(segments, has_backward=False)
        with metered() as moved:
            layer.added(segments)
        assert (forward.num_launches, moved.num_launches) == (4, 12)


def test_adapters_of_no_experts_take_no_launch(layer: Layer) -> None:
    with metered() as moved:
        layer.results([(ATTENTION, 0, 40)], is_grouped=True)
    assert moved.num_launches == 0


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("num_rows", [2, 64])  # to few of the experts, and to all
def test_the_kernels_move_as_many_bytes_as_the_fake_device_counts(
    layer: Layer, num_rows: int, *, has_backward: bool
) -> None:
    layer.x, layer.dout, layer.weights = layer.x[:num_rows], layer.dout[:num_rows], layer.weights[:num_rows]
    layer.choices = layer.choices[:num_rows]
    with metered() as moved:
        layer.added([(0, 0, num_rows // 2), (1, num_rows // 2, num_rows)], has_backward=has_backward)
    assert moved.num_launches == moved.num_counted == (12 if has_backward else 4)
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)


def test_the_counts_of_experts_and_choices_are_dropped_before_the_backward(layer: Layer) -> None:
    """They are as large as all experts times all choices, and a pass would keep those of each layer."""
    dispatch = GroupedDispatch(torch.zeros(9, 2, dtype=torch.int64), 4)
    assert GroupedSegments(Routing((), 16), 2, 0).of_layer(layer.layer, dispatch) is None
    assert dispatch.counted is None

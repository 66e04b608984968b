"""The kernels that add adapters and their gradients, in Triton's interpreter, against products one by one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from tests.support.numerics.random_adapters import (
    D_IN,
    NUM_ROWS,
    Slab,
    gradients_one_by_one,
    one_by_one,
    operands,
    segments_of,
)
from tests.support.numerics.samplers import Sampling, make_sampler, request
from workers.model import base_model, gpu_operations
from workers.model.fused_runs import AdapterTables, ForwardRun, TrainingRun, can_run, forward_runs, training_runs
from workers.model.gpu_operations import can_launch, defined, missing_kernels
from workers.model.segments import Segment
from workers.rows import ALIGNMENT, AdapterViews, RowLayout


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_any_rank_and_slab_get_their_own_products(group: int, dtype: torch.dtype) -> None:
    interpret()
    segments, (x, ys) = segments_of(dtype), operands(group, dtype)
    expected = one_by_one(segments, group, x, ys)
    untouched = [y.clone() for y in ys]
    (run,) = forward_runs(segments)
    run.forward(group, x, ys)
    is_adapted = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for segment in segments:
        is_adapted[segment.start : segment.stop] = segment.adapter.groups[group] is not None
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7  # the interpreter cuts values off where a GPU rounds
    for y, right, before in zip(ys, expected, untouched, strict=True):
        assert float((y.float() - right).abs().max()) <= tolerance * float(right.abs().max())
        assert torch.equal(y[~is_adapted], before[~is_adapted])


def gradients_of(segments: list[Segment], group: int) -> dict[int, list[Tensor]]:
    """Return copies of the gradients of A and of every B^T, by `id` of each adapter."""
    found = {}
    for segment in segments:
        if (views := segment.adapter.groups[group]) is not None:
            assert views.A_grad is not None
            found[id(segment.adapter)] = [gradient.clone() for gradient in (views.A_grad, *views.B_grads)]
    return found


def backward(segments: list[Segment], group: int, x: Tensor, dys: list[Tensor]) -> Tensor:
    """Run forward and backward; return what is added to zeros of dx."""
    (run,) = training_runs(segments)
    kept = run.forward(group, x, [torch.zeros_like(dy) for dy in dys])
    dx = torch.zeros_like(x)
    run.backward(group, kept, x, dys, dx)
    return dx


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_adapters_of_any_rank_and_slab_are_their_own(group: int, dtype: torch.dtype) -> None:
    interpret()
    segments, (x, dys) = segments_of(dtype), operands(group, dtype)
    before = torch.randn(NUM_ROWS, D_IN, generator=torch.Generator().manual_seed(7)).to(dtype)
    expected, expected_gradients = gradients_one_by_one(segments, group, x, dys, before)
    (run,) = training_runs(segments)
    ys, dx = [torch.zeros_like(dy) for dy in dys], before.clone()
    kept = run.forward(group, x, ys)
    run.backward(group, kept, x, dys, dx)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-7
    for y, right in zip(ys, one_by_one(segments, group, x, [torch.zeros_like(dy) for dy in dys]), strict=True):
        assert float((y.float() - right).abs().max()) <= tolerance * float(right.abs().max())
    assert float((dx.float() - expected).abs().max()) <= tolerance * float(expected.abs().max())
    actual = gradients_of(segments, group)
    assert actual.keys() == expected_gradients.keys()
    for key, own in actual.items():
        for gradient, right in zip(own, expected_gradients[key], strict=True):
            summands = 1e-5 if dtype == torch.float32 else 2.0**-14  # of bf16, two: sixteen bits
            assert float((gradient - right).abs().max()) <= summands * float(right.abs().max())


def test_gradients_are_added_to_those_of_earlier_passes() -> None:
    interpret()
    segments, (x, dys) = segments_of(torch.float32)[:4], operands(0, torch.float32)  # one of each adapter
    backward(segments, 0, x, dys)
    once = gradients_of(segments, 0)
    backward(segments, 0, x, dys)
    for key, own in gradients_of(segments, 0).items():
        assert all(torch.equal(twice, 2 * first) for twice, first in zip(own, once[key], strict=True))


@pytest.mark.parametrize("group", [0, 1])
def test_gradients_that_a_pass_sets_are_those_that_it_adds_to_zeros(group: int) -> None:
    interpret()
    (x, dys), segments, others = (
        operands(group, torch.bfloat16),
        segments_of(torch.bfloat16),
        segments_of(torch.bfloat16),
    )
    backward(others, group, x, dys)
    is_new = [segment.adapter is not segments[1].adapter for segment in segments]  # all adapters but one
    for segment, is_set in zip(segments, is_new, strict=True):
        if is_set and (views := segment.adapter.groups[group]) is not None:
            assert views.A_grad is not None
            for gradient in (views.A_grad, *views.B_grads):
                gradient.fill_(math.nan)
    backward([replace(each, is_set=is_set) for each, is_set in zip(segments, is_new, strict=True)], group, x, dys)
    for segment, other in zip(segments, others, strict=True):
        pairs = zip(gradients_of([segment], group).values(), gradients_of([other], group).values(), strict=True)
        assert all(torch.equal(one, two) for own, theirs in pairs for one, two in zip(own, theirs, strict=True))


def test_a_group_that_runs_again_adds_to_what_it_has_set() -> None:
    interpret()
    (x, dys), segments = operands(0, torch.float32), segments_of(torch.float32)[:4]
    (run,) = training_runs([replace(segment, is_set=True) for segment in segments])
    kept = run.forward(0, x, [torch.zeros_like(dy) for dy in dys])
    run.backward(0, kept, x, dys, None)
    once = gradients_of(segments, 0)
    run.backward(0, kept, x, dys, None)
    for key, own in gradients_of(segments, 0).items():
        assert all(torch.equal(twice, 2 * first) for twice, first in zip(own, once[key], strict=True))


def test_a_pass_that_leaves_memory_which_it_was_to_set_is_an_error() -> None:
    interpret()
    (x, dys), segments = operands(0, torch.float32), segments_of(torch.float32)
    run = TrainingRun.of([replace(segment, is_set=True) for segment in segments])
    with pytest.raises(AssertionError, match="gradients of some layers were not set"):
        run.check_set()
    kept = run.forward(0, x, [torch.zeros_like(dy) for dy in dys])
    assert kept is not None
    run.backward(0, kept, x, dys, None)
    run.check_set()  # group 1 is the last one: no layer's


def test_segments_add_the_same_bits_in_one_pass_as_in_one_after_another() -> None:
    interpret()
    x, dys = operands(0, torch.bfloat16)
    together, apart = segments_of(torch.bfloat16), segments_of(torch.bfloat16)
    with sums_in_order():
        backward(together, 0, x, dys)
        for segment in apart:
            backward([segment], 0, x, dys)
    for segment, other in zip(together, apart, strict=True):
        pairs = zip(gradients_of([segment], 0).values(), gradients_of([other], 0).values(), strict=True)
        assert all(torch.equal(one, two) for own, theirs in pairs for one, two in zip(own, theirs, strict=True))


def test_an_adapter_has_the_same_gradients_whatever_else_is_in_the_pass() -> None:
    interpret()
    together, (x, dys) = segments_of(torch.bfloat16), operands(0, torch.bfloat16)
    alone = segments_of(torch.bfloat16)
    alone = [segment for segment in alone if segment.adapter is alone[0].adapter]
    assert len(alone) == 2, "an adapter with two segments"
    with sums_in_order():
        dx = backward(together, 0, x, dys)
        own_dx = backward(alone, 0, x, dys)
    assert torch.equal(dx[50:58], own_dx[50:58])
    (own,) = gradients_of(alone, 0).values()
    for gradient, right in zip(gradients_of(together, 0)[id(together[0].adapter)], own, strict=True):
        assert torch.equal(gradient, right)


def test_overflow_of_one_adapter_reaches_no_gradient_of_another() -> None:
    interpret()
    segments, (x, dys) = segments_of(torch.float32), operands(0, torch.float32)
    backward(segments, 0, x, dys)
    clean = gradients_of(segments, 0)
    ill = segments_of(torch.float32)
    x[12:45] = dys[0][12:45] = math.nan
    backward(ill, 0, x, dys)
    ill_gradients = gradients_of(ill, 0)
    for segment, other in zip(segments, ill, strict=True):
        for gradient, right in zip(ill_gradients[id(other.adapter)], clean[id(segment.adapter)], strict=True):
            assert gradient.isnan().any() if other.start == 12 else torch.equal(gradient, right)


def test_an_adapter_of_experts_has_the_rank_of_its_other_linears(model_directories: dict[str, Path]) -> None:
    """One B^T of a group may stand for those of all experts."""
    shapes = Driver(model_directories["qwen3-moe"]).engine.base_model.group_shapes
    for kinds in (("attn", "mlp", "unembed"), ("mlp",)):
        layout = RowLayout(shapes, 8, kinds)
        slab = layout.views(torch.zeros(1, layout.num_values), None)
        adapter = AdapterViews(slab, [views and views.row(0) for views in slab], 0, 1.0)
        assert AdapterTables.of([Segment(0, 4, adapter)], len(shapes)).rank_max == 8


def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass() -> None:
    interpret()
    segments, (x, ys) = segments_of(torch.bfloat16), operands(0, torch.bfloat16)
    solo = [y.clone() for y in ys]
    with sums_in_order():
        ForwardRun.of(segments).forward(0, x, ys)
        ForwardRun.of(segments[1:2]).forward(0, x, solo)
    for y, own in zip(ys, solo, strict=True):
        assert torch.equal(y[1:8], own[1:8])


def test_overflow_of_one_adapter_reaches_no_other() -> None:
    interpret()
    segments, (x, ys) = segments_of(torch.float32), operands(0, torch.float32)
    clean = [y.clone() for y in ys]
    ForwardRun.of(segments).forward(0, x, clean)
    x[12:45] = math.nan
    ForwardRun.of(segments).forward(0, x, ys)
    for y, own in zip(ys, clean, strict=True):
        assert y[12:45].isnan().all()
        assert torch.equal(y[:12], own[:12])
        assert torch.equal(y[45:], own[45:])


def test_a_group_takes_two_launches_whatever_the_number_of_adapters() -> None:
    interpret()
    x, ys = operands(0, torch.bfloat16)
    for segments in (segments_of(torch.bfloat16), segments_of(torch.bfloat16)[:1]):
        run = ForwardRun.of(segments)
        with metered() as moved:
            run.forward(0, x, ys)
        assert moved.num_launches == 2


def test_a_backward_takes_three_launches_whatever_the_number_of_adapters() -> None:
    interpret()
    x, dys = operands(0, torch.bfloat16)
    for segments in (segments_of(torch.bfloat16), segments_of(torch.bfloat16)[:1]):
        run = TrainingRun.of(segments)
        kept = run.forward(0, x, [torch.zeros_like(dy) for dy in dys])
        assert kept is not None
        with metered() as moved:
            run.backward(0, kept, x, dys, torch.zeros_like(x))
        assert moved.num_launches == 3


@pytest.mark.parametrize("is_set", [False, True])
def test_the_kernels_move_as_many_bytes_as_the_fake_device_counts(*, is_set: bool) -> None:
    interpret()
    slab, (x, ys) = Slab.of(32, ("attn",), 3, torch.bfloat16), operands(0, torch.bfloat16)
    run = ForwardRun.of([Segment(20 * slot, 20 * slot + 20, slab.rows[slot]) for slot in range(3)])
    with metered() as moved:
        run.forward(0, x, ys)
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)
    segments = [Segment(20 * slot, 20 * slot + 20, slab.rows[slot], is_set=is_set) for slot in range(3)]
    trained = TrainingRun.of(segments)
    with metered() as moved:
        kept = trained.forward(0, x, ys)
        assert kept is not None
        trained.backward(0, kept, x, ys, torch.zeros_like(x))
    assert moved.num_launches == moved.num_counted == 5
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)


@pytest.mark.slow
def test_samples_by_the_kernels_are_those_by_products(qwen3: Path, own_base_models: None) -> None:
    driver = Driver(qwen3)
    by_products = Sampling(driver, make_sampler(driver))
    by_products.publish("a", "b")
    wanted = [
        request(key or "base", key and f"{key}/v", length, 2, max_tokens=3, seed=length)
        for length, key in enumerate(("a", "", "b"), start=9)
    ]
    expected = by_products.sequences(*wanted)
    interpret()
    driver.engine.base_model.current.fuse_forward = forward_runs
    by_kernels = Sampling(driver, make_sampler(driver))
    with metered() as moved:
        actual = by_kernels.sequences(*wanted)
    assert moved.num_launches
    for mine, theirs in zip(actual, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def test_a_gpu_whose_kernels_cannot_be_launched_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interpret()
    assert can_launch(torch.device("cpu"))
    monkeypatch.setitem(defined, "shrink", "no_module_of_this_name")
    assert not can_launch(torch.device("cpu"))
    assert "without kernels of our own" in caplog.text


@pytest.mark.parametrize(("has_triton", "reason"), [(False, "Triton.* is not installed"), (True, "needs a C compiler")])
def test_a_gpu_without_kernels_says_why(monkeypatch: pytest.MonkeyPatch, reason: str, *, has_triton: bool) -> None:
    monkeypatch.setattr(gpu_operations, "has_triton", lambda: has_triton)
    monkeypatch.setattr(gpu_operations, "has_kernels", lambda _: False)
    assert re.search(reason, missing_kernels(torch.device("cuda")))
    monkeypatch.setattr(gpu_operations, "has_kernels", lambda _: True)
    assert not missing_kernels(torch.device("cuda"))


def test_the_facts_of_a_model_have_the_reason(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Driver(qwen3).engine.base_model
    monkeypatch.setattr(base_model, "missing_kernels", lambda _: "no Triton")
    info = model.info(is_thread_count_invariant=True, are_samples_batch_invariant=True)
    assert info.slow_because == "no Triton"


def test_a_cpu_has_no_such_kernels() -> None:
    assert not can_run(torch.device("cpu"), torch.bfloat16)
    assert not missing_kernels(torch.device("cpu"))
    assert ALIGNMENT % 8 == 0, "matrices begin at multiples of 16 bytes"

"""The kernels that add adapters in passes without a backward, in Triton's interpreter, against products one by one."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.numerics.harness import Driver
from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_adapters import NUM_ROWS, Slab, one_by_one, operands, segments_of
from tests.support.numerics.samplers import Sampling, make_sampler, request
from workers.model.forward_runs import AdapterTables, ForwardRun, can_run_forward, forward_runs
from workers.model.gpu_operations import can_launch, defined
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


def test_the_kernels_move_as_many_bytes_as_the_fake_device_counts() -> None:
    interpret()
    slab, (x, ys) = Slab.of(32, ("attn",), 3, torch.bfloat16), operands(0, torch.bfloat16)
    run = ForwardRun.of([Segment(20 * slot, 20 * slot + 20, slab.rows[slot]) for slot in range(3)])
    with metered() as moved:
        run.forward(0, x, ys)
    assert moved.num_launches == moved.num_counted == 2
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


def test_a_cpu_has_no_such_kernels() -> None:
    assert not can_run_forward(torch.device("cpu"), torch.bfloat16)
    assert ALIGNMENT % 8 == 0, "matrices begin at multiples of 16 bytes"

"""Products of few rows, with norm, gate or sum and adapters' A in one kernel, in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from tests.support.numerics.few_products import EPS, FewProduct
from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from tests.support.numerics.random_adapters import MLP_SHAPES, NUM_ROWS, Slab, segments_of
from workers.model import few_rows
from workers.model.few_rows import can_multiply
from workers.model.fused_runs import AdapterTables, ForwardRun
from workers.model.segments import Run, Segment


@pytest.mark.parametrize("num_rows", [1, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["bias", "norm", "added", "gated"])
def test_products_are_those_of_separate_operations(num_rows: int, dtype: torch.dtype, way: str) -> None:
    interpret()
    product = FewProduct.of(num_rows, dtype, way)
    expected = product.one_by_one()
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-5  # the interpreter cuts values off where a GPU rounds
    assert float((product.run().float() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_any_rank_and_slab_are_shrunk_beside_the_product(
    group: int, dtype: torch.dtype, *, has_norm: bool
) -> None:
    interpret()
    segments, shape = segments_of(dtype, shapes=MLP_SHAPES), MLP_SHAPES[group]
    product = FewProduct.of(NUM_ROWS, dtype, "norm" if has_norm else "alone", shape.d_in, sum(shape.d_outs))
    run = ForwardRun.of(segments)
    xa = product.shrunk(run, group, len(shape.d_outs))
    rows = product.x if product.norm is None else F.rms_norm(product.x, (shape.d_in,), product.norm, EPS)
    expected = run.shrunk(group, rows, len(shape.d_outs)).sum(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6
    for segment in segments:
        if (views := segment.adapter.groups[group]) is None:
            assert xa[segment.start : segment.stop].isnan().all(), "a row of no adapter is not written"
            continue
        own = (slice(segment.start, segment.stop), slice(len(views.A)))
        assert float((xa[own] - expected[own]).abs().max()) <= tolerance * float(expected[own].abs().max())


@pytest.mark.parametrize("way", ["norm", "gated"])
def test_a_row_has_the_same_bits_in_any_company_and_one_that_is_not_finite_reaches_no_other(way: str) -> None:
    interpret()
    product = FewProduct.of(60, torch.bfloat16, way)
    with sums_in_order():
        whole = product.run()
        assert torch.equal(product.of_rows(slice(7, 9)).run(), whole[7:9])
        product.x[3] = math.nan
        spoiled = product.run()
    assert spoiled[3].isnan().all()
    assert torch.equal(spoiled[:3], whole[:3])
    assert torch.equal(spoiled[4:], whole[4:])


def test_a_product_with_adapters_takes_a_launch_and_the_bytes_that_the_fake_device_counts() -> None:
    interpret()
    slab, shape = Slab.of(32, ("mlp",), 3, torch.bfloat16, shapes=MLP_SHAPES), MLP_SHAPES[0]
    run = ForwardRun.of([Segment(16 * slot, 16 * slot + 16, slab.rows[slot]) for slot in range(3)])
    with metered() as moved:
        FewProduct.of(48, torch.bfloat16, "norm", shape.d_in, sum(shape.d_outs)).shrunk(run, 0, 2)
        FewProduct.of(48, torch.bfloat16, "gated").run()
        FewProduct.of(48, torch.bfloat16, "added").run()
    assert moved.num_launches == moved.num_counted == 3
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.02)


def test_more_rows_and_other_runs_are_left_to_the_library() -> None:
    slab = Slab.of(8, ("mlp",), 1, torch.float32, shapes=MLP_SHAPES)
    part = ForwardRun.of([Segment(0, 1, slab.rows[0])])
    whole = ForwardRun(part.tables, [True] * len(MLP_SHAPES), has_all_rows=True)
    assert can_multiply(few_rows.ROWS_MAX, [])
    assert can_multiply(1, [whole])
    assert not can_multiply(few_rows.ROWS_MAX + 1, [whole])
    assert not can_multiply(1, [part]), "rows of no tile would not go through the gate"
    assert not can_multiply(1, [whole, whole])
    assert not can_multiply(1, [Run(0, 1, [slab.rows[0]])])


def test_rows_between_segments_have_tiles_without_an_adapter() -> None:
    segments = segments_of(torch.float32, shapes=MLP_SHAPES)
    tables = AdapterTables.of(segments, len(MLP_SHAPES), num_rows=64)
    adapted = AdapterTables.of(segments, len(MLP_SHAPES)).tiles
    assert tables.tiles.tolist() == [*adapted.tolist(), [9, -3, 0], [45, -5, 0], [58, -6, 0]]
    assert sum(abs(count) for _, count, _ in tables.tiles.tolist()) == 64

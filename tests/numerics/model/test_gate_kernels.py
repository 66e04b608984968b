"""A gate joined with the sums of its adapters, in Triton's interpreter, has the bits of one kernel after another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.numerics.gated_mlp import Operands, gradients, joined, one_after_another
from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from tests.support.numerics.random_adapters import MLP_SHAPES, NUM_ROWS, Slab, segments_of
from workers.model.segments import Segment


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], rows: Tensor | slice = slice(None)) -> None:
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine[rows], right[rows], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(mine[rows].signbit(), right[rows].signbit()), "zeros have signs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_kernels_have_the_bits_of_one_after_another(dtype: torch.dtype) -> None:
    """Of adapters of all ranks, of one that does not adapt the layer, and beside one that is not finite."""
    interpret()
    given = Operands.of(dtype)
    given.x[12:45] = given.dy[12:45] = math.nan
    given.gate_up[8] = given.dout[8] = -0.0  # of the adapter that does not adapt the layer
    segments, others = (segments_of(dtype, shapes=MLP_SHAPES) for _ in range(2))
    is_adapted = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for segment in segments:
        is_adapted[segment.start : segment.stop] = True
    with sums_in_order():  # programs of the joined kernels have fewer columns
        expected = one_after_another(segments, given)
        actual = joined(others, given)
    assert_same(actual, expected, is_adapted)
    assert_same(gradients(others), gradients(segments))
    for part in actual:
        assert part[12:45].isnan().all()
        assert not part[:12].isnan().any()


def test_rows_without_an_adapter_go_through_the_gate_and_rows_of_no_tile_stay_as_they_are() -> None:
    interpret()
    given, segments = Operands.of(torch.bfloat16), segments_of(torch.bfloat16, shapes=MLP_SHAPES)
    given.gate_up[9], given.dout[9] = -0.0, -0.0
    actual = joined(segments, given, before=7.0, num_rows=11)
    expected = [given.gate_up, torch.zeros_like(given.dout), torch.zeros_like(given.gate_up)]
    torch.ops.tinkerpool.gate(expected[1], given.gate_up)
    torch.ops.tinkerpool.gate_backward(expected[2], given.dout, given.gate_up)
    assert_same(actual, expected, slice(9, 11))
    gate_up, *others = actual
    assert torch.equal(gate_up[11], given.gate_up[11])
    assert all((part[11] == 7).all() for part in others)


def test_joined_kernels_save_a_launch_each_way_and_move_the_bytes_that_the_fake_device_counts() -> None:
    interpret()
    slab, given = Slab.of(32, ("mlp",), 3, torch.bfloat16, shapes=MLP_SHAPES), Operands.of(torch.bfloat16)
    segments = [Segment(20 * slot, 20 * slot + 20, slab.rows[slot]) for slot in range(3)]
    with metered() as apart:
        one_after_another(segments, given)
    with metered() as moved:
        joined(segments, given)
    assert moved.num_launches == moved.num_counted == apart.num_launches - 2
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)
    assert moved.num_bytes < apart.num_bytes

"""The elementwise chains of a decoder layer by kernels of our own, against operations of torch in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.support.numerics.gated_mlp import Operands, gradients, joined, one_after_another
from tests.support.numerics.random_adapters import MLP_SHAPES, segments_of
from tests.support.numerics.random_delta import RandomChunks
from tests.support.numerics.random_layers import (
    RandomHeads,
    gated_by_kernels,
    gated_by_operations,
    norm_by_kernels,
    norm_by_operations,
    random_gate,
    random_norm,
)

pytestmark = pytest.mark.gpu

NUM_ROWS = 300
BF16 = 2.0**-8
"""Relative tolerance: one rounding to 8 bits."""


@pytest.mark.parametrize(("counts", "head_dim"), [((16, 8), 128), ((3, 1), 80), ((18, 9), 256)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_and_their_gradients_are_those_of_separate_operations(
    counts: tuple[int, int], head_dim: int, *, has_norms: bool
) -> None:
    heads = RandomHeads.of(NUM_ROWS, counts, head_dim, torch.bfloat16, has_norms=has_norms, device="cuda")
    for mine, right in zip(heads.by_kernels(), heads.by_operations(), strict=True):
        torch.testing.assert_close(mine.float(), right, rtol=BF16, atol=1e-5)


@pytest.mark.parametrize("width", [100, 3072, 5000])
def test_a_gate_and_an_added_norm_are_those_of_separate_operations(width: int) -> None:
    gate = random_gate(NUM_ROWS, width, torch.bfloat16, "cuda")
    norm = random_norm(NUM_ROWS, width, torch.bfloat16, "cuda")
    total, *normed = norm_by_kernels(*norm)
    assert torch.equal(total, norm[0] + norm[1])
    actual = [*gated_by_kernels(*gate), *normed]
    expected = [*gated_by_operations(*gate), *norm_by_operations(total, *norm[2:])]
    for mine, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.float(), right, rtol=BF16, atol=1e-5)


def test_a_gate_joined_with_its_adapters_has_the_bits_of_one_kernel_after_another() -> None:
    given = Operands.of(torch.bfloat16, "cuda")
    segments, others = (segments_of(torch.bfloat16, "cuda", MLP_SHAPES) for _ in range(2))
    rows = torch.cat([torch.arange(segment.start, segment.stop) for segment in segments])
    for actual, expected in zip(joined(others, given), one_after_another(segments, given), strict=True):
        assert torch.equal(actual[rows], expected[rows])
    for actual, expected in zip(gradients(others), gradients(segments), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("length", [None, 1.0])
@pytest.mark.parametrize(("sizes", "heads"), [((32, 64), (16, 128)), ((7, 16), (3, 80))])
def test_heads_of_linear_attention_and_the_gradients_of_rows_are_those_of_separate_operations(
    sizes: tuple[int, int], heads: tuple[int, int], length: float | None
) -> None:
    given = RandomChunks.of(sizes, heads, torch.bfloat16, length, "cuda")
    (out, drows), (expected, expected_drows) = given.by_kernels(), given.by_operations()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drows.float(), expected_drows, rtol=BF16, atol=1e-4)
    for whole, own in zip((out, drows), given.only(slice(1, 3)).by_kernels(), strict=True):
        assert torch.equal(whole[1:3], own)

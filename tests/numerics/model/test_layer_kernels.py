"""The elementwise chains of a decoder layer, in Triton's interpreter, against operations of torch in fp32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_layers import (
    RandomHeads,
    gated_by_kernels,
    gated_by_operations,
    norm_by_kernels,
    norm_by_operations,
    random_gate,
    random_norm,
)
from workers.model.layer_operations import rotated_heads

HEADS = [((4, 2), 16), ((16, 8), 128), ((3, 1), 80), ((5, 3), 96), ((1, 1), 6), ((18, 9), 256)]
"""H and K, and E; more heads than a program has at a time among them."""
WIDTHS = [1, 100, 1024, 1500]
"""F; a program has 1,024 columns at a time."""
NUM_ROWS = 5


def all_by_kernels(heads: RandomHeads, gate: Sequence[Tensor], norm: Sequence[Tensor]) -> list[Tensor]:
    """Return what all kernels give, (T, ...) each."""
    return [*heads.by_kernels(), *gated_by_kernels(*gate), *norm_by_kernels(*norm)]


def assert_rounded_once(actual: list[Tensor], expected: list[Tensor]) -> None:
    for mine, right in zip(actual, expected, strict=True):
        # In bf16 the interpreter cuts values off where a GPU rounds.
        rtol = 1e-5 if mine.dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(mine.float(), right, rtol=rtol, atol=1e-5)


def rows_of(heads: RandomHeads, rows: slice) -> RandomHeads:
    """Return some rows, in memory of their own."""
    given = heads.projected
    parts = {name: getattr(given, name)[rows].clone() for name in ("rows", "cos", "sin")}
    return replace(
        heads, projected=replace(given, **parts), gradients=[gradient[rows].clone() for gradient in heads.gradients]
    )


@pytest.mark.parametrize(("counts", "head_dim"), HEADS)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_and_their_gradients_are_those_of_separate_operations(
    counts: tuple[int, int], head_dim: int, dtype: torch.dtype, *, has_norms: bool
) -> None:
    interpret()
    heads = RandomHeads.of(NUM_ROWS, counts, head_dim, dtype, has_norms=has_norms)
    assert_rounded_once(heads.by_kernels(), heads.by_operations())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_and_its_gradient_are_those_of_separate_operations(width: int, dtype: torch.dtype) -> None:
    interpret()
    gate_up, dout = random_gate(NUM_ROWS, width, dtype)
    assert_rounded_once(gated_by_kernels(gate_up, dout), gated_by_operations(gate_up, dout))


@pytest.mark.parametrize("width", [1, 100, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_its_norm_and_their_gradients_are_those_of_separate_operations(width: int, dtype: torch.dtype) -> None:
    interpret()
    norm = random_norm(NUM_ROWS, width, dtype)
    hidden, added, *others = norm
    total, *actual = norm_by_kernels(*norm)
    assert_rounded_once([total], [hidden.float() + added.float()])
    assert_rounded_once(actual, norm_by_operations(total, *others))


def test_gradients_that_are_broadcast_are_taken_as_they_are() -> None:
    """Those of a sum, and of heads of which only the queries are used."""
    interpret()
    heads = RandomHeads.of(2, (3, 2), 16, torch.float32, has_norms=True)
    gradients = [torch.ones(()).expand_as(heads.gradients[0]), *map(torch.zeros_like, heads.gradients[1:])]
    given, rows = heads.projected, heads.projected.rows.detach().requires_grad_()
    query, _, _ = rotated_heads(rows, given.cos, given.sin, given.norms, 3)
    actual = torch.autograd.grad(query.sum(), rows)
    assert_rounded_once(list(actual), replace(heads, gradients=gradients).by_operations()[-1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_pass(dtype: torch.dtype) -> None:
    interpret()
    heads = RandomHeads.of(NUM_ROWS, (5, 3), 80, dtype, has_norms=True)
    gate, (*parts, weight) = random_gate(NUM_ROWS, 100, dtype), random_norm(NUM_ROWS, 100, dtype)
    together = all_by_kernels(heads, gate, [*parts, weight])
    for rows in (slice(0, 1), slice(2, 4)):
        own_gate, own_parts = ([part[rows].clone() for part in given] for given in (gate, parts))
        solo = all_by_kernels(rows_of(heads, rows), own_gate, [*own_parts, weight])
        for whole, own in zip(together, solo, strict=True):
            assert torch.equal(whole[rows], own)


def test_a_row_that_is_not_finite_reaches_no_other() -> None:
    interpret()
    heads = RandomHeads.of(NUM_ROWS, (5, 3), 80, torch.float32, has_norms=True)
    gate, norm = random_gate(NUM_ROWS, 100, torch.float32), random_norm(NUM_ROWS, 100, torch.float32)
    clean = all_by_kernels(heads, gate, norm)
    for given in (heads.projected.rows, *heads.gradients, *gate, *norm[:4]):
        given[2] = math.nan
    for part, before in zip(all_by_kernels(heads, gate, norm), clean, strict=True):
        assert part[2].isnan().all()
        assert torch.equal(part[:2], before[:2])
        assert torch.equal(part[3:], before[3:])


def test_what_is_kept_for_the_backward_is_the_input_alone() -> None:
    interpret()
    kept: list[Tensor] = []

    def keep(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    def addresses(*tensors: Tensor) -> set[int]:
        return {tensor.data_ptr() for tensor in tensors}

    for has_norms in (True, False):
        given = RandomHeads.of(2, (3, 2), 16, torch.float32, has_norms=has_norms).projected
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            rotated_heads(given.rows.requires_grad_(), given.cos, given.sin, given.norms, 3)
        inputs = [given.cos, given.sin, *([given.rows] if has_norms else [])]
        assert addresses(*kept) == addresses(*inputs)


def test_without_gradients_the_numbers_are_the_same() -> None:
    interpret()
    heads = RandomHeads.of(2, (3, 2), 16, torch.bfloat16, has_norms=True)
    given = heads.projected
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            parts = rotated_heads(given.rows, given.cos, given.sin, given.norms, 3)
        assert not any(part.requires_grad for part in parts)
        for part, right in zip(parts, heads.by_kernels()[:3], strict=True):
            assert torch.equal(part, right)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_heads_take_a_launch_each_way_and_the_bytes_that_the_fake_device_counts(
    head_dim: int, *, has_norms: bool
) -> None:
    interpret()
    heads = RandomHeads.of(NUM_ROWS, (16, 8), head_dim, torch.bfloat16, has_norms=has_norms)
    with metered() as moved:
        heads.by_kernels()
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == moved.num_counted_bytes


def test_a_gate_takes_a_launch_each_way_and_the_bytes_that_the_fake_device_counts() -> None:
    interpret()
    gate = random_gate(NUM_ROWS, 1500, torch.bfloat16)
    with metered() as moved:
        gated_by_kernels(*gate)
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == moved.num_counted_bytes


def test_a_norm_takes_a_launch_each_way_and_the_bytes_that_the_fake_device_counts() -> None:
    interpret()
    norm = random_norm(NUM_ROWS, 1500, torch.bfloat16)
    with metered() as moved:
        norm_by_kernels(*norm)
    assert moved.num_launches == moved.num_counted == 2
    assert moved.num_bytes == moved.num_counted_bytes

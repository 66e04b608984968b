"""Rows for optimizer steps, of any length, and a step by torch's own AdamW in fp64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from workers.bank.entries import Row
from workers.contract.messages import AdamParams
from workers.training.optim import Step, StepNorms

LENGTHS = (1, 63, 2048, 2049, 7001)
"""Less and more than a part, and multiples of nothing."""
PARAMS = (
    AdamParams(learning_rate=0.1, weight_decay=0.1),
    AdamParams(learning_rate=0.01, grad_clip_norm=0.5),
    AdamParams(learning_rate=0.01, grad_clip_norm=1e9, beta1=0.5, beta2=0.999, eps=1e-3),
    AdamParams(learning_rate=0.0, beta1=0.0, beta2=0.0),
    AdamParams(learning_rate=1e-4, eps=1e-8, weight_decay=1.0, grad_clip_norm=1.0),
)
"""Of each row's step."""


def make_row(num_values: int, seed: int = 0, *, has_copy: bool = True, device: str = "cpu") -> Row:
    """Return a row of random values, and no slab or views: a step depends on neither."""
    generator = torch.Generator().manual_seed(seed)
    weights, exp_avg, exp_avg_sq, grad = (torch.randn(num_values, generator=generator).to(device) for _ in range(4))
    nothing: Any = None
    return Row(nothing, weights, exp_avg, exp_avg_sq.abs(), grad, nothing, weights.bfloat16() if has_copy else None)


def make_rows(lengths: Sequence[int] = LENGTHS, **options: Any) -> list[Row]:
    """Return a row of each length; the same values each time."""
    return [make_row(length, seed, **options) for seed, length in enumerate(lengths)]


def steps_of(rows: Sequence[Row], params: Sequence[AdamParams] = PARAMS, num_steps: int = 3) -> list[Step]:
    """Return a step of each row, the first with so many steps and each later one with one more."""
    return [
        Step(row=row, params=own, num_steps=num_steps + index)
        for index, (row, own) in enumerate(zip(rows, params, strict=True))
    ]


def state(row: Row) -> list[torch.Tensor]:
    """Return copies of the vectors of a row: weights, moments, gradient, and the copy in bf16 if it has one."""
    vectors = (row.weights, row.exp_avg, row.exp_avg_sq, row.grad, row.compute)
    return [vector.clone() for vector in vectors if vector is not None]


def is_same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Return whether vectors are equal to the bit."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


Expected = tuple[list[torch.Tensor], float, float]
"""Weights and moments after a step in fp64, the norms of the gradient and of the change."""


def by_torch(step: Step) -> Expected:
    """Return what a step is to give, and write nothing."""
    weights, exp_avg, exp_avg_sq, gradient = (vector.double() for vector in state(step.row)[:4])
    parameter, params = torch.nn.Parameter(weights.clone()), step.params
    parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_([parameter], params.grad_clip_norm or math.inf)
    optimizer = torch.optim.AdamW(
        [parameter], params.learning_rate, (params.beta1, params.beta2), params.eps, params.weight_decay, foreach=False
    )
    count = torch.tensor(float(step.num_steps - 1))
    optimizer.state[parameter] = {"step": count, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer.step()
    now = parameter.detach()
    return [now, exp_avg, exp_avg_sq], float(norm), float((now - weights).norm())


def assert_stepped(step: Step, norms: StepNorms | Exception, expected: Expected) -> None:
    """Assert that a step gave what it was to give."""
    vectors, gradient, update = expected
    assert isinstance(norms, StepNorms)
    assert norms.gradient == pytest.approx(gradient, rel=1e-5)
    assert norms.update == pytest.approx(update, rel=1e-4, abs=1e-7)
    assert norms.adapter == pytest.approx(float(vectors[0].norm()), rel=1e-5)
    for mine, theirs in zip(state(step.row), vectors, strict=False):
        torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-6)
    if step.row.compute is not None:  # the interpreter cuts values off where a GPU rounds
        torch.testing.assert_close(step.row.compute.float(), step.row.weights, rtol=2.0**-7, atol=0)

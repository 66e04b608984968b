"""The backward of attention for short sequences, in Triton's interpreter, against autograd in fp32."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from workers.model.gpu_attention import Sequences, short_gradients, tile_tokens

LENGTHS = [5, 0, 64, 1, 65, 150]
"""Sequences of one tile and of more, an empty one among them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of a backward: dout and out (T, H, E), inputs (T, H or K, E), log-sum-exps (H, T)."""

    dout: Tensor
    inputs: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    log_sums: Tensor
    sequences: Sequences
    expected: tuple[Tensor, ...]
    """Gradients by autograd, in fp32."""

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        return short_gradients(self.dout, self.inputs, self.out, self.log_sums, self.sequences)

    def only(self, number: int) -> Problem:
        """Return one of the sequences, solo, in memory of its own."""
        start, stop = self.sequences.ends[number : number + 2].tolist()
        query, key, value = (rows[start:stop].clone() for rows in self.inputs)
        return Problem(
            self.dout[start:stop].clone(),
            (query, key, value),
            self.out[start:stop].clone(),
            self.log_sums[:, start:stop].clone(),
            sequences_of([stop - start], self.sequences.window),
            tuple(rows[start:stop] for rows in self.expected),
        )


def sequences_of(lengths: Sequence[int], window: int | None, sinks: Tensor | None = None) -> Sequences:
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Sequences(ends=ends, longest=max(lengths), scaling=0.2, window=window, sinks=sinks)


def problem_of(
    lengths: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Problem:
    """Return random operands; queries and keys are parts of one tensor, values of another, as a layer has them."""
    generator = torch.Generator().manual_seed(3)
    num_heads, num_keys = heads
    total = sum(lengths)
    rotated = torch.randn(total, num_heads + num_keys, head_dim, generator=generator).to(dtype)
    projected = torch.randn(total, num_heads + 2 * num_keys, head_dim, generator=generator).to(dtype)
    inputs = rotated[:, :num_heads], rotated[:, num_heads:], projected[:, num_heads + num_keys :]
    sequences = sequences_of(lengths, window, sinks)
    own = [rows.float().detach().requires_grad_() for rows in inputs]
    parts = [*_forward(own[0], own[1], own[2], sequences)]
    out, log_sums = torch.cat([out for out, _ in parts]), torch.cat([sums for _, sums in parts], 1)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    expected = torch.autograd.grad(out, own, dout.float())
    return Problem(dout, inputs, out.detach().to(dtype), log_sums.detach(), sequences, expected)


def _forward(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the outputs (L, H, E) and log-sum-exps (H, L) of each sequence, in fp32."""
    group = query.shape[1] // key.shape[1]
    for start, stop in itertools.pairwise(sequences.ends.tolist()):
        q, k, v = (rows[start:stop].transpose(0, 1) for rows in (query, key, value))  # (heads, L, E)
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        places = torch.arange(stop - start)
        distance = places.unsqueeze(1) - places
        is_seen = (distance >= 0) & (distance < (sequences.window or math.inf))
        scores = (q @ k.mT * sequences.scaling).masked_fill(~is_seen, -math.inf)
        if sequences.sinks is not None:
            scores = torch.cat([scores, sequences.sinks[:, None, None].expand(-1, stop - start, 1)], 2)
        weights = scores.softmax(2)[..., : stop - start]
        yield (weights @ v).transpose(0, 1), scores.logsumexp(2)


@pytest.mark.parametrize(
    ("heads", "head_dim", "window"),
    [
        ((4, 2), 16, None),
        ((4, 4), 16, 3),
        ((6, 1), 16, 64),
        ((2, 1), 80, 100),
        ((2, 2), 256, None),
        ((8, 2), 128, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_short_sequences_are_those_of_autograd(
    heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    interpret()
    problem = problem_of(LENGTHS, heads, head_dim, dtype, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-6  # weights, gradients of scores and results are rounded
    for mine, right in zip(problem.gradients(), problem.expected, strict=True):
        assert mine.dtype == dtype
        assert (mine.float() - right).norm() <= tolerance * right.norm()


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_operands_may_lie_head_by_head_in_memory(heads: tuple[int, int]) -> None:
    """As after a rotation of a part of each head; the library lays its output out as the query."""
    interpret()
    problem = problem_of(LENGTHS, heads)
    query, key, value, out = (
        rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (*problem.inputs, problem.out)
    )
    by_head = replace(problem, inputs=(query, key, value), out=out)
    for mine, right in zip(by_head.gradients(), problem.gradients(), strict=True):
        assert torch.equal(mine, right)


def test_sinks_take_their_part_of_the_weights() -> None:
    interpret()
    problem = problem_of(LENGTHS, sinks=torch.tensor([-3.0, 0.0, 1.5, 4.0]))
    for mine, right in zip(problem.gradients(), problem.expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_sequence_has_the_same_bits_in_any_company(broken: float) -> None:
    interpret()
    problem = problem_of([5, 0, 7, 64, 65, 3], (2, 1))
    ends = problem.sequences.ends.tolist()
    with sums_in_order(), np.errstate(all="ignore"):  # of the interpreter
        solo = {number: problem.only(number).gradients() for number in (0, 3, 4)}
        for tensor, number in itertools.product((problem.dout, *problem.inputs, problem.out), (2, 5)):
            tensor[ends[number] : ends[number + 1]] = broken
        together = problem.gradients()
    for number, alone in solo.items():
        for mine, rows in zip(together, alone, strict=True):
            assert torch.equal(mine[ends[number] : ends[number + 1]], rows)


@pytest.mark.parametrize("length", [64, 192])
def test_a_backward_takes_one_launch_and_the_bytes_that_the_fake_device_counts(length: int) -> None:
    interpret()
    problem = problem_of([length] * 3, (4, 2), 16, torch.bfloat16)
    assert length % tile_tokens(16) == 0
    with metered() as moved:
        problem.gradients()
    assert moved.num_launches == moved.num_counted == 1
    assert moved.num_bytes == moved.num_counted_bytes

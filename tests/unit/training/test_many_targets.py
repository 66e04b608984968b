"""Slopes of many targets of a token in few kernels, against one target after another."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.training.block_scores import add_at_once, add_one_by_one


@given(num_targets=st.integers(1, 70), vocab_size=st.integers(1, 300))
def test_slopes_of_many_targets_are_added_at_once_as_one_by_one(num_targets: int, vocab_size: int) -> None:
    """Bit by bit where no row names a target twice; else to rounding, and never with a neighbour's infinity."""
    generator = torch.Generator().manual_seed(num_targets * vocab_size)
    distinct = [torch.randperm(vocab_size, generator=generator)[:num_targets] for _ in range(5)]
    any_targets = torch.randint(vocab_size, (5, num_targets), generator=generator)
    for targets in (torch.stack(distinct), any_targets):
        slopes = torch.randn(targets.shape, generator=generator)
        slopes[3, 0] = float("inf")
        expected = torch.randn(5, vocab_size, generator=generator)
        actual = expected.clone()
        add_one_by_one(expected, targets, slopes)
        add_at_once(actual, targets, slopes)
        if targets is any_targets:
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(actual, expected)

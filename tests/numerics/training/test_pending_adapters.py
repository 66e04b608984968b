"""The kernels of the loss with adapters of the unembedding, in Triton's interpreter, against torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.numerics.adapted_losses import (
    adapters_of,
    assert_close,
    gradients_of,
    hidden_for,
    losses_of,
    requests_of,
)
from tests.support.numerics.given_logits import random_loss
from tests.support.numerics.interpreted import interpret, metered, parts_first, sums_in_order
from workers.contract.messages import LOGPROBS_TEMPERATURE_MIN

PART, VOCAB = 128, 331
"""What a program takes of a vocabulary that has three parts, and is no multiple of anything. Real parts are longer."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret()
    for module in ("kernel_scores", "loss_kernels"):
        monkeypatch.setattr(f"workers.training.{module}.PART_COLUMNS", PART)


@pytest.mark.parametrize("block_rows", [64, 4], ids=["whole requests", "parts of requests"])
@pytest.mark.parametrize("num_targets", [None, 40])
def test_results_are_those_of_torch_with_adapters_in_the_logits(num_targets: int | None, block_rows: int) -> None:
    requests, adapters = requests_of(VOCAB, num_targets), adapters_of(VOCAB, torch.float32)
    hidden = hidden_for(requests, torch.float32)
    expected, actual = (
        losses_of(requests, adapters, hidden, VOCAB, has_kernels=has_kernels, block_rows=block_rows)
        for has_kernels in (False, True)
    )
    assert_close(actual, expected, 2e-5)
    assert all(bool(gradient.any()) for own in expected.gradients for gradient in own)


@pytest.mark.parametrize("block_rows", [100, 512], ids=["parts of requests", "whole requests"])
def test_an_adapter_of_two_requests_of_several_tiles_gets_the_gradients_of_both(block_rows: int) -> None:
    lengths, (small, other, large, _) = (70, 3, 150, 66), adapters_of(VOCAB, torch.float32)
    requests = [random_loss("cross_entropy", length, VOCAB, seed=length) for length in lengths]
    adapters, hidden = [small, other, large, small], hidden_for(requests, torch.float32)
    with parts_first():
        actual = losses_of(requests, adapters, hidden, VOCAB, has_kernels=True, block_rows=block_rows)
    expected = losses_of(requests, adapters, hidden, VOCAB, has_kernels=False, block_rows=block_rows)
    assert_close(actual, expected, 2e-5)


def test_the_likeliest_token_is_certain_at_the_lowest_temperature() -> None:
    """Its logit is subtracted from itself: what adapters add must be the same both times."""
    request = random_loss("stable_reinforce", 12, VOCAB)
    assert request.temperatures is not None
    request.temperatures[:] = LOGPROBS_TEMPERATURE_MIN
    adapters, hidden = adapters_of(VOCAB, torch.bfloat16)[2:3], hidden_for([request], torch.bfloat16)
    views = adapters[0].groups[0]
    assert views is not None
    xa = adapters[0].scaling * hidden.float() @ views.A.float().T
    request.targets[:, 0] = (xa @ views.Bs[0].float()).argmax(1)  # without the base model's part
    with np.errstate(over="ignore"):  # of the interpreter
        actual = losses_of([request], adapters, hidden, VOCAB, has_kernels=True, weight_scale=0.0)
    assert torch.equal(actual.parts[0].logprobs, torch.zeros(12, 1))


def test_what_adapters_add_to_logits_is_not_rounded() -> None:
    requests, adapters = requests_of(VOCAB), adapters_of(VOCAB, torch.bfloat16)
    hidden = hidden_for(requests, torch.bfloat16)
    actual = losses_of(requests, adapters, hidden, VOCAB, has_kernels=True, weight_scale=0.0)
    wide = adapters_of(VOCAB, torch.float32)
    for adapter, own in zip(wide, adapters, strict=True):
        for views, narrow in zip(adapter.groups, own.groups, strict=True):
            if views is not None and narrow is not None:
                views.A.copy_(narrow.A)
                for B, narrow_B in zip(views.Bs, narrow.Bs, strict=True):
                    B.copy_(narrow_B)
    exact = losses_of(requests, wide, hidden.float(), VOCAB, has_kernels=False, weight_scale=0.0)
    for mine, theirs in zip(actual.parts, exact.parts, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-3)
    assert_close(actual, exact, 2.0**-7)  # gradients are rounded


def test_a_request_has_the_same_bits_alone_and_with_a_neighbour_that_is_not_finite() -> None:
    requests, adapters = requests_of(VOCAB), adapters_of(VOCAB, torch.bfloat16)
    hidden = hidden_for(requests, torch.bfloat16)
    views = adapters[2].groups[0]
    assert views is not None
    views.Bs[0][3, 7] = math.nan
    with sums_in_order():
        together = losses_of(requests, adapters, hidden, VOCAB, has_kernels=True)
        assert [part.is_finite for part in together.parts] == [True, True, False, True]
        for index in (0, 1, 3):
            part, own = together.parts[index], slice(index, index + 1)
            rows = slice(part.start, part.stop)
            alone = losses_of(requests[own], adapters[own], hidden[rows], VOCAB, has_kernels=True)
            assert torch.equal(alone.dhidden, together.dhidden[rows])
            assert torch.equal(alone.parts[0].logprobs, part.logprobs)
            for mine, theirs in zip(alone.gradients[0], together.gradients[index], strict=True):
                assert torch.equal(mine, theirs)


def test_adapters_take_no_launch_to_be_added_and_move_as_many_bytes_as_the_fake_device_counts() -> None:
    requests, adapters = requests_of(VOCAB), adapters_of(VOCAB, torch.bfloat16)
    del requests[1], adapters[1]  # it adapts nothing; the fake device takes all adapters to have the largest rank
    for index in (0, 2):
        adapters[index] = adapters[1]
    hidden = hidden_for(requests, torch.bfloat16)
    with metered() as moved:
        losses_of(requests, adapters, hidden, VOCAB, has_kernels=True)
    assert moved.num_launches == moved.num_counted
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.01)
    assert gradients_of(adapters[0])

"""The kernels of the loss with adapters of the unembedding, in Triton's interpreter, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.numerics.adapted_losses import D_IN, Adapted, adapters_of, gradients_of, losses_of
from tests.support.numerics.given_logits import random_loss
from tests.support.numerics.interpreted import interpret, metered, sums_in_order
from workers.training.losses import RequestLoss

PART, VOCAB = 128, 331
"""What a program takes of a vocabulary that has three parts, and is no multiple of anything. Real parts are longer."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret()
    for module in ("kernel_scores", "loss_kernels"):
        monkeypatch.setattr(f"workers.training.{module}.PART_COLUMNS", PART)


def requests_of(num_targets: int | None = None) -> list[RequestLoss]:
    """Return a request for each of `adapters_of`."""
    names = ("cross_entropy", "importance_sampling", "cross_entropy", "gspo")
    return [
        random_loss(name, 5 + 3 * number, VOCAB, num_targets=num_targets if name == "cross_entropy" else None)
        for number, name in enumerate(names)
    ]


def hidden_for(requests: list[RequestLoss], dtype: torch.dtype) -> Tensor:
    """Return random hidden states (T, D) of the requests' tokens."""
    num_rows = sum(len(request.targets) for request in requests)
    return (torch.randn(num_rows, D_IN, generator=torch.Generator().manual_seed(1)) / 4).to(dtype)


def assert_close(actual: Adapted, expected: Adapted, tolerance: float) -> None:
    for mine, theirs in zip(actual.parts, expected.parts, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=tolerance, atol=tolerance)
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=tolerance, abs=tolerance)
    pairs = [(actual.dhidden, expected.dhidden)]
    pairs += [pair for own in zip(actual.gradients, expected.gradients, strict=True) for pair in zip(*own, strict=True)]
    for own, other in pairs:
        assert (own - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize("block_rows", [64, 4], ids=["whole requests", "parts of requests"])
@pytest.mark.parametrize("num_targets", [None, 40])
def test_results_are_those_of_torch_with_adapters_in_the_logits(num_targets: int | None, block_rows: int) -> None:
    requests, adapters = requests_of(num_targets), adapters_of(VOCAB, torch.float32)
    hidden = hidden_for(requests, torch.float32)
    expected, actual = (
        losses_of(requests, adapters, hidden, VOCAB, has_kernels=has_kernels, block_rows=block_rows)
        for has_kernels in (False, True)
    )
    assert_close(actual, expected, 2e-5)
    assert all(bool(gradient.any()) for own in expected.gradients for gradient in own)


def test_logits_are_rounded_before_adapters_are_added_and_not_again() -> None:
    requests, adapters = requests_of(), adapters_of(VOCAB, torch.bfloat16)
    hidden = hidden_for(requests, torch.bfloat16)
    actual = losses_of(requests, adapters, hidden, VOCAB, has_kernels=True)
    wide = adapters_of(VOCAB, torch.float32)
    for adapter, own in zip(wide, adapters, strict=True):
        for views, narrow in zip(adapter.groups, own.groups, strict=True):
            if views is not None and narrow is not None:
                views.A.copy_(narrow.A)
                for B, narrow_B in zip(views.Bs, narrow.Bs, strict=True):
                    B.copy_(narrow_B)
    exact = losses_of(requests, wide, hidden.float(), VOCAB, has_kernels=False)
    assert_close(actual, exact, 2.0**-5)


def test_a_request_has_the_same_bits_alone_and_with_a_neighbour_that_is_not_finite() -> None:
    requests, adapters = requests_of(), adapters_of(VOCAB, torch.bfloat16)
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
    requests, adapters = requests_of(), adapters_of(VOCAB, torch.bfloat16)
    del requests[1], adapters[1]  # it adapts nothing; the fake device takes all adapters to have the largest rank
    for index in (0, 2):
        adapters[index] = adapters[1]
    hidden = hidden_for(requests, torch.bfloat16)
    with metered() as moved:
        losses_of(requests, adapters, hidden, VOCAB, has_kernels=True)
    assert moved.num_launches == moved.num_counted
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.01)
    assert gradients_of(adapters[0])

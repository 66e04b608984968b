"""The kernels of the loss, in Triton's interpreter, against torch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.numerics.agreement import distance, observe
from tests.support.numerics.given_logits import (
    Losses,
    logits_for,
    losses_of,
    random_loss,
    requests_of_every_kind,
)
from tests.support.numerics.harness import Driver, assemble_again
from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.tenants import TENANTS
from workers.contract.messages import LOGPROBS_TEMPERATURE_MIN
from workers.training import device_logits
from workers.training.device_logits import block_rows_of
from workers.training.losses import RequestLoss

PART, ODD = 128, 331
"""What a program takes of a vocabulary that has three parts, and is no multiple of anything. Real parts are longer."""


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret()
    for module in ("kernel_scores", "loss_kernels"):
        monkeypatch.setattr(f"workers.training.{module}.PART_COLUMNS", PART)


def assert_close(actual: Losses, expected: Losses, tolerance: float) -> None:
    """`tolerance` is that of gradients, relative to each row's largest value."""
    for mine, theirs in zip(actual.parts, expected.parts, strict=True):
        torch.testing.assert_close(mine.logprobs, theirs.logprobs, rtol=1e-6, atol=2e-5)
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-4, abs=1e-4)
        assert (mine.num_clipped, mine.is_finite) == (theirs.num_clipped, theirs.is_finite)
    own, other = actual.gradient.float(), expected.gradient.float()
    apart = (own - other).abs().amax(1)
    assert (apart <= tolerance * other.abs().amax(1)).all(), apart


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("block_rows", [None, 4], ids=["whole requests", "parts of requests"])
@pytest.mark.parametrize(("vocab_size", "dtype"), [(ODD, torch.float32), (ODD, torch.bfloat16), (48, torch.float32)])
def test_results_of_every_loss_are_those_of_torch(vocab_size: int, dtype: torch.dtype, block_rows: int | None) -> None:
    requests = requests_of_every_kind(vocab_size)
    logits = logits_for(requests, vocab_size, dtype)
    expected, actual = (
        losses_of(requests, logits, has_kernels=has_kernels, block_rows=block_rows) for has_kernels in (False, True)
    )
    # The interpreter cuts values off where a GPU rounds.
    assert_close(actual, expected, 1e-4 if dtype == torch.float32 else 2.0**-7)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"])
def test_adjacent_requests_of_one_loss_have_the_bits_that_each_has_alone(loss_fn: str) -> None:
    requests = [random_loss(loss_fn, 3 + number, ODD, seed=number) for number in range(5)]
    logits = logits_for(requests, ODD, torch.bfloat16)
    together = losses_of(requests, logits, has_kernels=True, block_rows=4)
    for index, request in enumerate(requests):
        part = together.parts[index]
        alone = losses_of([request], logits[part.start : part.stop], has_kernels=True, block_rows=4)
        assert torch.equal(alone.gradient, together.rows(index))
        assert torch.equal(alone.parts[0].logprobs, part.logprobs)
        assert (alone.parts[0].loss_sum, alone.parts[0].num_clipped) == (part.loss_sum, part.num_clipped)
    by_torch = losses_of(requests, logits, has_kernels=False, block_rows=4)
    assert [part.num_clipped for part in together.parts] == [part.num_clipped for part in by_torch.parts]
    if loss_fn == "ppo":
        assert len({part.num_clipped for part in together.parts}) > 1


@pytest.mark.usefixtures("small_parts")
def test_a_gradient_is_rounded_once() -> None:
    requests = [random_loss("cross_entropy", 6, ODD, num_targets=40)]
    logits = logits_for(requests, ODD, torch.bfloat16)
    exact = losses_of(requests, logits.float(), has_kernels=True)
    rounded = losses_of(requests, logits, has_kernels=True)
    apart = (rounded.gradient.float() - exact.gradient).abs()
    assert (apart <= 2.0**-7 * exact.gradient.abs()).all()


@pytest.mark.usefixtures("small_parts")
def test_a_request_has_the_same_bits_alone_and_with_others() -> None:
    requests = requests_of_every_kind(ODD)
    logits = logits_for(requests, ODD, torch.bfloat16)
    together = losses_of(requests, logits, has_kernels=True)
    for index, request in enumerate(requests):
        part = together.parts[index]
        alone = losses_of([request], logits[part.start : part.stop], has_kernels=True)
        assert torch.equal(alone.gradient, together.rows(index))
        assert torch.equal(alone.parts[0].logprobs, part.logprobs)
        assert alone.parts[0].loss_sum == part.loss_sum


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_request_alone(bad: float) -> None:
    requests = requests_of_every_kind(ODD)
    logits = logits_for(requests, ODD, torch.bfloat16)
    clean = losses_of(requests, logits, has_kernels=True)
    for failing in (0, 4):
        rows = slice(clean.parts[failing].start, clean.parts[failing].stop)
        logits[rows][1, 300] = bad
    with np.errstate(invalid="ignore"):  # the interpreter's, of differences of infinities
        actual = losses_of(requests, logits, has_kernels=True, block_rows=64)
    assert [part.is_finite for part in actual.parts] == [index not in {0, 4} for index in range(len(requests))]
    for index in range(len(requests)):
        if index in {0, 4}:
            assert not actual.rows(index).any(), "nothing that is not finite is propagated"
        else:
            assert torch.equal(actual.rows(index), clean.rows(index))
            assert actual.parts[index].loss_sum == clean.parts[index].loss_sum


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("loss_fn", ["cross_entropy", "gspo"])
def test_slopes_that_are_not_finite_are_zeros(loss_fn: str) -> None:
    requests = [random_loss(name, 8, ODD) for name in ("cross_entropy", loss_fn, "dro")]
    requests[1].inputs["weights" if loss_fn == "cross_entropy" else "advantages"][5] = math.inf
    logits = logits_for(requests, ODD, torch.float32)
    expected, actual = (
        losses_of(requests, logits, has_kernels=has_kernels, block_rows=4) for has_kernels in (False, True)
    )
    assert [part.is_finite for part in actual.parts] == [True, False, True]
    assert torch.equal(actual.rows(1) == 0, expected.rows(1) == 0)
    assert not actual.rows(1)[4:].any(), "of the part with the infinite value"
    for index in (0, 2):
        torch.testing.assert_close(actual.rows(index), expected.rows(index), rtol=1e-4, atol=1e-7)


@pytest.mark.usefixtures("small_parts")
def test_tokens_without_probability_are_no_trouble() -> None:
    """Also where a whole block of columns has none."""
    requests = [random_loss("cross_entropy", 4, 2)]
    logits = logits_for(requests, ODD, torch.float32)
    logits[:, 2:300] = -math.inf
    logits[:2, :2] -= 200
    expected, actual = (losses_of(requests, logits, has_kernels=has_kernels) for has_kernels in (False, True))
    assert actual.gradient.isfinite().all()
    assert_close(actual, expected, 1e-4)


@pytest.mark.usefixtures("small_parts")
def test_temperatures_may_be_as_low_as_a_request_may_have_them() -> None:
    request = random_loss("stable_reinforce", 12, ODD)
    assert request.temperatures is not None
    request.temperatures[::2] = LOGPROBS_TEMPERATURE_MIN
    logits = logits_for([request], ODD, torch.float32)
    logits[torch.arange(12), request.targets[:, 0]] = logits.amax(1)  # two tokens with half of the probability each
    with np.errstate(over="ignore"):  # of the interpreter
        expected, actual = (losses_of([request], logits, has_kernels=has_kernels) for has_kernels in (False, True))
    assert_close(actual, expected, 1e-4)


def loss_in_blocks(requests: list[RequestLoss], logits: Tensor) -> tuple[int, int, int, int]:
    """Return launches and bytes of a pass, and what the fake device counts for them."""
    with metered() as moved:
        losses_of(requests, logits, has_kernels=True)
    return moved.num_launches, moved.num_bytes, moved.num_counted, moved.num_counted_bytes


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("num_requests", [1, 5])
@pytest.mark.parametrize("num_targets", [None, 70])
def test_a_block_takes_four_launches_that_move_as_many_bytes_as_the_fake_device_counts(
    num_requests: int, num_targets: int | None
) -> None:
    requests = [random_loss("cross_entropy", 4, ODD, num_targets=num_targets, seed=n) for n in range(num_requests)]
    logits = logits_for(requests, ODD, torch.bfloat16)
    num_launches, num_bytes, num_counted, num_counted_bytes = loss_in_blocks(requests, logits)
    assert num_launches == num_counted == 4
    if num_targets is None:
        assert num_bytes == pytest.approx(num_counted_bytes, rel=0.01)
    else:  # targets are read again where they are in a block of columns
        assert num_counted_bytes < num_bytes < 2 * num_counted_bytes


@pytest.mark.slow
def test_tenants_train_by_kernels_as_by_torch(
    qwen3: Path, own_base_models: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpret()
    monkeypatch.setattr(device_logits, "block_rows_of", lambda *_, **__: 32)  # real ones are longer than all requests
    tenants = [tenant for tenant in TENANTS if tenant.key in {"small", "wide", "attn", "many"}]
    traces = []
    for has_kernels in (False, True):
        driver = Driver(qwen3)
        driver.engine.base_model.is_deferred = True
        driver.engine.base_model.scores_by_kernels = has_kernels
        assemble_again(driver.engine)
        with metered() as moved:
            traces.append(observe(driver, tenants))
        assert bool(moved.num_launches) == has_kernels
    apart = distance(traces[1], traces[0])
    assert apart.logprobs < 1e-5
    assert apart.gradients < 1e-5


def test_blocks_by_kernels_take_no_more_memory_than_those_of_torch() -> None:
    """In bf16: logits twice, against logits twice and log-probabilities in fp32."""
    for vocab_size in (258, 32_000, 151_936, 262_144):
        by_torch, by_kernels = (block_rows_of(vocab_size, has_kernels=has_kernels) for has_kernels in (False, True))
        assert by_torch <= by_kernels
        assert 4 * by_kernels <= 8 * by_torch

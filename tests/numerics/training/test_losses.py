"""Every loss and its hand-written slope against plain autograd on the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.numerics.harness import VOCAB_SIZE, make_data
from tests.support.numerics.naive import PLAIN_LOSSES, plain_inputs
from workers.contract.messages import Datum
from workers.training.losses import LOSSES, prepare

CONFIGS: dict[str, list[dict[str, float]]] = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {"clip_low_threshold": 0.0}],
    "cispo": [{}, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}],
    "dro": [{}, {"beta": 0.7}],
    "gspo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}],
    "stable_reinforce": [{}],
}


def assert_equals_plain(data: tuple[Datum, ...], loss_fn: str, config: dict[str, float], p: torch.Tensor) -> None:
    """Compare a loss and its slope with autograd; p (N, K): the log-probabilities of all targets."""
    request = prepare(data, loss_fn, config, VOCAB_SIZE)
    terms = request.sequence_terms(p.detach())
    total = torch.zeros(())
    start = 0
    for datum in data:
        stop = start + len(datum.tokens)
        part = p[start:stop]
        part = part if datum.loss_inputs["target_tokens"].ndim == 2 else part[:, 0]
        total = total + PLAIN_LOSSES[loss_fn](part, plain_inputs(datum), config)
        start = stop
    (slope,) = torch.autograd.grad(total, p)
    torch.testing.assert_close(terms.loss.sum(), total.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(terms.slope, slope, rtol=1e-5, atol=1e-6)
    if request.loss.is_local:
        pieces = [request.terms(p.detach()[a : a + 4], a, min(a + 4, len(p))) for a in range(0, len(p), 4)]
        torch.testing.assert_close(torch.cat([piece.slope for piece in pieces]), slope, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_fn", "config"), [(name, config) for name, configs in CONFIGS.items() for config in configs], ids=str
)
@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_loss_and_slope_equal_the_formula(
    loss_fn: str, config: dict[str, float], lengths: list[int], seed: int
) -> None:
    data = make_data(loss_fn, lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    p = (torch.randn(sum(lengths), 1, generator=generator) * 0.5 - 6).requires_grad_()
    assert_equals_plain(data, loss_fn, config, p)


def test_cross_entropy_takes_several_targets_of_different_number_per_datum() -> None:
    data = (*make_data("cross_entropy", [5], num_targets=3), *make_data("cross_entropy", [4], num_targets=2))
    request = prepare(data, "cross_entropy", {}, VOCAB_SIZE)
    assert request.targets.shape == (9, 3)
    p = torch.randn(9, 3).requires_grad_()
    loss = request.sequence_terms(p.detach()).loss.sum()
    first, second = (torch.from_numpy(datum.loss_inputs["weights"]) for datum in data)
    expected = -(p[:5] * first).sum() - (p[5:, :2] * second).sum()
    torch.testing.assert_close(loss, expected.detach())
    assert [part.shape for part in request.split_logprobs(p.detach())] == [(5, 3), (4, 2)]


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_clip_thresholds_may_be_given_per_token(loss_fn: str) -> None:
    rng = np.random.default_rng(0)
    (datum,) = make_data(loss_fn, [12])
    bounds: dict[str, Any] = {
        "clip_low_threshold": rng.uniform(0.5, 1, 12).astype(np.float32),
        "clip_high_threshold": rng.uniform(1, 1.5, 12).astype(np.float32),
    }
    data = (Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, **bounds}),)
    assert_equals_plain(data, loss_fn, {}, (torch.randn(12, 1) * 0.5 - 6).requires_grad_())


def test_gspo_takes_the_mean_over_the_tokens_that_the_mask_selects() -> None:
    (datum,) = make_data("gspo", [12])
    mask = np.array([0, 1] * 6, dtype=np.float32)
    data = (Datum(tokens=datum.tokens, loss_inputs={**datum.loss_inputs, "sequence_ratio_mask": mask}),)
    config = {"clip_low_threshold": 0.1, "clip_high_threshold": 10.0}
    assert_equals_plain(data, "gspo", config, (torch.randn(12, 1) * 0.5 - 6).requires_grad_())


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
def test_a_clip_changes_no_gradient_of_a_token_without_an_advantage(loss_fn: str) -> None:
    (datum,) = make_data(loss_fn, [6])
    inputs: dict[str, Any] = {
        **datum.loss_inputs,
        "logprobs": np.zeros(6, np.float32),
        "advantages": np.zeros(6, np.float32),
    }
    config = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    request = prepare((Datum(tokens=datum.tokens, loss_inputs=inputs),), loss_fn, config, VOCAB_SIZE)
    terms = request.sequence_terms(torch.full((6, 1), -6.0))
    assert not terms.slope.any()
    assert terms.is_clipped is not None
    assert not terms.is_clipped.any()


def test_every_loss_is_tested() -> None:
    assert set(LOSSES) == set(PLAIN_LOSSES) == set(CONFIGS)


def _changed(loss_fn: str = "ppo", **changes: Any) -> tuple[Datum, ...]:
    (datum,) = make_data(loss_fn, [4])
    inputs: dict[str, Any] = {**datum.loss_inputs, **changes}
    return (Datum(tokens=datum.tokens, loss_inputs={k: v for k, v in inputs.items() if v is not None}),)


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "message"),
    [
        ((), "ppo", {}, "the batch is empty"),
        (_changed(), "pppo", {}, "unknown loss function 'pppo'"),
        (_changed(), "ppo", {"clip": 1.0}, "unknown option clip of ppo"),
        (_changed(), "ppo", {"clip_low_threshold": 2.0}, "above clip_high_threshold"),
        (_changed(), "ppo", {"clip_low_threshold": float("nan")}, "expected a finite number"),
        (_changed(advantages=None), "ppo", {}, "datum 0 has no advantages"),
        (_changed(weights=np.ones(4, np.float32)), "ppo", {}, "unknown loss inputs weights"),
        (_changed("cross_entropy", weights=None), "cross_entropy", {}, "datum 0 has no weights"),
        (_changed(advantages=np.ones(3, np.float32)), "ppo", {}, r"advantages has shape \(3,\), expected \(4,\)"),
        (_changed(target_tokens=np.zeros(3, np.int32)), "ppo", {}, "target_tokens of shape"),
        (_changed(target_tokens=np.zeros((4, 2), np.int32)), "ppo", {}, "only cross_entropy takes"),
        (_changed(target_tokens=np.full(4, 258, np.int32)), "ppo", {}, "token id 258 is outside the vocabulary of 258"),
        (_changed(target_tokens=np.full(4, -1, np.int32)), "ppo", {}, "token id -1"),
        (_changed(target_tokens=np.zeros(4, np.float32)), "ppo", {}, "expected int32"),
        (_changed("gspo", sequence_ratio_mask=np.zeros(4, np.float32)), "gspo", {}, "selects no token"),
        ((*_changed("gspo"), *_changed("gspo", sequence_ratio_mask=np.ones(4, np.float32))), "gspo", {}, "some datums"),
        ((Datum(tokens=np.zeros(0, np.int32), loss_inputs={}),), "ppo", {}, "datum 0 has no tokens"),
    ],
)
def test_bad_loss_inputs_are_refused_with_the_change_needed(
    data: tuple[Datum, ...], loss_fn: str, config: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(data, loss_fn, config, VOCAB_SIZE)

"""stable_reinforce: REINFORCE where sampler and trainer agree, at every temperature, and bounded where they do not."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.bench.off_policy_table import Condition, run
from workers.contract.messages import Datum
from workers.training.losses import prepare

VOCAB_SIZE, LENGTH = 3, 3
SEQUENCES = torch.tensor(list(product(range(VOCAB_SIZE), repeat=LENGTH)))
"""All sequences (27, LENGTH)."""
SEEDS = range(1)


def all_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of every token of every sequence (27, LENGTH), from logits of each prefix (27, 3)."""
    prefixes = torch.zeros_like(SEQUENCES)
    for position in range(1, LENGTH):
        prefixes[:, position] = 1 + prefixes[:, position - 1] * VOCAB_SIZE + SEQUENCES[:, position - 1]
    return (logits[prefixes] / temperature).log_softmax(-1).gather(2, SEQUENCES[..., None])[..., 0]


def slopes_of(loss: str, p: Tensor, q: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    """Return d(loss)/d(p) (27, LENGTH) of each sequence, with one advantage for all its tokens."""
    data = []
    for tokens, own, advantage in zip(SEQUENCES, q, advantages, strict=True):
        inputs = {
            "target_tokens": tokens.numpy().astype(np.int32),
            "logprobs": own.numpy().astype(np.float32),
            "advantages": np.full(LENGTH, float(advantage), np.float32),
        }
        if loss == "stable_reinforce":
            inputs["temperatures"] = np.full(LENGTH, temperature, np.float32)
        data.append(Datum(tokens=inputs["target_tokens"], loss_inputs=inputs))
    return prepare(data, loss, {}, VOCAB_SIZE).sequence_terms(p.float().reshape(-1, 1)).slope.view(-1, LENGTH)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_where_sampler_and_trainer_agree_the_gradient_is_that_of_the_expected_reward_at_every_temperature(
    temperature: float,
) -> None:
    """Exactly: over all sequences, weighted by their probabilities."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1 + 3 + 9 + 27, VOCAB_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
    rewards = torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)
    p = all_logprobs(logits, temperature)
    probabilities = p.sum(1).exp()
    expected = (probabilities * rewards).sum()
    (true_gradient,) = torch.autograd.grad(-expected, logits, retain_graph=True)
    advantages = rewards - float(expected.detach())
    slopes = slopes_of("stable_reinforce", p.detach(), p.detach(), advantages, temperature)
    (gradient,) = torch.autograd.grad((probabilities.detach()[:, None] * slopes * p).sum(), logits)
    torch.testing.assert_close(gradient, true_gradient, rtol=1e-5, atol=1e-7)


def test_no_token_weighs_more_than_in_reinforce_however_far_the_sampler_is() -> None:
    generator = torch.Generator().manual_seed(2)
    p, q = (torch.randn(27, LENGTH, generator=generator) * 20 - 30 for _ in range(2))
    advantages = torch.randn(27, generator=generator)
    slopes = slopes_of("stable_reinforce", p, q, advantages, 1.0)
    good = advantages >= 0
    assert torch.equal(slopes[good], -advantages[good, None].expand(-1, LENGTH))
    bad = -slopes[~good] / advantages[~good, None]  # the weights
    assert (bad >= 0).all()
    assert (bad <= 1).all()
    ratios = torch.exp((p - q)[~good].sum(1).clamp(max=0))
    torch.testing.assert_close(bad, ratios[:, None].expand_as(bad))
    assert (slopes_of("importance_sampling", p, q, advantages, 1.0).abs() > 1e6).any(), "others have no such bound"


@pytest.mark.slow
@pytest.mark.long  # in each run the tests above have the gradients
@pytest.mark.parametrize(
    ("condition", "rivals"),
    [
        (Condition(staleness=0), {"importance_sampling": 0.02}),
        (Condition(staleness=16), {"ppo": 0.08, "importance_sampling": -0.02}),
        (Condition(staleness=0, temperature=1.5), {"ppo": 0.5, "importance_sampling": -0.02}),
    ],
    ids=str,
)
def test_a_table_of_logits_learns_from_stale_samples_and_at_other_temperatures(
    condition: Condition, rivals: dict[str, float]
) -> None:
    """The short form of `scripts.bench.off_policy_table`; rivals with the least difference of the final reward."""
    reward, norm = np.mean([run("stable_reinforce", condition, seed) for seed in SEEDS], axis=0)
    for rival, least in rivals.items():
        other_reward, other_norm = np.mean([run(rival, condition, seed) for seed in SEEDS], axis=0)
        if condition == Condition(staleness=0):
            assert reward == pytest.approx(other_reward, abs=least), "the same loss, on the sampler's own policy"
            continue
        assert reward - other_reward > least
        assert rival == "ppo" or norm < other_norm

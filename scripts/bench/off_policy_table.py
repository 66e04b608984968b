"""Compare losses for off-policy reinforcement on a policy that is a table: many seeds in a minute.

    python -m scripts.bench.off_policy_table
    python -m scripts.bench.off_policy_table --quick

The same question as `scripts.bench.off_policy`, which asks it with a language model and few seeds. The policy has a row
of logits for every position and previous token; a sequence's reward is the share of its tokens that are wanted.
A step trains on sequences drawn with the policy of `staleness` steps ago, at a temperature. The losses are the pool's
own (`workers.training.losses`), and candidates that it does not have. Prints a Markdown table: means over seeds with
their standard errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scripts.bench.common import Column, Effort, Results, parser
from workers.contract.loss_inputs import TEMPERATURES
from workers.contract.messages import Datum
from workers.training.losses import prepare

VOCAB_SIZE, LENGTH, BATCH = 12, 8, 48
NUM_STEPS = 120
LEARNING_RATE = 0.15
SEEDS, QUICK_SEEDS = 24, 2
RATIO_MAX = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How samples differ from the trainer's own."""

    staleness: int = 0
    temperature: float = 1.0


CONDITIONS = (
    *(Condition(staleness=staleness) for staleness in (0, 4, 16)),
    *(Condition(staleness=staleness, temperature=0.5) for staleness in (0, 16)),
    Condition(staleness=0, temperature=1.5),
)


class TablePolicy:
    """Draws sequences of `LENGTH` tokens from rows of logits (LENGTH, VOCAB_SIZE + 1, VOCAB_SIZE)."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(LENGTH, VOCAB_SIZE + 1, VOCAB_SIZE, generator=self.generator).requires_grad_()
        self.wanted = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=self.generator)

    def draw(self, logits: Tensor, temperature: float, number: int = BATCH) -> Tensor:
        """Return tokens (number, LENGTH)."""
        before = torch.full((number,), VOCAB_SIZE)
        drawn = []
        for position in range(LENGTH):
            weights = (logits[position, before] / temperature).softmax(-1)
            before = torch.multinomial(weights, 1, generator=self.generator)[:, 0]
            drawn.append(before)
        return torch.stack(drawn, 1)

    def logprobs(self, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        """Return the log-probability of each token (number, LENGTH)."""
        before = torch.cat([torch.full((len(tokens), 1), VOCAB_SIZE), tokens[:, :-1]], 1)
        rows = (logits[torch.arange(LENGTH), before] / temperature).log_softmax(-1)
        return rows.gather(2, tokens[..., None])[..., 0]

    def rewards(self, tokens: Tensor) -> Tensor:
        """Return the reward of each sequence (number,)."""
        return (tokens == self.wanted).double().mean(1)


Slopes = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""From tokens, p, q (number, LENGTH each), advantages (number,) and a temperature to d(loss)/d(p)."""


def of_the_pool(loss: str) -> Slopes:
    """Return the slopes of a loss of the pool, by the workers' own code."""

    def slopes(tokens: Tensor, p: Tensor, q: Tensor, advantages: Tensor, temperature: float) -> Tensor:
        data = []
        for row, own_q, advantage in zip(tokens, q, advantages, strict=True):
            inputs = {
                "target_tokens": row.numpy().astype(np.int32),
                "logprobs": own_q.numpy().astype(np.float32),
                "advantages": np.full(LENGTH, float(advantage), np.float32),
            }
            if loss == "stable_reinforce":
                inputs[TEMPERATURES] = np.full(LENGTH, temperature, np.float32)
            data.append(Datum(tokens=inputs["target_tokens"], loss_inputs=inputs))
        terms = prepare(data, loss, {}, VOCAB_SIZE).sequence_terms(p.reshape(-1, 1))
        return terms.slope.view(len(tokens), LENGTH)

    return slopes


def _reinforce(tokens: Tensor, p: Tensor, q: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    del tokens, q, temperature
    return -advantages[:, None].expand_as(p).to(p.dtype)


def _truncated(tokens: Tensor, p: Tensor, q: Tensor, advantages: Tensor, temperature: float) -> Tensor:
    ratio = torch.exp((p - q).sum(1)).clamp(max=RATIO_MAX)
    return _reinforce(tokens, p, q, advantages * ratio, temperature)


LOSSES: Mapping[str, Slopes] = {
    "importance_sampling": of_the_pool("importance_sampling"),
    "ppo": of_the_pool("ppo"),
    "stable_reinforce": of_the_pool("stable_reinforce"),
    "reinforce": _reinforce,
    "truncated": _truncated,
}
AT_TEMPERATURE = frozenset({"stable_reinforce", "reinforce", "truncated"})
"""Losses whose p is at the temperature of the samples; that of the others is at 1."""


def run(loss: str, condition: Condition, seed: int, num_steps: int = NUM_STEPS) -> tuple[float, float]:
    """Train; return the reward at the end, at the condition's temperature, and the largest gradient norm."""
    policy = TablePolicy(seed)
    optimizer = torch.optim.Adam([policy.logits], lr=LEARNING_RATE, betas=(0.9, 0.95))
    samplers: deque[Tensor] = deque(maxlen=condition.staleness + 1)
    largest = 0.0
    for _ in range(num_steps):
        samplers.append(policy.logits.detach().clone())
        tokens = policy.draw(samplers[0], condition.temperature)
        q = policy.logprobs(samplers[0], tokens, condition.temperature)
        rewards = policy.rewards(tokens)
        p = policy.logprobs(policy.logits, tokens, condition.temperature if loss in AT_TEMPERATURE else 1.0)
        slopes = LOSSES[loss](tokens, p.detach(), q, (rewards - rewards.mean()).float(), condition.temperature)
        optimizer.zero_grad()
        (slopes * p).sum().backward()
        assert policy.logits.grad is not None
        largest = max(largest, float(policy.logits.grad.norm()))
        optimizer.step()
    drawn = policy.draw(policy.logits.detach(), condition.temperature, 500)
    return float(policy.rewards(drawn).mean()), largest


def main() -> None:
    """Read the command line, run every condition, print."""
    args = parser(__doc__).parse_args()
    args.effort = Effort(seconds=0, rounds_min=1, rounds_max=1)
    torch.set_num_threads(1)
    with Results("off_policy_table", args) as results:
        table = results.table(
            "off_policy_table",
            (
                Column("staleness", lambda r: str(r["staleness"])),
                Column("temperature", lambda r: str(r["temperature"])),
                Column("loss", lambda r: f"`{r['loss']}`"),
                Column("reward at the end", lambda r: f"{r['reward']:.3f} ± {r['reward_error']:.3f}"),
                Column("largest gradient norm", lambda r: f"{r['norm']:.1f} ± {r['norm_error']:.1f}"),
            ),
        )
        seeds = range(QUICK_SEEDS if args.quick else SEEDS)
        for condition in CONDITIONS:
            for loss in LOSSES:
                found = np.array([run(loss, condition, seed) for seed in seeds])
                means, errors = found.mean(0), found.std(0, ddof=1) / np.sqrt(len(seeds))
                table.add(
                    {
                        "staleness": condition.staleness,
                        "temperature": condition.temperature,
                        "loss": loss,
                        "reward": float(means[0]),
                        "reward_error": float(errors[0]),
                        "norm": float(means[1]),
                        "norm_error": float(errors[1]),
                    }
                )


if __name__ == "__main__":
    main()

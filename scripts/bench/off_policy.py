"""Compare losses for reinforcement with samples that are not the trainer's own: stale, or at other temperatures.

    python -m scripts.bench.off_policy --quick
    python -m scripts.bench.off_policy                      # half an hour; --runs 8 on a larger machine

Starts a pool, reached through gRPC. The task is that of the demo's poet: lines of which as many words as possible begin
with S. A run takes steps on samples of the weights `staleness` steps ago (of the first ones, until there are older
ones), so its trainer and sampler drift apart as in asynchronous reinforcement. Each condition runs every loss with the
same seeds; `truncated` and `reinforce` are candidates that the pool does not have, computed in this process by
`forward_backward_custom`, at temperature 1 only. Prints a Markdown table: the reward of samples of the final weights,
and the largest gradient norm of the second half, both as the mean over seeds and their range.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.bench.common import Column, Effort, Results, Row, parser
from scripts.demo.tenants import LINE_END, LetterReward, Poet, read_pairs, words_of
from scripts.embedded_pool import embedded_pool
from tinkerpool import (
    AdamParams,
    Datum,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkerpool.recipes.reinforcement import with_samples

MODEL = "kjv-2m"
NUM_STEPS, QUICK_STEPS = 48, 2
GROUP, QUICK_GROUP, NUM_TOKENS = 8, 2, 14
EVALUATED, QUICK_EVALUATED = 32, 2
"""Samples of each prompt at the end."""
RANK = 16
LEARNING_RATE = 6e-3
"""One and a half times that of the demo's poet, and without its decay: losses should differ in what they survive."""
SEEDS, QUICK_SEEDS = (0, 1, 2), (0,)
POOL_LOSSES: tuple[types.LossFnType, ...] = ("importance_sampling", "ppo", "stable_reinforce")
CUSTOM_LOSSES = ("reinforce", "truncated")
RATIO_MAX = 2.0
"""Of `truncated`: the weight of every token of a sequence is its probability ratio, at most this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How samples differ from the trainer's own."""

    staleness: int
    """Steps between the weights of the sampler and those of the trainer."""
    temperature: float = 1.0

    def losses(self) -> tuple[str, ...]:
        """Return the losses that are compared: a custom loss gets log-probabilities at temperature 1."""
        return (*POOL_LOSSES, *CUSTOM_LOSSES) if self.temperature == 1 else POOL_LOSSES


CONDITIONS = (
    Condition(staleness=0),
    Condition(staleness=4),
    Condition(staleness=16),
    Condition(staleness=0, temperature=0.6),
    Condition(staleness=4, temperature=0.6),
    Condition(staleness=4, temperature=1.4),
)


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt."""

    prompt: list[int]
    sequences: Sequence[Any]
    scores: np.ndarray[tuple[int], np.dtype[np.float64]]


class Loop:
    """One run of a loss in a condition."""

    def __init__(
        self, training: TrainingClient, condition: Condition, loss: str, seed: int, *, group: int, evaluated: int
    ) -> None:
        """Draw `group` samples of each prompt in a step, and `evaluated` at the end."""
        self._group, self._evaluated = group, evaluated
        self._training = training
        self._condition = condition
        self._loss = loss
        self._seed = seed
        self._tokenizer = training.get_tokenizer()
        texts = [text for pair in read_pairs("train") for text in pair.values()]
        self._reward = LetterReward(frozenset(word for text in texts for word in words_of(text)))
        self._prompts = [list(self._tokenizer.encode(prompt)) for prompt in Poet.PROMPTS]

    def run(self, num_steps: int) -> Mapping[str, list[float]]:
        """Train; return the reward of each step's samples, the gradient norms, and the reward of the final weights."""
        samplers: deque[SamplingClient] = deque(maxlen=self._condition.staleness + 1)
        rewards, norms = [], []
        for step in range(num_steps):
            samplers.append(self._training.save_weights_and_get_sampling_client(record_stability_info=True))
            groups = self._sample(samplers[0], step, self._group)
            passed = self._pass([datum for group in groups for datum in self._data(group)])
            stepped = self._training.optim_step(AdamParams(learning_rate=LEARNING_RATE))
            passed.result()
            rewards.append(float(np.mean([group.scores.mean() for group in groups])))
            norms.append(stepped.result().metrics["grad_norm:last"])
        final = self._sample(self._training.save_weights_and_get_sampling_client(), num_steps, self._evaluated)
        return {"rewards": rewards, "norms": norms, "final": [float(np.mean([g.scores.mean() for g in final]))]}

    def _sample(self, sampler: SamplingClient, step: int, num_samples: int) -> list[Group]:
        futures = [
            sampler.sample(
                prompt,
                num_samples,
                SamplingParams(
                    max_tokens=NUM_TOKENS,
                    stop=[LINE_END],
                    temperature=self._condition.temperature,
                    seed=(self._seed * 1_003 + step) * 1_009 + index,
                ),
            )
            for index, prompt in enumerate(self._prompts)
        ]
        groups = []
        for prompt, future in zip(self._prompts, futures, strict=True):
            sequences = future.result().sequences
            scores = np.array([self._reward(self._tokenizer.decode(sequence.tokens)) for sequence in sequences])
            groups.append(Group(prompt, sequences, scores))
        return groups

    def _data(self, group: Group) -> list[Datum]:
        data = []
        before = np.zeros(len(group.prompt) - 1)
        for sequence, advantage in zip(group.sequences, group.scores - group.scores.mean(), strict=True):
            tokens = group.prompt + sequence.tokens
            inputs = {
                "target_tokens": tokens[1:],
                "logprobs": np.concatenate([before, sequence.logprobs]),
                "advantages": np.concatenate([before, np.full(len(sequence.tokens), advantage)]),
            }
            data.append(with_samples(Datum(tokens[:-1], inputs), len(group.prompt), sequence))
        return data

    def _pass(self, data: list[Datum]) -> Any:
        for loss in POOL_LOSSES:
            if loss == self._loss:
                return self._training.forward_backward(data, loss)
        return self._training.forward_backward_custom(data, self._custom)

    def _custom(self, data: Sequence[Datum], logprobs: Sequence[Any]) -> tuple[Any, dict[str, float]]:
        """Compute -sum(stop(w) A p): `reinforce` has w = 1, `truncated` the sequence's probability ratio, bounded."""
        import torch

        total = torch.zeros(())
        for datum, p in zip(data, logprobs, strict=True):
            advantages, q = (datum.loss_fn_inputs[name].to_torch() for name in ("advantages", "logprobs"))
            is_drawn = q != 0
            ratio = torch.exp((p.detach() - q)[is_drawn].sum()).clamp(max=RATIO_MAX)
            total = total - (ratio if self._loss == "truncated" else 1.0) * (advantages * p).sum()
        return total, {}


def measure(url: str, key: str, condition: Condition, options: argparse.Namespace) -> list[Row]:
    """Return a row for each loss in a condition."""
    tasks = [(loss, seed) for loss in condition.losses() for seed in options.seeds]

    def run(task: tuple[str, int]) -> Mapping[str, list[float]]:
        loss, seed = task
        with ServiceClient(url, key) as service:
            training = service.create_lora_training_client(MODEL, rank=RANK, seed=seed).result()
            sizes = {"group": options.group, "evaluated": options.evaluated}
            return Loop(training, condition, loss, seed, **sizes).run(options.steps)

    with ThreadPoolExecutor(options.runs) as threads:
        results = dict(zip(tasks, threads.map(run, tasks), strict=True))
    rows = []
    for loss in condition.losses():
        of_loss = [results[loss, seed] for seed in options.seeds]
        half = options.steps // 2
        rows.append(
            {
                "staleness": condition.staleness,
                "temperature": condition.temperature,
                "loss": loss,
                "first": float(np.mean([result["rewards"][0] for result in of_loss])),
                "final": [result["final"][0] for result in of_loss],
                "norm": [max(result["norms"][half:]) for result in of_loss],
                "curve": np.mean([result["rewards"] for result in of_loss], axis=0).round(4).tolist(),
            }
        )
    return rows


def _shown(values: Sequence[float], digits: int) -> str:
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    """Read the command line, run every condition, print."""
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=0, help=f"of each run; default: {NUM_STEPS}")
    command.add_argument("--runs", type=int, default=4, help="runs at the same time")
    args = command.parse_args()
    args.effort = Effort(seconds=0, rounds_min=1, rounds_max=1)
    args.steps = args.steps or (QUICK_STEPS if args.quick else NUM_STEPS)
    args.seeds = QUICK_SEEDS if args.quick else SEEDS
    args.group, args.evaluated = (QUICK_GROUP, QUICK_EVALUATED) if args.quick else (GROUP, EVALUATED)
    with embedded_pool(["--pool", "local", "--model", MODEL]) as pool, Results("off_policy", args) as results:
        key = pool.create_key("poets")
        table = results.table(
            "off_policy",
            (
                Column("staleness", lambda r: str(r["staleness"])),
                Column("temperature", lambda r: str(r["temperature"])),
                Column("loss", lambda r: f"`{r['loss']}`"),
                Column("reward at first", lambda r: f"{r['first']:.3f}"),
                Column("reward of the final weights", lambda r: _shown(r["final"], 3)),
                Column("largest gradient norm, second half", lambda r: _shown(r["norm"], 1)),
            ),
        )
        for condition in CONDITIONS[:: len(CONDITIONS) - 1] if args.quick else CONDITIONS:
            for row in measure(pool.url, key, condition, args):
                table.add(row)


if __name__ == "__main__":
    main()

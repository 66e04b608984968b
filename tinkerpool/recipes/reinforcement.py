"""Reinforcement learning in the manner of GRPO: sample replies, score them, learn from the better ones.

Each line of --data is a JSON object with a prompt, a text or a list of messages, and what the reward reads:

  {"prompt": "What is 3 + 4?", "answer": "7"}

A step samples --group-size replies to each of --batch-size prompts. A reply's advantage is its reward minus its
group's mean, over the group's standard deviation (Shao et al. 2024). Groups of equal rewards teach nothing and are
left out. For example:

  python -m tinkerpool.recipes.reinforcement --data sums.jsonl --reward my_rewards:is_right --log-dir runs/sums

The reward is a function of the line (a dict) and the reply's text; without --reward it is 1 if the reply has the line's
"answer", else 0. A reward that raises, or is no finite number, ends the run with the line's number. reward, the mean
over a step's replies, rises. learned is the share of replies in groups with different rewards: if it stays near 0,
begin with easier prompts or larger groups. kl is the difference of sampler and trainer on the sampled tokens: about 0,
because both have the same weights. The loss is stable_reinforce (docs/losses.md), which is REINFORCE on such samples,
at the temperature that they were drawn at.
Every --show-every steps a reply is shown. An interrupted run continues with the same command.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinkerpool import (
    APIFuture,
    Datum,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    types,
)
from tinkerpool.data import Batches, encode_prompt
from tinkerpool.data.reading import numbered_jsonl
from tinkerpool.data.schedule import ScheduleKind
from tinkerpool.recipes.options import option, run_program
from tinkerpool.recipes.progress import WIDTH, OnMetrics, Progress, pool_metrics
from tinkerpool.recipes.run import Run, RunSettings, check_length, find_base_model, is_due

Reward = Callable[[Mapping[str, Any], str], float]
"""Scores a reply to a line."""
Task = tuple[Mapping[str, Any], list[int], str]
"""A line, the tokens of its prompt, and its file and number."""
DEFAULT_REWARD = "tinkerpool.recipes.reinforcement:has_answer"
SHOWN_CHARS_MAX = 600
"""Characters of a prompt, and of a reply, that are shown."""


@dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """What `train` does."""

    data: Path = option("JSONL file of prompts to learn from")
    test_data: Path | None = option("JSONL file to evaluate on, with the likeliest reply to each prompt", None)
    reward: str = option("module:function that scores a reply", DEFAULT_REWARD)
    num_steps: int = option("steps", 50)
    batch_size: int = option("prompts in a step", 8)
    group_size: int = option("replies to a prompt", 8)
    max_tokens: int = option("most tokens of a reply", 256)
    temperature: float = option("of the samples", 1.0)
    stop: str | None = option("text that ends a reply; left out: the model's end of text", None)
    learning_rate: float = option("highest learning rate", 1e-4)
    schedule: ScheduleKind = option("decay of the learning rate", "constant")
    show_every: int = option("steps between two replies that are shown; 0: only after the last step", 10)


def has_answer(record: Mapping[str, Any], reply: str) -> float:
    """Return 1 if the reply has the line's answer, else 0."""
    return float(str(record["answer"]) in reply)


def named_reward(name: str) -> Reward:
    """Return the function `module:function`. Raises ValueError if there is none."""
    module, _, function = name.partition(":")
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"reward must be module:function, got {name!r}: {error}") from error
    return found


def score_of(score: Reward, task: Task, reply: str) -> float:
    """Return the reward of a reply. Raises ValueError, from any error of `score`, if there is no finite one."""
    record, _, place = task
    name = getattr(score, "__qualname__", repr(score))
    try:
        reward = float(score(record, reply))
    except Exception as error:
        raise ValueError(f"{place}: the reward {name} gave no number: {type(error).__name__}: {error}") from error
    if not math.isfinite(reward):
        raise ValueError(f"{place}: the reward {name} gave {reward}; it must be finite")
    return reward


def check_groups(settings: Settings) -> None:
    """Raise ValueError if a group has one reply, or equal ones: all advantages are 0 then."""
    if settings.group_size < 2:
        raise ValueError(
            f"group_size must be at least 2, got {settings.group_size}: a reply is compared with others of its group"
        )
    if not settings.temperature > 0:
        raise ValueError(
            f"temperature must be above 0, got {settings.temperature}: at 0 all replies of a group are the likeliest "
            "one, and equal rewards teach nothing"
        )


def prompt_of(
    tokenizer: Any, record: Mapping[str, Any], settings: Settings, base_model: types.SupportedModel
) -> list[int]:
    """Return the tokens of a line's prompt. Raises ValueError if it has none, or leaves no room for a reply."""
    if not record.get("prompt"):
        raise ValueError(f'expected {{"prompt": ..., and what the reward reads}}; got the keys {sorted(record)}')
    prompt = encode_prompt(tokenizer, record["prompt"])
    check_length(len(prompt) + settings.max_tokens, base_model)
    return prompt


def params(settings: Settings, step: int, index: int, *, is_test: bool) -> SamplingParams:
    """Return the parameters of the samples of prompt `index` of a step: the likeliest reply in a test."""
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=0 if is_test else settings.temperature,
        stop=settings.stop,
        seed=(settings.seed * 1_000_003 + step) * 1_009 + index,
    )


def learn_from(prompt: list[int], sequences: Sequence[Any], rewards: Sequence[float]) -> list[Datum]:
    """Return a group's datums with their provenance; none if all rewards are equal."""
    scores = np.array(rewards, np.float64)
    if scores.min() == scores.max():  # their deviation may be a rounding error above 0
        return []
    data = []
    for sequence, advantage in zip(sequences, (scores - scores.mean()) / (scores.std() + 1e-4), strict=True):
        tokens, before = prompt + sequence.tokens, np.zeros(len(prompt) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([before, sequence.logprobs]),
            "advantages": np.concatenate([before, np.full(len(sequence.tokens), advantage)]),
        }
        data.append(with_samples(Datum(tokens[:-1], inputs), len(prompt), sequence))
    return data


def with_samples(datum: Datum, num_prompt_tokens: int, sequence: SampledSequence) -> Datum:
    """Say that a datum is a prompt and the sequence that was drawn for it."""
    name, num_drawn = str(sequence.sequence_id), len(sequence.tokens)
    return datum.with_provenance(
        [
            PromptProvenanceSpan(sequence_id=name, length=num_prompt_tokens),
            SampledProvenanceSpan(sequence_id=name, length=num_drawn - 1),
        ],
        [  # targets are shifted by one, and so are their spans
            PromptProvenanceSpan(sequence_id=name, offset=1, length=num_prompt_tokens - 1),
            SampledProvenanceSpan(sequence_id=name, length=num_drawn),
        ],
    )


def kl_sample_train(data: Sequence[Datum], outputs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean over sampled tokens of (log-probability when sampled - log-probability in training)."""
    differences = []
    for datum, output in zip(data, outputs, strict=True):
        is_sampled = datum.loss_fn_inputs["advantages"].data != 0
        differences.append((datum.loss_fn_inputs["logprobs"].data - output["logprobs"].data)[is_sampled])
    return float(np.concatenate(differences).mean())


def shown_reply(step: int, prompt: Any, reply: str, reward: float) -> str:
    """Return a sampled reply for people, below its prompt or the last message of it: each on one line, escaped."""
    asked = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    lines = {"sampled": f"in step {step}, reward {reward:.4g}", "prompt": repr(asked), "reply": repr(reply)}
    return "\n".join(f"{name:>{WIDTH}} {line[:SHOWN_CHARS_MAX]}" for name, line in lines.items())


def train(
    settings: Settings,
    service: ServiceClient | None = None,
    on_metrics: OnMetrics | None = None,
    reward: Reward | None = None,
) -> str:
    """Train, and return the path of the trained weights. `reward` replaces the one that the settings name."""
    score = reward or named_reward(settings.reward)
    run = Run(settings)
    if (trained_weights := run.finished()) is not None:
        return trained_weights
    check_groups(settings)
    service = service or ServiceClient()
    base_model = find_base_model(settings, service)
    tokenizer = service.get_tokenizer(base_model.model_name)

    def convert(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int]]:
        if reward is None and settings.reward == DEFAULT_REWARD and record.get("answer", "") in (None, ""):
            raise ValueError(
                'expected {"prompt": ..., "answer": ...}, the answer not empty, for the default reward; got the keys '
                f"{sorted(record)}"
            )
        return record, prompt_of(tokenizer, record, settings, base_model)

    def read(path: Path) -> list[Task]:
        return [(*found, f"{path}, line {number}") for number, found in numbered_jsonl(path, convert)]

    batches, num_steps = Batches(read(settings.data), settings.batch_size, seed=settings.seed), settings.num_steps
    test_tasks = read(settings.test_data) if settings.test_data else []
    client = run.training_client(service)

    def sample(sampler: SamplingClient, step: int, *, is_test: bool = False) -> list[APIFuture[SampleResponse]]:
        num_samples = 1 if is_test else settings.group_size
        prompts = [prompt for _, prompt, _ in (test_tasks if is_test else batches.at(step))]
        return [
            sampler.sample(prompt, num_samples, params(settings, step, index, is_test=is_test))
            for index, prompt in enumerate(prompts)
        ]

    def rewards_of(task: Task, response: SampleResponse) -> list[float]:
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in response.sequences]
        return [score_of(score, task, text) for text in texts]

    with Progress(settings.log_dir, run.start_step, num_steps, on_metrics) as progress:
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
        groups = sample(sampler, run.start_step)
        for step in range(run.start_step, num_steps):
            data, rewards, done = [], [], step + 1
            responses = [group.result() for group in groups]
            for task, response in zip(batches.at(step), responses, strict=True):
                rewards.append(rewards_of(task, response))
                data += learn_from(task[1], response.sequences, rewards[-1])
            passed = client.forward_backward(data, "stable_reinforce") if data else None
            stepped = client.optim_step(run.adam(step, num_steps)) if data else None
            saved = run.save(client, done, num_steps)

            # The next step's samples are submitted before this step's results are awaited.
            sampler = client.save_weights_and_get_sampling_client(record_stability_info=True)
            groups = sample(sampler, done) if done < num_steps else []
            metrics = {"reward": float(np.mean(rewards)), "learned": len(data) / settings.group_size / len(rewards)}
            if passed is not None and stepped is not None:
                metrics |= pool_metrics(passed.result().metrics, stepped.result().metrics)
                metrics["kl"] = kl_sample_train(data, passed.result().loss_fn_outputs)
                metrics["grad_norm"] = stepped.result().metrics["grad_norm:last"]
            if test_tasks and is_due(done, settings.eval_every, num_steps):
                tested = zip(test_tasks, sample(sampler, done, is_test=True), strict=True)
                metrics["test_reward"] = float(np.mean([rewards_of(task, future.result()) for task, future in tested]))
            num_sampled = sum(len(sequence.tokens) for response in responses for sequence in response.sequences)
            metrics["tokens"] = metrics.get("tokens", 0) + num_sampled
            progress.report(done, metrics)
            if is_due(done, settings.show_every, num_steps):
                reply = tokenizer.decode(responses[0].sequences[0].tokens, skip_special_tokens=True)
                progress.say(shown_reply(done, batches.at(step)[0][0]["prompt"], reply, rewards[0][0]))
            run.record(done, saved)

        return run.finish(client, progress)


if __name__ == "__main__":
    run_program(Settings, train, __doc__, "tinkerpool.recipes.reinforcement")

"""The demo's three tenants: the task of each, its training loop, and the measure of its progress.

Each is an ordinary program against `tinkerpool.ServiceClient`, with its own key, in its own thread, independent of the
others. All randomness has a fixed seed, and a tenant's numbers do not depend on co-batched tenants, so runs on the
same machine give the same numbers.
"""

from __future__ import annotations

import json
import re
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tinkerpool import SamplingClient, ServiceClient, types
from tinkerpool.client.training.custom_loss import TorchLoss
from tinkerpool.data import num_weighted

DATA = Path(__file__).resolve().parent / "data"
BIG_MODEL_PARAMS = 50_000_000
LINE_END = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Size of the three runs."""

    scribe_steps: int = 200
    scribe_pairs: int = 32
    """Pairs in a step."""
    poet_steps: int = 32
    poet_prompts: int = 6
    poet_samples: int = 10
    """Samples of each prompt: the group whose mean reward is the baseline."""
    poet_tokens: int = 14
    """Maximum tokens of a sample."""
    judge_steps: int = 50
    judge_pairs: int = 12
    """Preferences in a step, of two sequences each."""
    judge_preferences: int = 240
    """Number of different preferences."""
    test_pairs: int = 52
    clock_steps: int = 20
    """Steps of each loop of the clock demonstration."""
    rank: int = 16
    learning_rate: float = 1e-2
    """Of the supervised run; the other two use a fraction of it."""
    seed: int = 0

    @classmethod
    def of(cls, model: types.SupportedModel, seed: int, *, is_quick: bool) -> Settings:
        """Return settings for a base model of this size."""
        settings = cls(seed=seed)
        settings = replace(settings, rank=min(settings.rank, model.max_rank))
        if is_quick:
            settings = replace(
                settings,
                scribe_steps=12,
                poet_steps=10,
                judge_steps=8,
                judge_preferences=64,
                test_pairs=16,
                clock_steps=2,
            )
        if model.num_params > BIG_MODEL_PARAMS:
            settings = replace(
                settings,
                scribe_steps=12, scribe_pairs=4, poet_steps=8, poet_prompts=2, poet_samples=6, poet_tokens=12,
                judge_steps=6, judge_pairs=2, judge_preferences=8, test_pairs=4, clock_steps=3, learning_rate=1e-3,
            )  # fmt: skip
        return settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A tenant's progress after a step."""

    step: int
    """From 1."""
    cycle: int
    """The clock cycle of its forward_backward."""
    seconds: float
    """Since the tenants began to train."""
    value: float
    """The tenant's measure: a loss, a reward or a margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A sample before and after training."""

    prompt: str
    before: str
    after: str


class Tenant(ABC):
    """One user's program. Call `run` in a thread; other threads may read the attributes while it runs."""

    name: ClassVar[str]
    task: ClassVar[str]
    """One line for the report."""
    measure: ClassVar[str]
    """Meaning of `Point.value`."""
    example_params: ClassVar[types.SamplingParams] = types.SamplingParams(max_tokens=32, temperature=0, stop=[LINE_END])
    """Sampling parameters of the examples."""

    def __init__(self, service: ServiceClient, base_model: str, settings: Settings, num_steps: int) -> None:
        self.settings = settings
        self.num_steps = num_steps
        self.points: list[Point] = []
        self.results: dict[str, float] = {}
        """Numbers for the report, by name."""
        self.examples: list[Example] = []
        self.checkpoint = ""
        """Path of the trained weights; empty before they are saved."""
        self.error = ""
        self._service = service
        self._base_model = base_model
        self._rng = np.random.default_rng(settings.seed)

    def run(self, barrier: threading.Barrier) -> None:
        """Prepare, wait for the other tenants, train, and evaluate. An error is stored in `error`."""
        try:
            self.training = self._service.create_lora_training_client(
                self._base_model, rank=self.settings.rank, seed=self.settings.seed
            ).result()
            self.tokenizer = self.training.get_tokenizer()
            base = self._service.create_sampling_client(base_model=self._base_model).result()
            before = self.continuations(base)
            self.prepare()
            barrier.wait()
            self._started = time.perf_counter()
            self.train()
            self.checkpoint = self.training.save_weights_for_sampler("final").result().path
            trained = self._service.create_sampling_client(model_path=self.checkpoint).result()
            after = self.continuations(trained)
            self.examples = [Example(prompt=p, before=b, after=after[p]) for p, b in before.items()]
            self.conclude()
        except Exception:  # noqa: BLE001  # reported by the main thread
            barrier.abort()
            self.error = traceback.format_exc()

    @abstractmethod
    def prepare(self) -> None:
        """Load data, and measure before the first step."""

    @abstractmethod
    def train(self) -> None:
        """Take all steps."""

    @abstractmethod
    def conclude(self) -> None:
        """Measure after the last step."""

    @abstractmethod
    def example_prompts(self) -> Sequence[str]:
        """Return the prompts of the examples."""

    def continuations(self, sampler: SamplingClient) -> dict[str, str]:
        """Return each prompt with its continuation up to the end of the line."""
        prompts = self.example_prompts()
        futures = [sampler.sample(types.ModelInput.from_ints(self.encode(p)), 1, self.example_params) for p in prompts]
        texts = [self.tokenizer.decode(future.result().sequences[0].tokens) for future in futures]
        return {prompt: text.rstrip(LINE_END) for prompt, text in zip(prompts, texts, strict=True)}

    def encode(self, prompt: str) -> list[int]:
        """Return a prompt's tokens, with the model's special tokens for the beginning of a text."""
        return list(self.tokenizer.encode(prompt))

    def datum(self, prompt: str | list[int], completion: str | list[int], **values: Any) -> types.Datum:
        """Return a sequence. Each of `values` is 0 over the prompt and as given over the completion."""
        prompt = self.encode(prompt) if isinstance(prompt, str) else prompt
        if isinstance(completion, str):
            completion = list(self.tokenizer.encode(completion, add_special_tokens=False))
        tokens = prompt + completion
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        for name, value in values.items():
            inputs[name] = np.zeros(len(tokens) - 1, np.float32)
            inputs[name][len(prompt) - 1 :] = value
        return types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)

    def adam(self, step: int, part: float = 1.0) -> types.AdamParams:
        """Return the parameters of step `step` (from 0): `part` of the learning rate, which decays to a tenth."""
        decay = 1 - 0.9 * step / self.num_steps
        return types.AdamParams(learning_rate=self.settings.learning_rate * part * decay)

    def record(self, output: types.ForwardBackwardOutput, value: float) -> None:
        """Record a finished step."""
        self.points.append(
            Point(
                step=len(self.points) + 1,
                cycle=int(output.metrics["clock_cycle:unique"]),
                seconds=time.perf_counter() - self._started,
                value=value,
            )
        )


class Scribe(Tenant):
    """Supervised fine-tuning: rewrites clauses of 1611 in plainer English, in a pipelined loop."""

    name = "scribe"
    task = "supervised: rewrite old clauses in plain English"
    measure = "loss per token"

    def __init__(self, service: ServiceClient, base_model: str, settings: Settings) -> None:
        super().__init__(service, base_model, settings, settings.scribe_steps)
        self._test = read_pairs("test")[: settings.test_pairs]

    def prepare(self) -> None:
        """Draw batches, and measure the loss on held-out clauses."""
        self._train = [self._pair(pair) for pair in read_pairs("train")]
        self._order = epoch_batches(self._rng, len(self._train), self.settings.scribe_pairs, self.num_steps)
        self._test_data = [self._pair(pair) for pair in self._test]
        self.results["test_loss_start"] = self._test_loss()

    def train(self) -> None:
        """Submit each step before awaiting the previous one."""
        in_flight: list[tuple[Any, list[types.Datum]]] = []
        for step, indices in enumerate(self._order):
            batch = [self._train[i] for i in indices]
            in_flight.append((self.training.forward_backward(batch, "cross_entropy"), batch))
            self.training.optim_step(self.adam(step))
            if len(in_flight) > 1:
                self._finish(*in_flight.pop(0))
        for future, batch in in_flight:
            self._finish(future, batch)

    def _finish(self, future: Any, batch: list[types.Datum]) -> None:
        output = future.result()
        self.record(output, output.metrics["loss:sum"] / num_weighted(batch))

    def conclude(self) -> None:
        """Measure the loss at the end, and on held-out clauses."""
        self.results |= first_and_last_means("loss", self.points)
        self.results["test_loss_end"] = self._test_loss()

    def example_prompts(self) -> Sequence[str]:
        """Return held-out clauses."""
        return [pair["prompt"] for pair in self._test[:: max(1, len(self._test) // 4)]][:4]

    def first_data(self, num_pairs: int) -> list[types.Datum]:
        """Return the first training pairs."""
        return self._train[:num_pairs]

    def _pair(self, pair: dict[str, str]) -> types.Datum:
        return self.datum(pair["prompt"], pair["completion"], weights=1.0)

    def _test_loss(self) -> float:
        output = self.training.forward(self._test_data, "cross_entropy").result()
        return output.metrics["loss:sum"] / num_weighted(self._test_data)


class Poet(Tenant):
    """Reinforcement learning, on-policy: writes lines whose words begin with S."""

    name = "poet"
    task = "reinforcement: write lines whose words begin with S"
    measure = "mean reward"
    example_params = types.SamplingParams(max_tokens=20, seed=0, stop=[LINE_END])
    PROMPTS = ("And", "The", "Then", "He", "For", "But", "Now", "Let")

    def __init__(self, service: ServiceClient, base_model: str, settings: Settings) -> None:
        super().__init__(service, base_model, settings, settings.poet_steps)

    def prepare(self) -> None:
        """Encode the prompts, and set up the reward."""
        texts = [text for pair in read_pairs("train") for text in pair.values()]
        self._reward = LetterReward(frozenset(word for text in texts for word in words_of(text)))
        self._prompts = [self.encode(prompt) for prompt in self.PROMPTS[: self.settings.poet_prompts]]
        self._kl: list[float] = []

    def train(self) -> None:
        """Repeat: publish, sample, score, train."""
        for step in range(self.num_steps):
            with self._timed("publishing"):
                sampler = self.training.save_weights_and_get_sampling_client()
            with self._timed("sampling"):
                batch, rewards = self._sample(sampler, step)
            with self._timed("training"):
                passed = self.training.forward_backward(batch, "importance_sampling")
                step_taken = self.training.optim_step(self.adam(step, 0.4))
                output = passed.result()
                self.record(output, float(np.mean(rewards)))
                self._kl.append(kl_sample_train(batch, output))
                step_taken.result()

    def _sample(self, sampler: SamplingClient, step: int) -> tuple[list[types.Datum], list[float]]:
        """Draw a group of samples for every prompt; return them as training data with their rewards."""
        groups = [
            sampler.sample(
                types.ModelInput.from_ints(prompt),
                self.settings.poet_samples,
                types.SamplingParams(
                    max_tokens=self.settings.poet_tokens,
                    stop=[LINE_END],
                    seed=self.settings.seed * 1_000_003 + step * 1_009 + index,
                ),
            )
            for index, prompt in enumerate(self._prompts)
        ]
        batch: list[types.Datum] = []
        rewards: list[float] = []
        for prompt, group in zip(self._prompts, groups, strict=True):
            sequences = group.result().sequences
            scores = np.array([self._reward(self.tokenizer.decode(sequence.tokens)) for sequence in sequences])
            rewards += scores.tolist()
            for sequence, advantage in zip(sequences, scores - scores.mean(), strict=True):
                batch.append(self.datum(prompt, sequence.tokens, logprobs=sequence.logprobs, advantages=advantage))
        return batch, rewards

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        name = f"seconds_{part}"
        self.results[name] = self.results.get(name, 0.0) + time.perf_counter() - begin_s

    def conclude(self) -> None:
        """Compute the reward, and the difference between sampler and trainer."""
        self.results |= first_and_last_means("reward", self.points)
        self.results["kl_sample_train"] = float(np.mean(self._kl))
        self.results["kl_sample_train_max"] = max(map(abs, self._kl))

    def example_prompts(self) -> Sequence[str]:
        """Return beginnings of lines."""
        return self.PROMPTS[:4]


class Judge(Tenant):
    """A custom loss: direct preference optimization, for plain wording over old."""

    name = "judge"
    task = "custom loss (DPO): prefer plain wording to old"
    measure = "preference margin"
    BETA = 0.1
    LIKELIHOOD = 0.5
    """Weight of the chosen ending's log-probability per token; it keeps samples grammatical."""
    PROMPT_WORDS = 2

    def __init__(self, service: ServiceClient, base_model: str, settings: Settings) -> None:
        super().__init__(service, base_model, settings, settings.judge_steps)
        self._test = [p for p in map(self._preference, read_pairs("test")) if p][: settings.test_pairs]

    def prepare(self) -> None:
        """Load preferences, and compute the reference: log-probabilities before the first step."""
        found = [p for p in map(self._preference, read_pairs("train")) if p]
        found = found[:: max(1, len(found) // self.settings.judge_preferences)][: self.settings.judge_preferences]
        steps = epoch_batches(self._rng, len(found), self.settings.judge_pairs, self.num_steps)
        used = sorted({index for indices in steps for index in indices})
        data = {index: self._data_of(found[index]) for index in used}
        # A new adapter computes what its base model computes, so it is its own reference here.
        flat = [datum for index in used for datum in data[index]]
        logprobs = weighted_logprobs(flat, self.training.forward(flat, "cross_entropy").result())
        self._data = data
        self._reference = {index: logprobs[2 * at : 2 * at + 2] for at, index in enumerate(used)}
        self._steps = steps
        self._test_data = [datum for preference in self._test for datum in self._data_of(preference)]
        self.results["accuracy_start"] = self._accuracy()

    def train(self) -> None:
        """Take steps whose loss is computed in this process, between two passes in the pool."""
        for step, indices in enumerate(self._steps):
            batch = [datum for index in indices for datum in self._data[index]]
            reference = np.concatenate([self._reference[index] for index in indices])
            future = self.training.forward_backward_custom(batch, self._dpo(reference))
            self.training.optim_step(self.adam(step, 0.15))
            self.record(future.result(), future.result().metrics["margin:mean"])

    def _dpo(self, reference: NDArray[np.float32]) -> TorchLoss:
        """Return -log sigmoid(beta (log-ratio chosen - rejected)) (Rafailov et al. 2023), plus a likelihood."""
        import torch

        def loss_fn(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
            weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
            totals = torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)])
            ratios = totals - torch.tensor(reference)
            margins = self.BETA * (ratios[0::2] - ratios[1::2])
            likelihood = totals[0::2] / torch.stack([w.sum() for w in weights[0::2]])
            loss = -torch.nn.functional.logsigmoid(margins).mean() - self.LIKELIHOOD * likelihood.mean()
            return loss, {"margin:mean": float(margins.detach().mean())}

        return loss_fn

    def conclude(self) -> None:
        """Compute the margin, and the accuracy on held-out clauses."""
        self.results |= first_and_last_means("margin", self.points)
        self.results["accuracy_end"] = self._accuracy()

    def example_prompts(self) -> Sequence[str]:
        """Return beginnings of held-out clauses."""
        return list(dict.fromkeys(prompt for prompt, _, _ in self._test))[:4]

    def _preference(self, pair: dict[str, str]) -> tuple[str, str, str] | None:
        """Return a clause's beginning, plain ending and old ending; None if the beginnings differ."""
        old, plain = pair["prompt"].split(" "), pair["completion"].split(" ")
        start, prompt = self.PROMPT_WORDS, " ".join(old[: self.PROMPT_WORDS])
        if old[:start] != plain[:start] or len(old) < start + 2:
            return None
        return prompt, " " + " ".join(plain[start:]), " " + " ".join(old[start:])

    def _data_of(self, preference: tuple[str, str, str]) -> list[types.Datum]:
        prompt, chosen, rejected = preference
        return [self.datum(prompt, completion, weights=1.0) for completion in (chosen, rejected)]

    def _accuracy(self) -> float:
        """Return the share of held-out clauses whose plain ending is likelier than the old one."""
        logprobs = weighted_logprobs(self._test_data, self.training.forward(self._test_data, "cross_entropy").result())
        return float(np.mean(logprobs[0::2] > logprobs[1::2]))


TENANTS = (Scribe, Poet, Judge)


@dataclass(frozen=True, slots=True)
class LetterReward:
    """The share of a line's words that begin with a letter. Each known word counts once."""

    known: frozenset[str]
    """Words of the training text. Without them the model would be rewarded for invented words."""
    letter: str = "s"
    words_min: int = 6
    """A shorter line is scored as if it had this many words."""

    def __call__(self, line: str) -> float:
        """Return the reward, 0 to 1."""
        words = words_of(line)
        return len({w for w in words if w.startswith(self.letter) and w in self.known}) / max(
            len(words), self.words_min
        )


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"[a-z]+", text.lower())


def read_pairs(name: str) -> list[dict[str, str]]:
    """Read pairs of a clause (prompt) and its plain wording (completion)."""
    lines = (DATA / f"plain_english.{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def epoch_batches(rng: np.random.Generator, num_items: int, batch: int, num_steps: int) -> list[list[int]]:
    """Return batches of indices, with a new order in each epoch."""
    num_epochs = -(-batch * num_steps // num_items)
    order = np.concatenate([rng.permutation(num_items) for _ in range(num_epochs)])
    return [order[step * batch : (step + 1) * batch].tolist() for step in range(num_steps)]


def weighted_logprobs(data: Sequence[types.Datum], output: types.ForwardBackwardOutput) -> NDArray[np.float32]:
    """Return the log-probability of each sequence's weighted part."""
    weighted = zip(data, output.loss_fn_outputs, strict=True)
    values = [float(o["logprobs"].data @ datum.loss_fn_inputs["weights"].data) for datum, o in weighted]
    return np.array(values, np.float32)


def kl_sample_train(data: Sequence[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """Return the mean over sampled tokens of (log-probability when sampled - log-probability in the training pass).

    It is 0 if sampler and trainer agree: the pass runs before its optimizer step, on the sampled weights.
    """
    differences = []
    for datum, o in zip(data, output.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].data
        differences.append((sampled - o["logprobs"].data)[sampled != 0])
    return float(np.concatenate(differences).mean())


def first_and_last_means(name: str, points: Sequence[Point]) -> dict[str, float]:
    """Return the means of the first three and of the last three steps."""
    values = [point.value for point in points]
    return {f"{name}_start": float(np.mean(values[:3])), f"{name}_end": float(np.mean(values[-3:]))}

"""Runs a sampler with a training engine; and a naive sampler for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.numerics.harness import Driver, make_data, make_spec
from tests.support.numerics.naive import NaiveModel
from tests.support.numerics.random_numbers import uniform
from workers.contract.messages import (
    AdamParams,
    AdapterSpec,
    Datum,
    SampledSequence,
    SampleEvent,
    SampleRequest,
    SampleResult,
    SamplerVersion,
    SamplingParams,
)
from workers.sampling.attention.pages import PageKernel
from workers.sampling.drawing import draw
from workers.sampling.kv_cache import block_bytes
from workers.sampling.sampler import Sampler, SamplerLimits


@dataclass(slots=True)
class Sampling:
    """A sampler on the model and bank of a training engine, and its events."""

    driver: Driver
    sampler: Sampler
    events: list[SampleEvent] = field(default_factory=list)
    specs: dict[str, AdapterSpec] = field(default_factory=dict)

    @property
    def tolerance(self) -> float:
        """Most by which log-probabilities at temperature 1 may differ from the trainer's in fp32, of these adapters."""
        return 3e-5 if self.driver.engine.base_model.expert_layers else 1e-5

    def publish(self, *keys: str, ranks: Sequence[int] = (4, 8, 16)) -> None:
        """Train an adapter per key for two steps, with a large learning rate, and publish it as `key/v`."""
        for number, key in enumerate(keys):
            spec = make_spec(key, rank=ranks[number % len(ranks)])
            self.specs[key] = spec
            self.driver.install(spec)
            for _ in range(2):
                self.driver.train(self.driver.backward(key, make_data("cross_entropy", [9, 14], seed=number)))
                self.driver.train(self.driver.step(key, AdamParams(learning_rate=0.05)))
            self.driver.train(self.driver.save(key, publish_as=f"{key}/v"))

    def step(self) -> None:
        self.events += self.sampler.decode_step()

    def count_rows(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Return a list that gets the number of rows of every forward from now on."""
        counts: list[int] = []
        model = self.driver.engine.base_model
        forward = model.forward

        def counting(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
            counts.append(len(tokens))
            return forward(tokens, *others)

        monkeypatch.setattr(model, "forward", counting)
        return counts

    def run(self, *requests: SampleRequest) -> list[SampleResult]:
        """Start requests together, decode until all have ended, and return their results."""
        for request in requests:
            self.sampler.start_sample(request)
        while self.sampler.can_decode():
            self.step()
        return [self.result(request.op_id) for request in requests]

    def result(self, op_id: str) -> SampleResult:
        (result,) = [e for e in self.events if isinstance(e, SampleResult) and e.op_id == op_id]
        return result

    def sequences(self, *requests: SampleRequest) -> list[tuple[SampledSequence, ...]]:
        """Run requests, none of which may fail; clear the events, so that the same requests can run again."""
        results = self.run(*requests)
        assert [result.error for result in results] == [None] * len(results)
        self.events.clear()
        return [result.sequences for result in results]


def sampling(
    model: Path, num_slots: int = 16, num_blocks: int = 400, dtype: str = "float32", **limits: Any
) -> Sampling:
    """Return a sampler with `num_blocks` key-value blocks."""
    driver = Driver(model, num_slots=num_slots, dtype=dtype)
    return Sampling(driver, make_sampler(driver, num_blocks, **limits))


def make_sampler(
    driver: Driver, num_blocks: int = 400, page_kernel: PageKernel | None = None, **limits: Any
) -> Sampler:
    """Return a fresh sampler on a driver's model and adapters."""
    model = driver.engine.base_model
    made = SamplerLimits(cache_bytes_max=num_blocks * block_bytes(model), **limits)
    return Sampler(model, driver.engine.bank, made, page_kernel=page_kernel)


REQUEST_FIELDS = {field.name for field in fields(SampleRequest)} - {
    "op_id",
    "version",
    "prompt",
    "num_samples",
    "params",
}


def prompt_of(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng((seed, length)).integers(0, 256, length).astype(np.int32)


def request(op_id: str, key: str = "", length: int = 12, num_samples: int = 1, **values: Any) -> SampleRequest:
    others = {name: values.pop(name) for name in REQUEST_FIELDS if name in values}
    return SampleRequest(
        op_id=op_id,
        version=SamplerVersion(key=key),
        prompt=values.pop("prompt", prompt_of(length)),
        num_samples=num_samples,
        params=SamplingParams(**{"max_tokens": 10, "seed": 7} | values),
        **others,
    )


def next_tokens(tokens: NDArray[np.int32]) -> Datum:
    """Return the datum of which a training forward gives the log-probability of every token but the first."""
    weights = np.ones(len(tokens) - 1, np.float32)
    return Datum(tokens=tokens[:-1], loss_inputs={"target_tokens": tokens[1:], "weights": weights})


def assert_same_bits(mine: Sequence[SampledSequence], theirs: Sequence[SampledSequence]) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()
        assert one.stop_reason == other.stop_reason
        assert (one.topk is None) == (other.topk is None)
        if one.topk is not None and other.topk is not None:
            assert one.topk.token_ids.tobytes() == other.topk.token_ids.tobytes()
            assert one.topk.logprobs.tobytes() == other.topk.logprobs.tobytes()


def naive_sample(model: NaiveModel, wanted: SampleRequest, index: int) -> tuple[list[int], list[float]]:
    """Sample one sequence: for every token, all of it runs through transformers' own code."""
    tokens, logprobs, params = wanted.prompt.tolist(), [], wanted.params
    for position in range(params.max_tokens):
        logits = model.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].detach()
        tokens.append(draw(logits.numpy(), params, uniform(params.seed, index, position)))
        logprobs.append(float((logits.double() / (params.temperature or 1)).log_softmax(-1)[tokens[-1]]))
        if tokens[-1] in params.stop_tokens:
            break
    return tokens[len(wanted.prompt) :], logprobs

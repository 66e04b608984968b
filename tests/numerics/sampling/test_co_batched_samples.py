"""Random co-batched samples, which begin, end, share prompts and wait for memory, against the same samples solo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.numerics.cases import long
from tests.support.numerics.harness import RARER_ARCHITECTURES, make_spec
from tests.support.numerics.naive import NaiveModel
from tests.support.numerics.samplers import (
    Sampling,
    assert_same_bits,
    make_sampler,
    naive_sample,
    prompt_of,
    request,
    sampling,
)
from workers.contract.messages import ErrorCode, SampleRequest, SampleResult

KEYS = ("", "a", "b", "c")
LENGTHS = (1, 5, 63, 64, 65, 128, 150)
"""Lengths of prompts: around one, two and three blocks of 64 tokens."""
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"prompt_logprobs": True},
    {"top_p": 0.8, "topk_sample_logprobs": 3, "prompt_logprobs": True, "prompt_logprobs_last_n": 4},
    {"top_k": 40, "stop_tokens": tuple(range(0, 256, 16))},
)
LONG = 66
"""Tokens of the longest samples: more than a block."""
POOL_BLOCKS = 11
"""Blocks of the sampler; one sequence of the largest request takes five."""
TOLERANCE = 1e-5
"""Largest difference of log-probabilities from the naive sampler's, which computes in fp32 too. Over all requests that
can be drawn, on one thread, ours are within 2.7e-6 of the same model in fp64, and the naive ones within 3.7e-6."""
ADAPTED_TOLERANCE = 3e-5
"""The same for versions. Their adapters are trained with a large learning rate, and amplify roundings: ours are within
1.6e-5 of fp64, the naive ones within 1.1e-5, and the two differ by up to 1.8e-5."""


@dataclass(slots=True)
class World:
    """A model with trained adapters, two of one rank, and each request's solo result, computed once."""

    sampling: Sampling
    directory: Path
    solo: dict[str, SampleResult] = field(default_factory=dict)
    naive: dict[str, list[tuple[list[int], list[float]]]] = field(default_factory=dict)
    models: dict[str, NaiveModel] = field(default_factory=dict)

    def result_solo(self, wanted: SampleRequest) -> SampleResult:
        """Return the request's result from a fresh sampler."""
        if wanted.op_id not in self.solo:
            fresh = Sampling(self.sampling.driver, make_sampler(self.sampling.driver))
            (self.solo[wanted.op_id],) = fresh.run(wanted)
        return self.solo[wanted.op_id]

    def result_naive(self, wanted: SampleRequest) -> list[tuple[list[int], list[float]]]:
        """Return the naive sampler's result; of long samples only the first sequence, to save time."""
        key = wanted.version.key.removesuffix("/v")
        if key not in self.models:
            spec = self.sampling.specs.get(key, make_spec("none"))
            weights = self.sampling.driver.weights(key) if key else {}
            self.models[key] = NaiveModel(self.directory, spec, weights)
        if wanted.op_id not in self.naive:
            self.naive[wanted.op_id] = [
                naive_sample(self.models[key], wanted, index)
                for index in range(wanted.num_samples if wanted.params.max_tokens < LONG else 1)
            ]
        return self.naive[wanted.op_id]


@pytest.fixture(params=["qwen3.5-moe", *long("qwen3", "gemma3", "gpt-oss", *RARER_ARCHITECTURES)])
def model_directory(request: pytest.FixtureRequest, model_directories: dict[str, Path]) -> Path:
    """Windows and sinks are compared with the naive sampler in `test_sampler.py` too."""
    return model_directories[request.param]


_WORLDS: dict[Path, World] = {}


def world_of(directory: Path) -> World:
    """Return the world of a model."""
    if directory not in _WORLDS:
        world = World(sampling(directory), directory)
        world.sampling.publish("a", "b", "c", ranks=(8, 8, 4))
        _WORLDS[directory] = world
    return _WORLDS[directory]


def make_request(key: str, length: int, variant: int, way: int, num_samples: int, max_tokens: int) -> SampleRequest:
    """Return a request. All prompts have the same first block; those of one variant have a common prefix."""
    prompt = np.concatenate([prompt_of(64), prompt_of(200, seed=variant)])[:length]
    return request(
        f"{key}-{length}-{variant}-{way}-{num_samples}-{max_tokens}",
        key and f"{key}/v",
        prompt=prompt,
        num_samples=num_samples,
        max_tokens=max_tokens,
        seed=length + way,
        **WAYS[way],
    )


requests = st.builds(
    make_request,
    key=st.sampled_from(KEYS),
    length=st.sampled_from(LENGTHS),
    variant=st.integers(0, 1),
    way=st.integers(0, len(WAYS) - 1),
    num_samples=st.sampled_from([1, 2, 7]),
    max_tokens=st.sampled_from([1, 4, LONG]),
)


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that arrives some steps after the one before it, and may be cancelled some steps later."""

    request: SampleRequest
    after_steps: int
    cancel_after_steps: int | None


visits = st.lists(
    st.builds(Visit, requests, st.integers(0, 3), st.none() | st.none() | st.integers(0, 6)), min_size=1, max_size=6
)


def run_visits(s: Sampling, visits: Sequence[Visit]) -> list[SampleResult]:
    """Decode until all requests have ended; check the blocks at every step."""
    pool = s.sampler.blocks
    cancels: dict[int, list[str]] = {}
    step = 0
    waiting = [(number, visit) for number, visit in enumerate(visits)]
    next_step = waiting[0][1].after_steps
    while waiting or s.sampler.can_decode():
        while waiting and step >= next_step:
            number, visit = waiting.pop(0)
            s.sampler.start_sample(replace(visit.request, op_id=str(number)))
            if visit.cancel_after_steps is not None:
                cancels.setdefault(step + visit.cancel_after_steps, []).append(str(number))
            next_step = step + (waiting[0][1].after_steps if waiting else 0)
        for op_id in cancels.pop(step, []):
            s.sampler.cancel_sample(op_id)
        s.step()
        assert 0 <= pool.num_available <= pool.num_blocks
        step += 1
        assert step < 3000, "a request does not end"
    assert (pool.num_in_use, pool.num_reserved) == (0, 0), "only cached prompts are left"
    return [s.result(str(number)) for number in range(len(visits))]


@pytest.mark.slow
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    visits=visits,
    num_rows=st.sampled_from([2, 9, 64]),
    prefill_tokens=st.sampled_from([1, 64, 512]),
    num_more=st.sampled_from([0.0, 2.5, math.inf]),
)
def test_random_co_batched_samples_change_no_bit_and_no_token_differs_from_the_naive_sampler(
    model_directory: Path, visits: list[Visit], num_rows: int, prefill_tokens: int, num_more: float
) -> None:
    world = world_of(model_directory)
    sampler = make_sampler(
        world.sampling.driver, POOL_BLOCKS, num_sequences_max=num_rows, prefill_tokens_max=prefill_tokens
    )
    sampler.bound_scopes(num_more)
    s = Sampling(world.sampling.driver, sampler)
    for visit, result in zip(visits, run_visits(s, visits), strict=True):
        if result.error is not None:
            assert result.error.code is ErrorCode.CANCELLED
            assert visit.cancel_after_steps is not None
            continue
        solo = world.result_solo(visit.request)
        assert_same_bits(result.sequences, solo.sequences)
        if solo.prompt_logprobs is not None:
            assert result.prompt_logprobs is not None
            assert result.prompt_logprobs.tobytes() == solo.prompt_logprobs.tobytes()
        naive = world.result_naive(visit.request)
        for sequence, (tokens, logprobs) in zip(result.sequences[: len(naive)], naive, strict=True):
            assert sequence.tokens.tolist() == tokens
            atol = ADAPTED_TOLERANCE if visit.request.version.key else TOLERANCE
            np.testing.assert_allclose(sequence.logprobs, logprobs, atol=atol)

"""Sampling and streaming, over a fake pool."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.fake_transport import UNREACHABLE, FakePool, sample_operation
from tinkerpool import ModelInput, SampledSequence, SamplingClient, SamplingParams, ServiceClient
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import sampling_pb2

PROMPT = ModelInput.from_ints([1, 2])


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def service(pool: FakePool) -> Iterator[ServiceClient]:
    with ServiceClient(transport=pool) as service:
        yield service


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="toy")


def test_samples_have_no_order_and_each_has_its_number(pool: FakePool, sampler: SamplingClient) -> None:
    pool.lost_replies = {"Sample": 1}
    responses = [sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3)) for _ in range(300)]
    expected = SampledSequence(stop_reason="length", tokens=[0, 1, 2], logprobs=[-1, -1, -1])
    assert all(future.result(10).sequences == [expected, expected] for future in responses)
    assert {request.seq for request in pool.requests("Sample")} == set(range(1, 301))
    with pytest.raises(ValueError, match="num_samples"):
        sampler.sample(PROMPT, 0, SamplingParams())


def test_prompt_logprobs_begin_with_none(pool: FakePool, sampler: SamplingClient) -> None:
    operation = sample_operation("x", 1, 1)
    operation.sample.prompt_logprobs.CopyFrom(to_tensor(np.array([np.nan, -2], np.float32)))
    pool.handlers["Sample"] = lambda request: sampling_pb2.SampleResponse(operation=operation)
    assert sampler.compute_logprobs(PROMPT).result(5) == [None, -2.0]
    [request] = pool.requests("Sample")
    assert (request.include_prompt_logprobs, request.num_samples, request.params.max_tokens) == (True, 1, 1)


def test_a_cancelled_sample_is_cancelled_in_the_pool(pool: FakePool, sampler: SamplingClient) -> None:
    pool.is_held = True
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=3))
    time.sleep(0.05)
    assert future.cancel()
    time.sleep(0.05)
    assert [request.name for request in pool.requests("CancelOperation")] == [f"{sampler.sampler_id}:1"]


def token(index: int, value: int) -> sampling_pb2.StreamSampleResponse:
    return sampling_pb2.StreamSampleResponse(
        token=sampling_pb2.SampledToken(sequence_index=index, token=value, logprob=-1)
    )


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_stream_gives_every_token_once_also_if_it_breaks(
    pool: FakePool, sampler: SamplingClient, is_broken: bool
) -> None:
    finished = sampling_pb2.StreamSampleResponse(operation=sample_operation("x", 2, 3))
    events: list[Any] = [token(0, 0), token(1, 0), token(0, 1)]
    events += [UNREACHABLE] if is_broken else [token(1, 1), token(0, 2), token(1, 2), finished]
    pool.handlers["StreamSample"] = lambda request: events
    tokens = list(sampler.sample_stream(PROMPT, 2, SamplingParams(max_tokens=3)))
    for index in (0, 1):
        assert [t.token for t in tokens if t.sequence_index == index] == [0, 1, 2]
    assert len(pool.requests("Sample")) == is_broken
    if is_broken:
        assert pool.requests("Sample")[0] == pool.requests("StreamSample")[0].request


async def test_a_stream_is_read_by_coroutines_too(pool: FakePool, sampler: SamplingClient) -> None:
    finished = sampling_pb2.StreamSampleResponse(operation=sample_operation("x", 1, 2))
    pool.handlers["StreamSample"] = lambda request: [token(0, 0), finished]
    stream = sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=2))
    assert [t.token async for t in stream] == [0, 1]

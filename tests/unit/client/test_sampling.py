"""Sampling and streaming, over a fake pool."""

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.doors.fake_transport import UNREACHABLE, FakePool, sample_operation
from tests.support.waiting import wait_until
from tinkerpool import ModelInput, SampledSequence, SamplingClient, SamplingParams, ServiceClient, TensorData
from tinkerpool.client.calls.futures import shared_loop
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.types import PromptAltTokens
from tinkerpool.v1 import operations_pb2, sampling_pb2

PROMPT = ModelInput.from_ints([1, 2])


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="toy")


def test_samples_need_no_order_and_each_has_its_own_number(pool: FakePool, sampler: SamplingClient) -> None:
    pool.lost_replies = {"Sample": 1}
    responses = [sampler.sample(PROMPT, 2, SamplingParams(max_tokens=3)) for _ in range(300)]
    results = [future.result(60).sequences for future in responses]
    names = {sequence.sequence_id for sequences in results for sequence in sequences}
    assert names == {f"{sampler.sampler_id}:{seq}:{index}" for seq in range(1, 301) for index in range(2)}
    expected = SampledSequence(stop_reason="length", tokens=[0, 1, 2], logprobs=[-1, -1, -1])
    assert all(sequences == [expected, expected] for sequences in results)
    assert {request.seq for request in pool.requests("Sample")} == set(range(1, 301))
    with pytest.raises(ValueError, match="num_samples"):
        sampler.sample(PROMPT, 0, SamplingParams())


def test_prompt_logprobs_begin_with_none(pool: FakePool, sampler: SamplingClient) -> None:
    operation = sample_operation("x", 1, 1)
    operation.sample.prompt_logprobs.CopyFrom(to_tensor(np.array([np.nan, -2], np.float32)))
    pool.handlers["Sample"] = lambda request: sampling_pb2.SampleResponse(operation=operation)
    assert sampler.compute_logprobs(PROMPT).result(60) == [None, -2.0]
    [request] = pool.requests("Sample")
    assert (request.include_prompt_logprobs, request.num_samples, request.params.max_tokens) == (True, 1, 1)
    assert (request.prompt_logprobs_last_n, request.HasField("prompt_targets")) == (0, False)
    assert sampler.compute_logprobs(PROMPT, 1).result(60) == [None, -2.0]
    assert pool.requests("Sample")[1].prompt_logprobs_last_n == 1


def test_every_option_of_the_sdk_is_sent_and_its_output_returned(pool: FakePool, sampler: SamplingClient) -> None:
    operation = sample_operation("x", 1, 1)
    result, nan = operation.sample, float("nan")
    result.sequences[0].topk.CopyFrom(topk([[4, 5]], [[-1, -2]]))
    result.topk_prompt.CopyFrom(topk([[0, 0], [6, 7]], [[nan, nan], [-3, -4]]))
    result.prompt_target_logprobs.CopyFrom(to_tensor(np.array([[-0.5, nan]], np.float32)))
    result.prompt_alt_tokens.CopyFrom(topk([[8, 8, 9]], [[-1, -1, -2]]))
    result.num_cached_prompt_tokens = 1
    pool.handlers["Sample"] = lambda request: sampling_pb2.SampleResponse(operation=operation)
    params = SamplingParams(max_tokens=1)
    targets = TensorData([[3, -1]])
    for future in (
        sampler.sample(PROMPT, 1, params, True, 2, 2, targets, 3, 1),
        # private: a coroutine of the client runs on the client's own loop
        sampler._connection.start(sampler.sample_async(PROMPT, 1, params, True, 2, 2, [[3, -1]], 3, 1)),
    ):
        response = future.result(60)
        assert response.sequences[0].topk_logprobs == [[(4, -1.0), (5, -2.0)]]
        assert response.topk_prompt_logprobs == [None, [(6, -3.0), (7, -4.0)]]
        assert response.target_prompt_logprobs == TensorData([[-0.5, 0.0]])
        assert response.prompt_alt_tokens == PromptAltTokens(
            tokens=TensorData([[8, 8, 9]]), logprobs=TensorData([[-1.0, -1.0, -2.0]])
        )
        assert response.prompt_cache_hit_tokens == 1
    for request in pool.requests("Sample"):
        assert (request.include_prompt_logprobs, request.prompt_logprobs_last_n) == (True, 1)
        assert (request.topk_prompt_logprobs, request.topk_sample_logprobs, request.prompt_alt_tokens_k) == (2, 2, 3)
        assert from_tensor(request.prompt_targets).tolist() == [[3, -1]]


def topk(token_ids: Any, logprobs: Any) -> operations_pb2.TokenLogprobs:
    tokens, floats = np.array(token_ids, np.int32), np.array(logprobs, np.float32)
    return operations_pb2.TokenLogprobs(token_ids=to_tensor(tokens), logprobs=to_tensor(floats))


@pytest.mark.parametrize("targets", [[1, 2], [[0.5]], np.ones((1, 1, 1), np.int64)])
def test_targets_that_are_no_matrix_of_tokens_are_refused_before_they_are_sent(
    pool: FakePool, sampler: SamplingClient, targets: Any
) -> None:
    with pytest.raises(ValueError, match="target_prompt_logprobs are token ids of shape"):
        sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1), target_prompt_logprobs=targets)
    for last_n in (0, -1):
        with pytest.raises(ValueError, match="at least 1, or None for all"):
            sampler.compute_logprobs(PROMPT, last_n)
    assert not pool.requests("Sample")


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [
        (SamplingParams(), r"num_samples must be a whole number, got a SamplingParams: .*sampling_params=\.\.\."),
        (2.0, "num_samples must be a whole number, got 2.0"),
        (True, "num_samples must be a whole number, got True"),
        ("2", "num_samples must be a whole number, got '2'"),
    ],
)
def test_a_number_of_samples_that_is_none_is_refused(
    pool: FakePool, sampler: SamplingClient, num_samples: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler.sample(PROMPT, num_samples)
    with pytest.raises(ValueError, match=message):
        sampler.sample_stream(PROMPT, num_samples)
    assert not pool.requests("Sample")
    assert len(sampler.sample(PROMPT, np.int64(2)).result(60).sequences) == 2  # type: ignore[arg-type]


def test_two_thousand_concurrent_samples_need_no_thread_each(pool: FakePool, sampler: SamplingClient) -> None:
    pool.is_held = True
    before = threading.active_count()
    futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2)) for _ in range(2000)]
    wait_until(lambda: len(pool.requests("Sample")) == 2000)
    assert threading.active_count() <= before
    assert not any(future.done() for future in futures)
    pool.is_held = False
    for operation in list(pool.operations.values()):
        operation.CopyFrom(sample_operation(operation.name, 1, 2))
    shared_loop().loop.call_soon_threadsafe(pool.release)
    assert all(future.result(60).sequences[0].tokens == [0, 1] for future in futures)


@pytest.mark.parametrize("delay_s", [0.0, 30.0], ids=["accepted", "in transit"])
def test_a_cancelled_sample_is_cancelled_in_the_pool(pool: FakePool, sampler: SamplingClient, delay_s: float) -> None:
    """A client cannot tell whether a request in transit has reached the pool."""
    pool.is_held = True
    pool.delay_of = lambda name, request: delay_s if name == "Sample" else 0.0
    future = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=3))
    time.sleep(0.05)
    assert future.cancel()
    wait_until(lambda: bool(pool.requests("CancelOperation")))
    assert [request.name for request in pool.requests("CancelOperation")] == [f"{sampler.sampler_id}:1"]


def endless(pool: FakePool) -> None:
    """Let streams yield tokens without end."""

    def events(request: Any) -> Iterator[Any]:
        yield token(0, 5)
        while True:
            yield token(0, 6)

    pool.handlers["StreamSample"] = events


@pytest.mark.parametrize("how", ["close", "block", "drop"])
def test_a_stream_that_is_no_longer_read_cancels_its_sample(pool: FakePool, sampler: SamplingClient, how: str) -> None:
    endless(pool)
    stream = sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=3))
    assert next(stream).token == 5
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "block":
        with stream:
            assert next(stream).token == 6
    else:
        del stream
        gc.collect()
    wait_until(lambda: bool(pool.requests("CancelOperation")))
    assert [request.name for request in pool.requests("CancelOperation")] == [f"{sampler.sampler_id}:1"]


async def test_a_coroutine_that_stops_waiting_for_a_token_cancels_the_sample(
    pool: FakePool, sampler: SamplingClient
) -> None:
    pool.handlers["StreamSample"] = lambda request: [token(0, 5), UNREACHABLE]
    pool.is_held = True
    stream = sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=3))
    assert (await anext(stream)).token == 5
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.5)
    await asyncio.to_thread(wait_until, lambda: bool(pool.requests("CancelOperation")))


def test_closing_a_stream_ends_a_wait_for_its_next_token(pool: FakePool, sampler: SamplingClient) -> None:
    pool.handlers["StreamSample"] = lambda request: [token(0, 5), UNREACHABLE]
    pool.is_held = True
    stream = sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=3))
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.extend(each.token for each in stream))
    reader.start()
    wait_until(lambda: bool(pool.requests("Sample")))  # the stream broke, and the client waits for the result
    stream.close()
    reader.join(60)
    assert not reader.is_alive()
    assert seen == [5]
    wait_until(lambda: bool(pool.requests("CancelOperation")))


async def test_a_stream_that_has_ended_cancels_nothing(pool: FakePool, sampler: SamplingClient) -> None:
    finished = sampling_pb2.StreamSampleResponse(operation=sample_operation("x", 1, 2))
    pool.handlers["StreamSample"] = lambda request: [token(0, 0), finished]
    async with sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=2)) as stream:
        assert [t.token async for t in stream] == [0, 1]
    unread = sampler.sample_stream(PROMPT, 1, SamplingParams(max_tokens=2))
    unread.close()
    await asyncio.sleep(0.05)
    assert pool.requests("CancelOperation") == []


def test_a_sampling_client_with_a_custom_transport_cannot_be_pickled(sampler: SamplingClient) -> None:
    with pytest.raises(TypeError, match="transport of its own"):
        pickle.dumps(sampler)
    for handle in ("", "x", "e30=", "bnVsbA=="):
        with pytest.raises(ValueError, match="this is no sampler handle"):
            SamplingClient.from_sampler_handle(handle, api_key="k")


FORK = """
import multiprocessing, signal
from tinkerpool import SamplingClient, ServiceClient
from tinkerpool.client.sampling_client import SamplerHandle
from tinkerpool.errors import ClientClosed, Unavailable

def error_of(call):
    try:
        call()
    except (ClientClosed, Unavailable) as error:
        return f"{type(error).__name__}: {error}"

def of_new_client():
    return error_of(ServiceClient("127.0.0.1:9", "tp_key", retry_timeout_s=0).get_server_capabilities)

def of_copy(sampler):
    return error_of(lambda: sampler.sample([1]).result())

def of_inherited_client(_):
    return error_of(lambda: inherited.sample([1]).result())

handle = SamplerHandle(base_url="127.0.0.1:9", sampler_id="s", base_model="toy").encode()
inherited = SamplingClient.from_sampler_handle(handle, api_key="tp_key")
assert of_new_client().startswith("Unavailable")
with multiprocessing.get_context("fork").Pool(1, signal.alarm, (50,)) as children:  # a child that hangs ends
    print(children.apply(of_new_client))
    print(children.map(of_copy, [inherited])[0])
    print(children.map(of_inherited_client, [0])[0])
"""


def test_a_client_in_a_forked_process_raises_instead_of_hanging() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["ClientClosed"] * 3
    assert all("gRPC does not survive a fork: start it with multiprocessing's method spawn" in line for line in lines)


def token(index: int, value: int) -> sampling_pb2.StreamSampleResponse:
    return sampling_pb2.StreamSampleResponse(
        token=sampling_pb2.SampledToken(sequence_index=index, token=value, logprob=-1)
    )


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_stream_yields_every_token_once_also_if_it_breaks(
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

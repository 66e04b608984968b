"""A sample's payload and its result: defaults filled in, malformed requests refused, no field lost."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError
from coordinator.operations.operation import Kind, Operation, Usage
from coordinator.payloads.samples import DecodedSample, canonical_sample, decode_sample
from coordinator.sampling.sample import fill_sample
from tests.support.memory import memory_of
from tests.support.toy_engine import toy_model_info
from tests.support.toy_pool import sample_request
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2
from workers.contract.messages import SampledSequence, SampleResult, SamplerVersion, StopReason, TokenLogprobs

MODEL, LIMITS = toy_model_info(), Limits(num_samples_max=8)


def request_of(extras: dict[str, Any] | None = None, **values: Any) -> sampling_pb2.SampleRequest:
    """Return a request; `extras` are fields of the request, the other values those of `sample_request`."""
    request = sample_request("s", **values)
    request.MergeFrom(sampling_pb2.SampleRequest(**extras or {}))
    return request


def payload(message: sampling_pb2.SampleRequest, seed: int = 5, limits: Limits = LIMITS) -> bytes:
    return canonical_sample(message, MODEL, limits, seed)[0]


def decoded(extras: dict[str, Any] | None = None, **values: Any) -> DecodedSample:
    return decode_sample(payload(request_of(extras, **values)))


def targets(*rows: list[int], dtype: Any = np.int64) -> Any:
    return to_tensor(np.array(rows, dtype))


def test_a_sample_is_logged_with_every_default_and_its_seed() -> None:
    sample = decoded(max_tokens=0)
    assert (sample.prompt.tolist(), sample.num_samples, sample.prompt_logprobs) == ([1, 2, 3], 1, False)
    assert (sample.params.max_tokens, sample.params.seed, sample.params.stop_tokens) == (61, 5, (0,))
    assert (sample.params.temperature, sample.params.top_k, sample.params.top_p) == (1.0, -1, 1.0)
    assert (sample.topk_prompt_logprobs, sample.topk_sample_logprobs, sample.prompt_alt_tokens_k) == (0, 0, 0)
    assert sample.prompt_targets is None
    assert sample.num_tokens_max == 64
    greedy = decoded(temperature=0.0, seed=0)
    assert (greedy.params.temperature, greedy.params.seed) == (0.0, 0)


@given(
    prompt=st.lists(st.integers(0, 99), min_size=2, max_size=40),
    extras=st.fixed_dictionaries(
        {},
        optional={
            "num_samples": st.integers(1, 8),
            "include_prompt_logprobs": st.booleans(),
            "topk_prompt_logprobs": st.integers(0, 5),
            "topk_sample_logprobs": st.integers(0, 5),
            "prompt_alt_tokens_k": st.integers(0, 5),
            "note": st.text(max_size=20),
        },
    ),
    params=st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(0, 20),
            "seed": st.integers(0, 2**62),
            "temperature": st.floats(0, 3),
            "top_k": st.integers(1, 9),
            "top_p": st.floats(0.1, 1),
            "stop": st.builds(
                sampling_pb2.StopCondition,
                tokens=st.lists(st.integers(0, 99), max_size=3),
                strings=st.lists(st.text(min_size=1, max_size=9), max_size=3),
            ),
        },
    ),
    dtype=st.sampled_from([np.int32, np.int64]),
    with_targets=st.booleans(),
)
def test_a_replayed_sample_is_decoded_exactly_as_the_admitted_one(
    prompt: list[int], extras: dict[str, Any], params: dict[str, Any], dtype: Any, with_targets: bool
) -> None:
    message = sampling_pb2.SampleRequest(
        sampler_id="s",
        prompt=to_tensor(np.array(prompt, dtype)),
        params=sampling_pb2.SamplingParams(**params),
        prompt_targets=targets(*[[1, -1]] * (len(prompt) - 1), dtype=dtype) if with_targets else None,
        **extras,
    )
    canonical, admitted = canonical_sample(message, MODEL, LIMITS, 5)
    assert described(decode_sample(canonical)) == described(admitted)
    assert not admitted.prompt.flags.writeable
    assert canonical_sample(sampling_pb2.SampleRequest.FromString(canonical), MODEL, LIMITS, 6)[0] == canonical


def described(sample: DecodedSample) -> Any:
    """Return values, dtypes and layout of a decoded sample."""
    return {
        field.name: (value.tolist(), value.dtype.str, value.flags.c_contiguous, value.flags.writeable)
        if isinstance(value := getattr(sample, field.name), np.ndarray)
        else value
        for field in dataclasses.fields(sample)
    }


@pytest.mark.tracemalloc
@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 1024, 16384])
def test_the_memory_of_a_decoded_sample_is_estimated_within_a_fifth(length: int) -> None:
    model = dataclasses.replace(MODEL, max_seq_len=2 * length, vocab_size=10_000)
    message = sampling_pb2.SampleRequest(
        prompt=to_tensor(np.ones(length, np.int32)),
        prompt_targets=targets(*[[1]] * (length - 1), dtype=np.int32),
        params=sampling_pb2.SamplingParams(
            stop=sampling_pb2.StopCondition(tokens=range(1000, 1020), strings=["stop"] * 8)
        ),
        note="n" * 100,
    )
    canonical, admitted = canonical_sample(message, model, LIMITS, 2**40)
    assert admitted.num_bytes == pytest.approx(memory_of(lambda: decode_sample(canonical)), rel=0.2)


def test_a_stop_condition_that_is_set_and_empty_stops_nothing() -> None:
    assert decoded(stop=sampling_pb2.StopCondition()).params.stop_tokens == ()


def test_a_workers_request_has_every_field_of_the_users_request() -> None:
    extras = {
        "include_prompt_logprobs": True,
        "prompt_logprobs_last_n": 2,
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 4,
        "prompt_alt_tokens_k": 5,
        "prompt_targets": targets([7, -1], [8, 9]),
    }
    request = decoded(extras, num_samples=2).request("op", SamplerVersion(key="v"), scope="tenant", stream=True)
    assert (request.op_id, request.version.key, request.num_samples, request.stream) == ("op", "v", 2, True)
    assert (request.prompt_logprobs, request.prompt_logprobs_last_n) == (True, 2)
    assert (request.topk_prompt_logprobs, request.topk_sample_logprobs, request.prompt_alt_tokens_k) == (3, 4, 5)
    assert request.prompt_targets is not None
    assert request.prompt_targets.dtype == np.int32
    assert request.prompt_targets.tolist() == [[7, -1], [8, 9]]


def test_every_parameter_is_part_of_the_payload_and_the_width_of_token_ids_is_not() -> None:
    wide, narrow = ({"prompt_targets": targets([1], [2], dtype=dtype)} for dtype in (np.int64, np.int32))
    assert payload(request_of(wide)) == payload(request_of(narrow))
    others: list[dict[str, Any]] = [
        {},
        wide,
        {"prompt_targets": targets([1], [3])},
        {"topk_prompt_logprobs": 1},
        {"topk_prompt_logprobs": 1, "prompt_logprobs_last_n": 1},
        {"topk_sample_logprobs": 1},
        {"prompt_alt_tokens_k": 1},
        {"note": "mine"},
    ]
    assert len({payload(request_of(extras)) for extras in others}) == len(others)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (100,)}, "token id 100"),
        ({"prompt": (-1,)}, "token id -1"),
        ({"prompt": (1,) * 65}, "takes at most 64"),
        ({"prompt": (1,) * 64, "max_tokens": 2}, "can be 1 to 1"),
        ({"max_tokens": 62}, "can be 1 to 61"),
        ({"max_tokens": -1}, "can be 1 to 61"),
        ({"num_samples": 9}, "1 to 8"),
        ({"num_samples": -1}, "1 to 8"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"stop": sampling_pb2.StopCondition(strings=["ok", ""])}, "empty string"),
        ({"stop": sampling_pb2.StopCondition(tokens=[100])}, "0 to 99"),
        ({"stop": sampling_pb2.StopCondition(strings=["a"] * 17)}, "17 strings, at most 16: each is searched for"),
        ({"stop": sampling_pb2.StopCondition(strings=["a", "b" * 1001])}, "a string of 1001 characters, at most 1000"),
        ({"stop": sampling_pb2.StopCondition(tokens=[1] * 1025)}, "1025 tokens, at most 1024"),
        ({"extras": {"prompt_logprobs_last_n": 1}}, "goes only with include_prompt_logprobs"),
        ({"extras": {"prompt_logprobs_last_n": -1, "include_prompt_logprobs": True}}, r"0 \(all\) or more"),
        ({"extras": {"note": "é" * 129}}, "note has 258 bytes, at most 256"),
        ({"extras": {"topk_prompt_logprobs": 101}}, "topk_prompt_logprobs must be 0 .* to 100, not 101"),
        ({"extras": {"topk_sample_logprobs": -1}}, "topk_sample_logprobs must be 0 .* to 100, not -1"),
        ({"extras": {"prompt_alt_tokens_k": 101}}, "prompt_alt_tokens_k must be 0 .* to 100"),
        ({"extras": {"prompt_targets": targets([1], [2], [3])}}, r"has shape \(3, 1\).*give \(2, k\)"),
        ({"extras": {"prompt_targets": to_tensor(np.ones(2, np.int32))}}, r"has shape \(2,\).*give \(2, k\)"),
        ({"extras": {"prompt_targets": targets([1] * 101, [1] * 101)}}, "k at most 100"),
        ({"extras": {"prompt_targets": targets([], [])}}, r"\(2, 0\)"),
        ({"extras": {"prompt_targets": targets([1], [100])}}, "prompt_targets has token id 100"),
        ({"extras": {"prompt_targets": targets([1], [-2])}}, "prompt_targets has token id -2"),
        ({"extras": {"prompt_targets": targets([-1], [-1])}}, "names no token"),
        ({"extras": {"prompt_targets": to_tensor(np.ones((2, 1), np.float32))}}, "int32 or int64"),
        ({"extras": {"prompt_targets": targets([1])}, "prompt": (1,)}, r"give \(0, k\)"),
    ],
)
def test_wrong_samples_are_refused_with_the_allowed_values(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ServiceError, match=expected) as raised:
        payload(request_of(**values))
    assert raised.value.code is Code.INVALID_ARGUMENT
    assert len(raised.value.message) < 400


def test_a_sample_with_too_large_a_result_is_refused_with_the_cause() -> None:
    limits = Limits(sample_logprobs_max=100)
    few = request_of({"topk_sample_logprobs": 2, "topk_prompt_logprobs": 4}, max_tokens=11, num_samples=4)
    assert payload(few, limits=limits)
    few.topk_sample_logprobs = 3
    with pytest.raises(ServiceError, match=r"up to 144 .* at most 100: most of them by topk_sample_logprobs"):
        payload(few, limits=limits)
    rows = {"prompt_targets": targets([1] * 40, [1] * 40), "prompt_alt_tokens_k": 11}
    with pytest.raises(ServiceError, match=r"up to 102 .* most of them by prompt_targets"):
        payload(request_of(rows), limits=limits)


def likeliest(num_rows: int) -> TokenLogprobs:
    token_ids = np.arange(2 * num_rows, dtype=np.int32).reshape(num_rows, 2)
    logprobs = -token_ids.astype(np.float32)
    logprobs[0] = np.nan
    return TokenLogprobs(token_ids=token_ids, logprobs=logprobs)


def same(found: ops_pb.TokenLogprobs, expected: TokenLogprobs) -> bool:
    same_tokens = np.array_equal(from_tensor(found.token_ids), expected.token_ids)
    return same_tokens and np.array_equal(from_tensor(found.logprobs), expected.logprobs, equal_nan=True)


def outcome_of(request: sampling_pb2.SampleRequest, sampled: SampleResult, usage: Usage) -> ops_pb.Operation:
    canonical = payload(request)
    operation = Operation("t", "s", 1, Kind.SAMPLE, canonical, b"", "", 0, 0)
    fill_sample(operation, decode_sample(canonical), sampled, usage)
    assert operation.outcome is not None
    return operation.outcome


def test_the_result_has_all_fields_of_a_workers_result_and_no_others() -> None:
    sequence = SampledSequence(
        tokens=np.array([4, 5], np.int32), logprobs=np.array([-1, -2], np.float32), stop_reason=StopReason.STOP
    )
    plain = outcome_of(request_of(), SampleResult(op_id="op", sequences=(sequence,)), Usage(9, 0.5))
    assert (plain.num_tokens, plain.engine_seconds) == (9, 0.5)
    result = plain.sample
    for name in ("prompt_logprobs", "topk_prompt", "prompt_target_logprobs", "prompt_alt_tokens"):
        assert not result.HasField(name)
    [found] = result.sequences
    assert not found.HasField("topk")
    assert (from_tensor(found.tokens).tolist(), from_tensor(found.logprobs).tolist()) == ([4, 5], [-1, -2])

    full = request_of({"prompt_targets": targets([0, -1], [7, 8]), "note": "mine"})
    drawn, topk_prompt, alternatives = likeliest(2), likeliest(3), likeliest(2)
    with_topk = dataclasses.replace(sequence, stop_reason=StopReason.LENGTH, topk=drawn)
    prompt_logprobs: NDArray[np.float32] = np.array([np.nan, -1, -2], np.float32)
    sampled = SampleResult(
        op_id="op",
        sequences=(with_topk,),
        prompt_logprobs=prompt_logprobs,
        topk_prompt=topk_prompt,
        prompt_target_logprobs=np.array([[0, 0], [-7, -8]], np.float32),
        prompt_alt_tokens=alternatives,
        num_cached_tokens=2,
    )
    result = outcome_of(full, sampled, Usage()).sample
    assert np.array_equal(from_tensor(result.prompt_logprobs), prompt_logprobs, equal_nan=True)
    assert same(result.topk_prompt, topk_prompt)
    assert same(result.prompt_alt_tokens, alternatives)
    assert same(result.sequences[0].topk, drawn)
    assert (result.num_cached_prompt_tokens, result.note) == (2, "mine")
    asked_for = np.array([[0, np.nan], [-7, -8]], np.float32)  # the log-probability of a certain token, 0, is kept
    assert np.array_equal(from_tensor(result.prompt_target_logprobs), asked_for, equal_nan=True)

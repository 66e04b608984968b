"""Log-probabilities of sampled tokens are those of the distribution at the request's temperature, before filters."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.numerics.harness import VOCAB_SIZE
from tests.support.numerics.samplers import Sampling, request, sampling
from workers.contract.messages import Datum, SampledSequence, SampleRequest

TEMPERATURES = [0.0, 0.3, 1.0, 1.7]
FILTERS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.9}]
LENGTH, MANY = 12, 200


def forward(s: Sampling, key: str, tokens: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the trainer's log-probabilities (n, vocabulary) of the token after each token."""
    targets = np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), (len(tokens), 1))
    weights = np.ones(targets.shape, np.float32)
    (result,) = s.driver.train(
        s.driver.forward(key, [Datum(tokens=tokens, loss_inputs={"target_tokens": targets, "weights": weights})])
    )
    return result.logprobs[0].astype(np.float64)


def log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def expected_of(
    s: Sampling, key: str, wanted: SampleRequest, sequence: SampledSequence, temperature: float
) -> NDArray[np.float64]:
    """Return log_softmax(logits / temperature) (n, vocabulary) at the positions of a sequence, in double precision."""
    whole = np.concatenate([wanted.prompt, sequence.tokens])
    return log_softmax(forward(s, key, whole)[len(wanted.prompt) - 1 : -1] / temperature)


@pytest.mark.slow
def test_logprobs_are_log_softmax_of_the_trainers_logits_over_the_temperature(model_directory: Path) -> None:
    """Also of alternatives, in a pass with requests at other temperatures, with and without top-k and top-p."""
    s = sampling(model_directory)
    s.publish("a")
    requests = [
        request(f"{temperature}{number}", "a/v", LENGTH, 2, temperature=temperature, topk_sample_logprobs=6, **filters)
        for temperature in TEMPERATURES
        for number, filters in enumerate(FILTERS)
    ]
    for wanted, sequences in zip(requests, s.sequences(*requests), strict=True):
        temperature = wanted.params.temperature or 1.0
        tolerance = s.tolerance / min(1, temperature)
        for sequence in sequences:
            expected = expected_of(s, "a", wanted, sequence, temperature)
            rows = np.arange(len(sequence.tokens))
            np.testing.assert_allclose(sequence.logprobs, expected[rows, sequence.tokens], rtol=0, atol=tolerance)
            assert sequence.topk is not None
            likeliest = expected[rows[:, None], sequence.topk.token_ids]
            np.testing.assert_allclose(sequence.topk.logprobs, likeliest, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_with_a_bf16_model_logprobs_are_scaled_in_fp32(qwen3: Path, temperature: float) -> None:
    s = sampling(qwen3, dtype="bfloat16")
    s.publish("a")
    wanted = request("r", "a/v", LENGTH, temperature=temperature, topk_sample_logprobs=6)
    ((scaled,),) = s.sequences(wanted)
    ((plain,),) = s.sequences(replace(wanted, scales_logprobs=False, topk_sample_logprobs=VOCAB_SIZE))
    assert scaled.tokens.tolist() == plain.tokens.tolist()
    assert scaled.topk is not None
    assert plain.topk is not None
    order = np.argsort(plain.topk.token_ids, axis=1)
    at_one = np.take_along_axis(plain.topk.logprobs, order, axis=1).astype(np.float64)  # (n, vocabulary)
    expected, rows = log_softmax(at_one / (temperature or 1.0)), np.arange(len(scaled.tokens))
    tolerance = 1e-5 / min(1, temperature or 1.0)
    np.testing.assert_allclose(scaled.logprobs, expected[rows, scaled.tokens], rtol=0, atol=tolerance)
    likeliest = expected[rows[:, None], scaled.topk.token_ids]
    np.testing.assert_allclose(scaled.topk.logprobs, likeliest, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.8])
def test_differences_of_logprobs_are_those_at_temperature_one_over_the_temperature(
    qwen3: Path, temperature: float
) -> None:
    """The check of the cookbook: log p_T(i) - log p_T(j) = (log p_1(i) - log p_1(j)) / T, of tokens that were drawn."""
    s = sampling(qwen3)

    def drawn(op_id: str, temperature: float) -> dict[int, float]:
        (sequences,) = s.sequences(
            request(op_id, length=LENGTH, num_samples=MANY, max_tokens=1, temperature=temperature)
        )
        return {int(sequence.tokens[0]): float(sequence.logprobs[0]) for sequence in sequences}

    scaled, plain = drawn("scaled", temperature), drawn("plain", 1.0)
    common = sorted(scaled.keys() & plain.keys())
    assert len(common) > 5
    for i, j in combinations(common, 2):
        assert scaled[i] - scaled[j] == pytest.approx((plain[i] - plain[j]) / temperature, abs=2e-5 / temperature)


@pytest.mark.slow
def test_logprobs_along_a_sequence_are_those_of_samples_of_one_token(qwen3: Path) -> None:
    s = sampling(qwen3)
    ((whole,),) = s.sequences(request("whole", length=LENGTH, temperature=0.5, max_tokens=20))
    prompt = request("p", length=LENGTH).prompt
    num_found = 0
    for position in range(len(whole.tokens)):
        prefix = np.concatenate([prompt, whole.tokens[:position]])
        one = request(f"{position}", prompt=prefix, num_samples=300, seed=position, temperature=0.5, max_tokens=1)
        (sequences,) = s.sequences(one)
        same = [float(each.logprobs[0]) for each in sequences if each.tokens[0] == whole.tokens[position]]
        num_found += bool(same)
        np.testing.assert_allclose(same, whole.logprobs[position], rtol=0, atol=2e-5)
    assert num_found > len(whole.tokens) / 2


@pytest.mark.slow
def test_requests_from_before_scaling_get_logprobs_at_temperature_one_and_the_same_tokens(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish("a")
    new = request("new", "a/v", LENGTH, 2, temperature=0.3, topk_sample_logprobs=3)
    scaled, plain = s.sequences(new, replace(new, op_id="old", scales_logprobs=False))
    for one, other in zip(scaled, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        rows = np.arange(len(other.tokens))
        expected = expected_of(s, "a", new, other, 1.0)
        np.testing.assert_allclose(other.logprobs, expected[rows, other.tokens], rtol=0, atol=1e-5)
        assert (np.abs(one.logprobs - other.logprobs) > 1e-3).any()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e30])
def test_logprobs_at_extreme_temperatures_are_finite(qwen3: Path, temperature: float) -> None:
    s = sampling(qwen3)
    ((sequence,),) = s.sequences(request("r", temperature=temperature, topk_sample_logprobs=5))
    ((greedy,),) = s.sequences(request("g", temperature=0.0))
    assert sequence.topk is not None
    assert np.isfinite(sequence.logprobs).all()
    assert np.isfinite(sequence.topk.logprobs).all()
    if temperature < 1:
        assert sequence.tokens.tolist() == greedy.tokens.tolist()
        assert sequence.logprobs.tolist() == [0.0] * len(sequence.tokens)
    else:
        np.testing.assert_allclose(sequence.logprobs, -np.log(VOCAB_SIZE), rtol=1e-6)

"""Outputs of a sample in addition to its tokens: likeliest tokens, given targets, alternatives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.numerics.harness import VOCAB_SIZE, code, make_spec, message_of
from tests.support.numerics.samplers import Sampling, assert_same_bits, prompt_of, request, sampling
from workers.contract.messages import Datum, ErrorCode, SampleRequest, SampleResult, TokenLogprobs

LENGTH = 90
ALL_OUTPUTS: dict[str, Any] = {
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 4,
    "topk_sample_logprobs": 3,
    "prompt_alt_tokens_k": 5,
}


def logprobs_of(s: Sampling, key: str, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the log-probabilities (n, vocabulary) of the token after each token, by the training forward."""
    targets = np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), (len(tokens), 1))
    weights = np.ones(targets.shape, np.float32)
    datum = Datum(tokens=tokens, loss_inputs={"target_tokens": targets, "weights": weights})
    (result,) = s.driver.train(s.driver.forward(key, [datum]))
    return result.logprobs[0]


def assert_likeliest(given: TokenLogprobs, expected: NDArray[np.float32], tolerance: float) -> None:
    """Assert that `given` (n, k) are the largest of `expected` (n, vocabulary), the largest first."""
    assert given.token_ids.shape == given.logprobs.shape
    for ids, values, row in zip(given.token_ids, given.logprobs, expected, strict=True):
        np.testing.assert_allclose(values, row[ids], atol=tolerance)
        assert (np.diff(values) <= 0).all()
        assert len(set(ids.tolist())) == len(ids)
        assert values[-1] >= np.sort(row)[-len(ids)] - tolerance


def test_all_reported_logprobs_equal_the_training_forward(model_directory: Path) -> None:
    s = sampling(model_directory)
    s.publish("a")
    tolerance = s.tolerance
    targets = np.random.default_rng(0).integers(0, VOCAB_SIZE, (LENGTH - 1, 2)).astype(np.int32)
    targets[::3, 1] = -1
    targets[5] = -1
    wanted = replace(request("r", "a/v", length=LENGTH, num_samples=2, **ALL_OUTPUTS), prompt_targets=targets)
    (result,) = s.run(wanted)
    expected = logprobs_of(s, "a", wanted.prompt)
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(
        result.prompt_logprobs[1:], expected[np.arange(LENGTH - 1), wanted.prompt[1:]], atol=tolerance
    )
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids.shape == (LENGTH, 4)
    assert np.isnan(result.topk_prompt.logprobs[0]).all()
    assert result.topk_prompt.token_ids[0].tolist() == [0] * 4
    top = TokenLogprobs(token_ids=result.topk_prompt.token_ids[1:], logprobs=result.topk_prompt.logprobs[1:])
    assert_likeliest(top, expected[:-1], tolerance)
    assert result.prompt_target_logprobs is not None
    rows = np.arange(LENGTH - 1)[:, None]
    np.testing.assert_allclose(
        result.prompt_target_logprobs, np.where(targets < 0, 0, expected[rows, np.maximum(targets, 0)]), atol=tolerance
    )
    alternatives = result.prompt_alt_tokens
    assert alternatives is not None
    assert alternatives.token_ids.shape == (LENGTH - 1, 5)
    np.testing.assert_allclose(alternatives.logprobs, expected[rows, alternatives.token_ids], atol=tolerance)
    for sequence in result.sequences:
        whole = np.concatenate([wanted.prompt, sequence.tokens])
        assert sequence.topk is not None
        assert_likeliest(sequence.topk, logprobs_of(s, "a", whole)[LENGTH - 1 : -1], tolerance)


def test_requested_outputs_do_not_change_the_samples(qwen3: Path) -> None:
    s = sampling(qwen3)
    (plain,) = s.sequences(request("plain", length=LENGTH, num_samples=3))
    targets = np.zeros((LENGTH - 1, 1), np.int32)
    (result,) = s.run(replace(request("all", length=LENGTH, num_samples=3, **ALL_OUTPUTS), prompt_targets=targets))
    without = [replace(sequence, topk=None) for sequence in result.sequences]
    assert_same_bits(without, plain)


def test_outputs_that_were_not_requested_are_missing(qwen3: Path) -> None:
    (result,) = sampling(qwen3).run(request("r", length=LENGTH))
    outputs = (result.prompt_logprobs, result.topk_prompt, result.prompt_target_logprobs, result.prompt_alt_tokens)
    assert outputs == (None,) * 4
    assert result.sequences[0].topk is None


def as_bytes(result: SampleResult) -> list[bytes]:
    """Return all outputs for the prompt."""
    assert result.prompt_logprobs is not None
    assert result.topk_prompt is not None
    assert result.prompt_alt_tokens is not None
    arrays = [result.prompt_logprobs]
    for outputs in (result.topk_prompt, result.prompt_alt_tokens):
        arrays += [outputs.token_ids.view(np.float32), outputs.logprobs]
    return [array.tobytes() for array in arrays]


def test_outputs_are_the_same_solo_co_batched_in_parts_and_cached(qwen3: Path) -> None:
    wanted = request("r", length=200, **ALL_OUTPUTS)
    (solo,) = sampling(qwen3).run(wanted)
    s = sampling(qwen3, prefill_tokens_max=64)
    others = [request(f"c{number}", prompt=prompt_of(90, seed=number), num_samples=3) for number in range(4)]
    results = s.run(*others, wanted)
    assert as_bytes(results[-1]) == as_bytes(solo)
    (again,) = s.run(replace(wanted, op_id="again"))
    assert as_bytes(again) == as_bytes(solo)


def test_alternatives_follow_temperature_and_seed_but_no_filter(qwen3: Path) -> None:
    s = sampling(qwen3)

    def drawn(op_id: str, **values: Any) -> NDArray[np.int32]:
        (result,) = s.run(request(op_id, length=40, prompt_alt_tokens_k=50, **values))
        assert result.prompt_alt_tokens is not None
        return result.prompt_alt_tokens.token_ids

    plain = drawn("plain")
    assert (drawn("filtered", top_k=1, top_p=0.01) == plain).all()
    assert (drawn("seeded", seed=8) != plain).mean() > 0.5
    greedy = drawn("greedy", temperature=0.0)
    assert (greedy == greedy[:, :1]).all()
    assert len(np.unique(plain[0])) > 10, "the draws of one position are different"
    expected = np.exp(logits_after(s, 40).astype(np.float64))
    frequencies = np.mean([np.isin(plain[row], np.argsort(-p)[:40]).mean() for row, p in enumerate(expected)])
    masses = np.mean([np.sort(p)[-40:].sum() for p in expected])
    assert abs(frequencies - masses) < 0.05


def logits_after(s: Sampling, length: int) -> NDArray[np.float32]:
    """Return the base model's log-probabilities after each token of a prompt but the last."""
    s.driver.install(make_spec("fresh"))
    return logprobs_of(s, "fresh", prompt_of(length))[:-1]


def test_only_the_requested_last_positions_have_outputs(qwen3: Path) -> None:
    s = sampling(qwen3)
    (all_,) = s.run(request("all", length=LENGTH, prompt_logprobs=True, topk_prompt_logprobs=2))
    (last,) = s.run(
        request("last", length=LENGTH, prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=7)
    )
    (more,) = s.run(request("more", length=LENGTH, prompt_logprobs=True, prompt_logprobs_last_n=1000))
    for result in (all_, last, more):
        assert result.prompt_logprobs is not None
    assert all_.topk_prompt is not None
    assert last.topk_prompt is not None
    np.testing.assert_array_equal(more.prompt_logprobs, all_.prompt_logprobs)
    np.testing.assert_array_equal(last.prompt_logprobs[-7:], all_.prompt_logprobs[-7:])  # type: ignore[index]
    assert np.isnan(last.prompt_logprobs[:-7]).all()  # type: ignore[index]
    np.testing.assert_array_equal(last.topk_prompt.token_ids[-7:], all_.topk_prompt.token_ids[-7:])
    assert np.isnan(last.topk_prompt.logprobs[:-7]).all()
    assert not last.topk_prompt.token_ids[:-7].any()


def test_k_beyond_the_vocabulary_gives_all_tokens(qwen3: Path) -> None:
    (result,) = sampling(qwen3).run(request("r", length=3, topk_sample_logprobs=1000, topk_prompt_logprobs=1000))
    assert result.topk_prompt is not None
    assert result.topk_prompt.token_ids.shape == (3, VOCAB_SIZE)
    assert result.sequences[0].topk is not None
    assert result.sequences[0].topk.token_ids.shape == (10, VOCAB_SIZE)


def test_prompt_of_one_token_has_no_outputs(qwen3: Path) -> None:
    wanted = replace(request("r", length=1, **ALL_OUTPUTS), prompt_targets=np.zeros((0, 2), np.int32))
    (result,) = sampling(qwen3).run(wanted)
    assert result.error is None
    assert result.prompt_target_logprobs is not None
    assert result.prompt_target_logprobs.shape == (0, 2)
    assert result.prompt_alt_tokens is not None
    assert result.prompt_alt_tokens.token_ids.shape == (0, 5)


@pytest.mark.parametrize("targets", [np.zeros((LENGTH, 1)), np.zeros(LENGTH - 1), np.full((LENGTH - 1, 1), VOCAB_SIZE)])
def test_invalid_targets_are_refused(qwen3: Path, targets: NDArray[Any]) -> None:
    wanted: SampleRequest = replace(request("r", length=LENGTH), prompt_targets=targets.astype(np.int32))
    (result,) = sampling(qwen3).run(wanted)
    assert code(result) == ErrorCode.INVALID_ARGUMENT
    assert "prompt_targets" in message_of(result)

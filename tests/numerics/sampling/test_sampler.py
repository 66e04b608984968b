"""The sampler against a naive one without cache, batch or sharing; its bits, limits and reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.support.mini_model import END_OF_TEXT_ID
from tests.support.numerics.cases import MODELS_BY_THREADS
from tests.support.numerics.harness import code, make_data, make_spec
from tests.support.numerics.naive import NaiveModel
from tests.support.numerics.rounding import rounding_tolerances
from tests.support.numerics.samplers import (
    assert_same_bits,
    naive_sample,
    next_tokens,
    prompt_of,
    request,
    sampling,
)
from workers.contract.contents import whole
from workers.contract.messages import AdamParams, ErrorCode, SamplerVersion, SamplingParams, StopReason, TokenEvent
from workers.sampling import draws
from workers.sampling.drawing import draw_rows
from workers.sampling.sequences import StopStrings

pytestmark = pytest.mark.slow

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.5, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.9, "stop_tokens": tuple(range(0, 256, 5))},
]


def test_samples_are_those_of_a_naive_sampler_without_cache_or_batch(model_directory: Path) -> None:
    s = sampling(model_directory)
    s.publish("a", "b")
    requests = [
        request(f"{key}{number}", key and f"{key}/v", length=5 + 7 * number, num_samples=2, max_tokens=6, **way)
        for number, way in enumerate(WAYS)
        for key in ("", "a", "b")
    ]
    models = {
        key: NaiveModel(model_directory, s.specs.get(key, make_spec("none")), s.driver.weights(key) if key else {})
        for key in ("", "a", "b")
    }
    for wanted, result in zip(requests, s.run(*requests), strict=True):
        naive = models[wanted.version.key.removesuffix("/v")]
        for index, sequence in enumerate(result.sequences):
            tokens, logprobs = naive_sample(naive, wanted, index)
            assert sequence.tokens.tolist() == tokens
            temperature = wanted.params.temperature or 1
            differences = np.abs(sequence.logprobs - np.array(logprobs))
            tolerances = np.full(len(tokens), 1e-5 / min(1, temperature))
            if s.driver.engine.base_model.delta_layers and (differences > tolerances).any():
                everything = [*wanted.prompt.tolist(), *tokens]
                by_rounding = rounding_tolerances(naive, everything, len(tokens), temperature)
                tolerances = np.maximum(tolerances, by_rounding)
            assert (differences <= tolerances).all()


@pytest.mark.parametrize(("model_directory", "num_threads"), MODELS_BY_THREADS, indirect=["model_directory"])
def test_sample_has_the_same_bits_solo_and_co_batched(model_directory: Path, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    s = sampling(model_directory)
    keys = ["a", "b", "c"]
    s.publish(*keys)
    wanted = [
        request(f"{key}{length}", f"{key}/v" if key else "", length, num_samples, seed=length, max_tokens=8, **way)
        for key in ("", *keys)
        for length, num_samples, way in ((1, 3, {}), (9, 1, {"temperature": 0.0}), (33, 7, {"top_p": 0.9}))
    ]
    solo = [s.sequences(one)[0] for one in wanted]
    together = s.sequences(*wanted)
    for one in reversed(wanted):  # each begins while the others are decoding
        s.sampler.start_sample(one)
        s.step()
        s.step()
    s.run()
    for one, bits, crowd in zip(wanted, solo, together, strict=True):
        assert_same_bits(bits, crowd)
        assert_same_bits(bits, s.result(one.op_id).sequences)


@pytest.mark.parametrize("num_samples", [1, 2])
def test_sample_has_the_same_bits_solo_and_in_a_batch_of_64(each_kind: Path, num_samples: int) -> None:
    """With different prompts, and with two samples of each prompt."""
    s = sampling(each_kind)
    s.publish("a", "b")
    wanted = [
        request(
            f"{number}", ("", "a/v", "b/v")[number % 3], 1 + 5 * number % 130, num_samples, seed=number, max_tokens=9
        )
        for number in range(64 // num_samples)
    ]
    together = s.sequences(*wanted)
    for number in (0, 13, 14, 30):
        assert_same_bits(s.sequences(wanted[number])[0], together[number])


def test_logprobs_are_those_of_the_training_forward(model_directory: Path) -> None:
    s = sampling(model_directory)
    s.publish("a")
    wanted = request("r", "a/v", length=20, num_samples=3, max_tokens=25, top_k=40, prompt_logprobs=True)
    (result,) = s.run(wanted)
    assert result.prompt_logprobs is not None
    assert np.isnan(result.prompt_logprobs[0])
    for sequence in result.sequences:
        whole = np.concatenate([wanted.prompt, sequence.tokens])
        (forward,) = s.driver.train(s.driver.forward("a", [next_tokens(whole)]))
        reported = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
        np.testing.assert_allclose(reported, forward.logprobs[0], atol=1e-5)


def test_a_prompt_of_the_longest_sequence_has_all_its_logprobs(each_kind: Path) -> None:
    s = sampling(each_kind)
    length = s.driver.engine.info.max_seq_len  # more than a block of logits
    (result,) = s.run(request("r", length=length, max_tokens=1, prompt_logprobs=True))
    prompt = prompt_of(length)
    s.driver.install(make_spec("fresh"))
    (forward,) = s.driver.train(s.driver.forward("fresh", [next_tokens(prompt)]))
    assert result.prompt_logprobs is not None
    np.testing.assert_allclose(result.prompt_logprobs[1:], forward.logprobs[0], atol=1e-5)


def test_one_forward_a_step_serves_all_tenants_and_a_prompt_is_computed_once(each_kind: Path) -> None:
    s = sampling(each_kind)
    s.publish("a", "b", "c")
    base_model = s.driver.engine.base_model

    def matmuls_of_a_step() -> int:
        before = base_model.num_base_matmuls
        s.step()
        return base_model.num_base_matmuls - before

    s.sampler.start_sample(request("r", max_tokens=20))
    one = matmuls_of_a_step()
    assert matmuls_of_a_step() == one
    for key in ("a", "b", "c"):
        s.sampler.start_sample(request(key, f"{key}/v", num_samples=5, max_tokens=20))
    assert matmuls_of_a_step() == one, "four prompts of four tenants in one forward"
    assert matmuls_of_a_step() == one
    s.run()
    assert s.result("a").num_prompt_tokens == 12
    assert s.result("a").num_sampled_tokens == 100


def test_more_sequences_than_slots_wait_and_get_the_same_tokens(each_kind: Path) -> None:
    many = request("many", num_samples=11, stop_tokens=tuple(range(0, 256, 3)))
    (wide,) = sampling(each_kind).sequences(many)
    s = sampling(each_kind, num_sequences_max=3)
    s.sampler.start_sample(many)
    s.sampler.start_sample(request("behind"))
    while s.sampler.can_decode():
        s.step()
        assert s.sampler.slots.num_granted <= 3
    assert_same_bits(s.result("many").sequences, wide)
    assert s.result("behind").error is None


@pytest.mark.parametrize("what", ["drawing", "text"])
def test_a_request_that_fails_in_the_step_of_a_late_first_token_fails_once(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Patches what draws, and what decodes: no request makes them fail for its running sequences only."""
    s = sampling(qwen3, num_sequences_max=4)
    (solo,) = s.sequences(request("solo"))
    s.sampler.start_sample(request("short", num_samples=2, max_tokens=3))
    s.sampler.start_sample(request("failing", seed=8, num_samples=2, stream=True, stop_strings=("never",)))
    for _ in range(3):
        s.step()
    assert s.result("short").error is None
    s.sampler.start_sample(request("kept"))

    def drawing(logits: Any, params: Sequence[SamplingParams], numbers: Any) -> list[int]:
        if any(own.seed == 8 for own in params):
            raise MemoryError
        return draw_rows(logits, params, numbers)

    if what == "drawing":
        monkeypatch.setattr(draws, "draw_rows", drawing)
    else:
        monkeypatch.setattr(StopStrings, "is_completed", Mock(side_effect=MemoryError))
    s.step()
    assert s.result("failing").error is not None
    assert {event.sequence_index for event in s.events if isinstance(event, TokenEvent)} == {0}
    s.run()
    assert_same_bits(s.result("kept").sequences, solo)


def test_more_versions_than_bank_slots_are_sampled_together(each_kind: Path) -> None:
    keys = ["a", "b", "c", "d", "e"]
    s = sampling(each_kind, num_slots=2)
    s.publish(*keys)
    wanted = [request(key, f"{key}/v", num_samples=2) for key in keys] + [request("base")]
    solo = [s.sequences(one)[0] for one in wanted]
    assert len({sequences[0].tokens.tobytes() for sequences in solo}) == 6
    for bits, together in zip(solo, s.sequences(*wanted), strict=True):
        assert_same_bits(bits, together)


def test_bank_slots_first_used_by_sampling_can_train(qwen3: Path) -> None:
    """Tensors made in the sampler's inference mode can never be written again; slots must not be such tensors."""
    s = sampling(qwen3)
    s.driver.install(make_spec("a"))
    s.driver.train(s.driver.save("a", publish_as="a/0"))
    for number in range(2):
        s.run(request(f"with {number}", f"a/{number}"))
        s.driver.train(s.driver.backward("a", make_data("cross_entropy", [9])), s.driver.step("a"))
        s.driver.train(s.driver.save("a", publish_as=f"a/{number + 1}"))


def test_published_version_does_not_change_while_its_adapter_is_trained(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish("a")
    (before,) = s.sequences(request("before", "a/v", max_tokens=20))
    s.sampler.start_sample(request("meanwhile", "a/v", max_tokens=20))
    for _ in range(5):
        s.step()
        s.driver.train(s.driver.backward("a", make_data("cross_entropy", [9])), s.driver.step("a"))
    s.driver.engine.bank.remove("a/v")
    s.run()
    assert_same_bits(s.result("meanwhile").sequences, before)
    assert "a/v" not in s.driver.engine.bank, "removed with its last sample"


def test_sent_state_replaces_an_unpinned_version_with_the_same_key(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish("a")
    s.driver.train(s.driver.backward("a", make_data("cross_entropy", [9, 14], seed=5)))
    s.driver.train(s.driver.step("a", AdamParams(learning_rate=0.3)))
    (saved,) = s.driver.train(s.driver.save("a", publish_as="a/newer"))
    old, new = s.sequences(request("old", "a/v"), request("new", "a/newer"))
    sent = replace(request("sent"), version=SamplerVersion(key="a/v", spec=s.specs["a"], state=saved.state))
    (given,) = s.sequences(sent)
    assert_same_bits(given, new)
    assert given[0].tokens.tolist() != old[0].tokens.tolist()


def test_tokens_are_streamed_one_by_one_on_request(qwen3: Path) -> None:
    s = sampling(qwen3)
    loud, quiet = s.run(request("loud", num_samples=3, stream=True), request("quiet"))
    for index, sequence in enumerate(loud.sequences):
        streamed = [e for e in s.events if isinstance(e, TokenEvent) and e.sequence_index == index]
        assert [event.op_id for event in streamed] == ["loud"] * 10
        assert [event.token for event in streamed] == sequence.tokens.tolist()
        assert [np.float32(event.logprob) for event in streamed] == sequence.logprobs.tolist()
    assert s.events.index(loud) > max(i for i, e in enumerate(s.events) if isinstance(e, TokenEvent))
    assert quiet.engine_s > 0


def test_stop_token_is_the_last_token_and_the_stop_reason(qwen3: Path) -> None:
    s = sampling(qwen3)
    (free,) = s.sequences(request("free", max_tokens=30))
    stop = int(free[0].tokens[6])
    first = free[0].tokens.tolist().index(stop)
    (stopped,) = s.sequences(request("stopped", max_tokens=30, stop_tokens=(stop, END_OF_TEXT_ID)))
    assert stopped[0].tokens.tolist() == free[0].tokens[: first + 1].tolist()
    assert (free[0].stop_reason, stopped[0].stop_reason) == (StopReason.LENGTH, StopReason.STOP)


def test_stop_string_ends_with_the_token_that_completes_it(qwen3: Path) -> None:
    s = sampling(qwen3)
    letters: dict[str, Any] = {"top_k": 258, "temperature": 5.0, "max_tokens": 200}
    (free,) = s.sequences(request("free", **letters))
    tokens = free[0].tokens.tolist()
    printable = [all(32 < token < 127 for token in tokens[i : i + 2]) for i in range(len(tokens) - 1)]
    position = printable.index(True)  # the miniature's tokens are bytes, so this string is cut into two of them
    string = bytes(tokens[position : position + 2]).decode()
    (stopped,) = s.sequences(request("stopped", **letters, stop_strings=("never to be seen", string)))
    assert stopped[0].tokens.tolist() == tokens[: position + 2]
    assert stopped[0].stop_reason is StopReason.STOP


def test_zero_tokens_give_only_the_prompt_logprobs(each_kind: Path) -> None:
    (result,) = sampling(each_kind).run(request("r", max_tokens=0, num_samples=2, prompt_logprobs=True))
    assert [len(sequence.tokens) for sequence in result.sequences] == [0, 0]
    assert result.prompt_logprobs is not None
    assert np.isfinite(result.prompt_logprobs[1:]).all()


def test_a_result_says_how_long_its_prompt_and_its_tokens_took(qwen3: Path) -> None:
    s = sampling(qwen3)
    began = time.perf_counter()
    long, prompt_only = s.run(request("long", max_tokens=20), request("prompt", max_tokens=0))
    seconds = time.perf_counter() - began
    for result in (long, prompt_only):
        assert list(result.phase_s) == ["prefill", "decode"]
        assert 0 < result.phase_s["prefill"] < sum(result.phase_s.values()) + 1e-9 <= seconds
    assert long.phase_s["decode"] > 0
    assert prompt_only.phase_s["decode"] == 0
    (never_ran,) = s.run(request("unknown", "no/version"))
    assert never_ran.phase_s == {}


def test_cancelled_request_ends_and_changes_no_other(each_kind: Path) -> None:
    s = sampling(each_kind, num_sequences_max=4)
    s.publish("a")
    (solo,) = s.sequences(request("solo", "a/v", num_samples=2))
    s.sampler.start_sample(request("running", "a/v", num_samples=2, max_tokens=100))
    s.sampler.start_sample(request("kept", "a/v", num_samples=2))
    s.sampler.start_sample(request("waiting", "a/v", num_samples=4))
    s.step()
    s.step()
    for op_id in ("running", "waiting", "unknown"):
        s.sampler.cancel_sample(op_id)
    s.run()
    for op_id in ("running", "waiting"):
        assert code(s.result(op_id)) == ErrorCode.CANCELLED
    assert (s.result("running").num_sampled_tokens, s.result("waiting").num_prompt_tokens) == (4, 0)
    assert_same_bits(s.result("kept").sequences, solo)
    assert s.driver.engine.bank.entry("a/v").num_pins == 0


def test_request_that_cannot_run_fails_with_a_reason_and_no_other_request_does(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish("a", "overflowed")
    (solo,) = s.sequences(request("solo", "a/v"))
    s.driver.engine.bank.acquire(["overflowed/v"])[0].weights.fill_(float("inf"))
    state = s.driver.state("a")
    damaged = SamplerVersion(key="damaged", spec=s.specs["a"], state=replace(state, weights=whole(state.weights)[:50]))
    bad = {
        ErrorCode.OUT_OF_ORDER: [request("unknown", "unknown/v")],
        ErrorCode.NON_FINITE: [request("overflowed", "overflowed/v", num_samples=2)],
        ErrorCode.DATA_LOSS: [replace(request("damaged"), version=damaged)],
        ErrorCode.INVALID_ARGUMENT: [
            request("empty", length=0),
            request("long", length=500, max_tokens=14),
            request("large", prompt=np.array([1, 258], np.int32)),
            request("negative", prompt=np.array([-1], np.int32)),
        ],
    }
    wanted = [request("kept", "a/v"), *(one for requests in bad.values() for one in requests)]
    kept, *_ = s.run(*wanted)
    assert_same_bits(kept.sequences, solo[:1])
    for expected, requests in bad.items():
        for one in requests:
            assert code(s.result(one.op_id)) == expected, one.op_id


def test_failed_pass_is_bisected_until_only_the_failing_request_is_left(
    each_kind: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = sampling(each_kind)
    forward = s.driver.engine.base_model.forward

    def failing(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        if 199 in tokens.tolist():
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(tokens, *others)

    wanted = [request(f"r{number}", length=3 + number, num_samples=2, temperature=0.0) for number in range(4)]
    solo = [s.sequences(one)[0] for one in wanted]
    monkeypatch.setattr(s.driver.engine.base_model, "forward", failing)  # memory does not run out on demand
    failing_request = request("failing_request", prompt=np.array([1, 199], np.int32))
    results = s.run(*wanted[:2], failing_request, *wanted[2:])
    assert code(results.pop(2)) == ErrorCode.OUT_OF_MEMORY
    for bits, result in zip(solo, results, strict=True):
        assert_same_bits(bits, result.sequences)


@pytest.mark.parametrize(
    "outputs", [{"prompt_logprobs": True}, {"topk_prompt_logprobs": 3}, {"prompt_alt_tokens_k": 2}]
)
def test_only_the_prompt_with_non_finite_logits_fails_in_a_shared_pass_and_is_charged(
    each_kind: Path, monkeypatch: pytest.MonkeyPatch, outputs: dict[str, Any]
) -> None:
    s = sampling(each_kind)
    s.publish("a", "overflowed")
    s.driver.engine.bank.acquire(["overflowed/v"])[0].weights.fill_(float("inf"))
    wanted = [request(f"r{number}", "a/v", length=4 + number) for number in range(4)]
    solo = s.sequences(*wanted)
    for one in wanted:
        s.sampler.start_sample(one)
    s.step()
    counts = s.count_rows(monkeypatch)
    s.sampler.start_sample(request("overflowed", "overflowed/v", length=40, **outputs))
    s.step()
    assert counts == [40 + len(wanted)]
    result = s.result("overflowed")
    assert code(result) == ErrorCode.NON_FINITE
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (40, 0)
    assert result.engine_s > 0
    assert s.driver.engine.bank.entry("overflowed/v").num_pins == 0
    s.run()
    for bits, one in zip(solo, wanted, strict=True):
        assert_same_bits(bits, s.result(one.op_id).sequences)


def test_versions_are_removed_by_a_later_request_and_pinned_ones_after_their_last_use(qwen3: Path) -> None:
    s = sampling(qwen3)
    s.publish("a")
    engine, state = s.driver.engine, s.driver.state("a")
    engine.sampler = s.sampler
    before = len(engine.bank)
    for number in range(6):
        version = SamplerVersion(key=f"v{number}", spec=s.specs["a"], state=state)
        removals = (f"v{number - 1}", "unknown")
        engine.start_sample(replace(request(f"r{number}"), version=version, removals=removals))
        s.step()
        assert len(engine.bank) == before + number + 1, "versions in use are not removed"
    s.run()
    assert {s.result(f"r{number}").error for number in range(6)} == {None}
    assert len(engine.bank) == before + 1
    assert "v5" in engine.bank
    s.driver.train(s.driver.step("a"))
    engine.start_sample(request("last", removals=("v5",)))
    assert len(engine.bank) == before


def test_reset_drops_everything_without_events(each_kind: Path) -> None:
    s = sampling(each_kind)
    s.publish("a")
    s.sampler.start_sample(request("running", "a/v"))
    s.step()
    s.sampler.start_sample(request("waiting"))
    s.sampler.reset()
    assert not s.sampler.can_decode()
    assert s.sampler.decode_step() == []
    assert s.driver.engine.bank.entry("a/v").num_pins == 0

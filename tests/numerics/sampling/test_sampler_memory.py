"""Key-value blocks: shared by samples and prompts, bounded, granted to scopes in turns, free at the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.numerics.harness import Driver, code, make_data, make_engine
from tests.support.numerics.samplers import Sampling, assert_same_bits, make_sampler, prompt_of, request, sampling
from tests.support.numerics.slow_pages import slow_pages
from workers.contract.capacity import BLOCK_TOKENS
from workers.contract.messages import AdamParams, ErrorCode, SampleResult
from workers.host.free_memory import MemoryShare
from workers.sampling.kv_cache import PAGE_TOKENS, block_bytes
from workers.sampling.sampler import Sampler, SamplerLimits

pytestmark = pytest.mark.slow


def assert_all_free(s: Sampling) -> None:
    pool = s.sampler.blocks
    assert (pool.num_in_use, pool.num_reserved) == (0, 0)
    assert pool.num_available == pool.num_blocks


def test_prompt_of_many_samples_is_computed_once(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(qwen3, prefill_tokens_max=512)
    rows = s.count_rows(monkeypatch)
    wanted = request("r", length=500, num_samples=64, max_tokens=4)
    (result,) = s.run(wanted)
    assert rows == [500, 64, 64, 64]
    assert (result.num_prompt_tokens, result.num_cached_tokens, result.num_sampled_tokens) == (500, 0, 256)
    pool = s.sampler.blocks
    # private: cached and used blocks together are counted nowhere else
    assert pool.num_blocks - len(pool._free) == 500 // BLOCK_TOKENS, "whole blocks of the prompt stay cached, once"


def test_many_prompts_are_computed_in_one_step_over_pages(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, and a quarter as many tokens while others decode."""
    s = sampling(qwen3)
    s.sampler = make_sampler(s.driver, 4000, page_kernel=slow_pages)
    rows = s.count_rows(monkeypatch)
    for number in range(9):
        s.sampler.start_sample(request(str(number), prompt=prompt_of(500, seed=number), max_tokens=3))
    s.step()
    s.step()
    assert rows == [8 * 500 + PAGE_TOKENS, 500 - PAGE_TOKENS + 8], "up to whole pages, and eight decode"


def test_samples_share_their_prompts_memory(qwen3: Path) -> None:
    s = sampling(qwen3, num_blocks=(8 + 64) * 4 // 3)  # one scope has three quarters
    s.sampler.start_sample(request("r", length=500, num_samples=64, max_tokens=4))
    s.step()
    s.step()
    assert s.sampler.blocks.num_in_use == 8 + 64


def test_second_prompt_with_the_same_beginning_computes_only_the_rest(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = sampling(model_directory)
    s.publish("a")
    first = request("first", "a/v", length=200, max_tokens=3)
    longer = request("longer", "a/v", prompt=np.concatenate([prompt_of(200)[:150], prompt_of(30, seed=1)]))
    others = [replace(longer, op_id="base", version=request("base").version), replace(longer, op_id="again")]
    fresh = Sampling(s.driver, make_sampler(s.driver))
    solo = [fresh.sequences(one)[0] for one in (longer, others[0])]
    rows = s.count_rows(monkeypatch)
    computed = {}
    for one in (first, longer, *others):
        rows.clear()
        result = s.run(one)[0]
        computed[one.op_id] = (rows[0], result.num_cached_tokens)
        assert result.num_prompt_tokens == len(one.prompt)
    # A hybrid goes on where a state was kept: at the last whole block of a prompt with this beginning.
    num_found = 0 if s.driver.engine.base_model.delta_layers else 128
    second = (180 - num_found, num_found)
    assert computed == {"first": (200, 0), "longer": second, "base": (180, 0), "again": (52, 128)}
    for op_id, bits in (("longer", solo[0]), ("again", solo[0]), ("base", solo[1])):
        assert_same_bits(s.result(op_id).sequences, bits)
    assert_all_free(s)


def test_fully_cached_prompt_still_computes_its_last_token(each_kind: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(each_kind)
    (first,) = s.sequences(request("first", length=128))
    rows = s.count_rows(monkeypatch)
    (result,) = s.run(request("again", length=128))
    assert result.num_cached_tokens == 64
    assert rows[0] == 64
    assert_same_bits(result.sequences, first)


def test_positions_whose_logprobs_are_wanted_are_computed_again(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(qwen3)
    (whole,) = s.run(request("whole", length=200, prompt_logprobs=True))
    rows = s.count_rows(monkeypatch)
    (last,) = s.run(request("last", length=200, prompt_logprobs=True, prompt_logprobs_last_n=70))
    assert (rows[0], last.num_cached_tokens) == (72, 128)
    assert whole.prompt_logprobs is not None
    assert last.prompt_logprobs is not None
    assert last.prompt_logprobs[130:].tobytes() == whole.prompt_logprobs[130:].tobytes()
    assert np.isnan(last.prompt_logprobs[:130]).all()
    rows.clear()
    (all_,) = s.run(request("all", length=200, prompt_logprobs=True))
    assert (rows[0], all_.num_cached_tokens) == (200, 0)


def test_scopes_do_not_share_cached_prompts(each_kind: Path) -> None:
    s = sampling(each_kind)
    wanted = [request(scope + number, length=200, scope=scope) for number in "12" for scope in ("a", "b")]
    results = [s.run(one)[0] for one in wanted]
    assert [result.num_cached_tokens for result in results] == [0, 0, 192, 192]
    at_once = s.run(*(request(f"{scope}3", length=150, seed=9, scope=scope) for scope in ("a", "b")))
    assert [result.num_cached_tokens for result in at_once] == [0, 0]
    for result in results[1:]:
        assert_same_bits(result.sequences, results[0].sequences)
    assert_all_free(s)


def test_same_prompt_of_concurrent_requests_is_computed_once(each_kind: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(each_kind)
    (solo,) = s.sequences(request("solo", length=150, seed=3))
    s = sampling(each_kind)
    rows = s.count_rows(monkeypatch)
    results = s.run(*(request(str(seed), length=150, seed=seed, max_tokens=2) for seed in range(5)))
    assert [result.num_cached_tokens for result in results] == [0, 128, 128, 128, 128]
    assert sum(rows) == 150 + 4 * 22 + 5
    assert results[3].sequences[0].tokens.tolist() == solo[0].tokens.tolist()[:2]


def test_long_prompt_is_computed_in_parts_and_does_not_stall_decoding(
    each_kind: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = request("long", length=400, max_tokens=2)
    (solo,) = sampling(each_kind).sequences(long)
    s = sampling(each_kind, prefill_tokens_max=256)
    s.sampler.start_sample(request("short", max_tokens=20))
    s.step()
    rows = s.count_rows(monkeypatch)
    s.sampler.start_sample(long)
    s.run()
    assert rows[:7] == [1 + 64] * 6 + [1 + 16]
    assert_same_bits(s.result("long").sequences, solo)


def test_prompts_take_turns_block_by_block(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(qwen3, prefill_tokens_max=128)
    s.sampler.start_sample(request("long", length=400, max_tokens=1))
    s.step()
    s.sampler.start_sample(request("short", prompt=prompt_of(20, seed=1), max_tokens=1))
    s.step()
    assert s.result("short").error is None
    assert s.sampler.can_decode()


def test_many_long_prompts_of_one_adapter_do_not_delay_anothers(qwen3: Path) -> None:
    s = sampling(qwen3, prefill_tokens_max=128)
    s.publish("a", "b")
    for number in range(10):
        s.sampler.start_sample(request(f"busy{number}", "a/v", prompt=prompt_of(300, seed=number), max_tokens=1))
    s.step()
    s.sampler.start_sample(request("small", "b/v", length=150, max_tokens=1))
    for _ in range(4):
        s.step()
    assert s.result("small").error is None


def test_request_that_can_never_fit_is_refused_at_once_with_the_largest_that_fits(qwen3: Path) -> None:
    s = sampling(qwen3, num_blocks=3)
    for refused in (request("tokens", length=70, max_tokens=66), request("prompt", length=193)):
        (result,) = s.run(refused)
        assert code(result) == ErrorCode.INVALID_ARGUMENT
    error = s.result("tokens").error
    assert error is not None
    assert "at most 192 tokens" in error.message
    assert "max_tokens may be at most 65" in error.message
    (most,) = s.run(request("most", length=70, max_tokens=65, num_samples=3))
    assert [len(sequence.tokens) for sequence in most.sequences] == [65, 65, 65]
    assert_all_free(s)


def test_request_that_does_not_fit_waits_and_gets_the_same_bits(each_kind: Path) -> None:
    """Samples of the first request need a second block while others wait."""
    wanted = [
        request(f"r{number}", length=100 + number, num_samples=5, max_tokens=10 if number else BLOCK_TOKENS + 6)
        for number in range(3)
    ]
    solo = [sampling(each_kind).sequences(one)[0] for one in wanted]
    s = sampling(each_kind, num_blocks=9)
    for bits, crowded in zip(solo, s.sequences(*wanted), strict=True):
        assert_same_bits(bits, crowded)
    assert_all_free(s)


def test_many_requests_of_one_adapter_do_not_delay_anothers(qwen3: Path) -> None:
    s = sampling(qwen3, num_sequences_max=2)
    s.publish("a", "b")
    for number in range(6):
        s.sampler.start_sample(request(f"busy{number}", "a/v", max_tokens=5))
    s.step()
    s.sampler.start_sample(request("small", "b/v", max_tokens=5))
    s.run()
    ended = [event.op_id for event in s.events if isinstance(event, SampleResult)]
    assert ended.index("small") <= 3
    assert [op_id for op_id in ended if op_id != "small"] == [f"busy{number}" for number in range(6)]


def test_request_that_does_not_fit_is_passed_over_by_a_bounded_number_of_others(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.sampling.slot_queue.PATIENCE", 3)  # 64 others would only take longer
    s = sampling(qwen3, num_blocks=4)
    s.sampler.start_sample(request("first", length=5, max_tokens=4, scope="0"))
    s.step()
    s.sampler.start_sample(request("large", length=130, max_tokens=60))
    for number in range(1, 10):  # two scopes that always have a sample in a slot leave too little memory for the large
        s.sampler.start_sample(request(f"small{number}", length=5, max_tokens=4, scope=str(number % 2)))
        s.step()
        s.step()
    s.run()
    ended = [event.op_id for event in s.events if isinstance(event, SampleResult)]
    assert ended.index("large") <= 4


@pytest.mark.parametrize(("num_rows", "num_blocks", "most"), [(128, 400, 96), (128, 40, 14), (8, 400, 6)])
def test_request_of_many_samples_leaves_slots_for_a_new_scope_at_the_next_step(
    qwen3: Path, num_rows: int, num_blocks: int, most: int
) -> None:
    s = sampling(qwen3, num_sequences_max=num_rows, num_blocks=num_blocks)
    s.sampler.start_sample(request("busy", num_samples=1024, max_tokens=100, scope="busy"))
    s.sampler.start_sample(request("more", num_samples=1024, max_tokens=100, scope="busy"))
    s.step()
    (busy,) = s.sampler.slots.running
    for number in range(70):  # a scope at its share is not passed over, or it would get the next slot after 64 times
        s.sampler.start_sample(request(f"late{number}", max_tokens=1, scope="late"))
        s.step()
        assert s.result(f"late{number}").error is None
        assert [len(sequence.tokens) for sequence in busy.sequences] == [number + 2] * most
    s.sampler.cancel_sample("more")
    s.sampler.cancel_sample("busy")
    s.step()
    assert_all_free(s)


def test_requests_of_one_scope_share_its_limit_and_their_common_prompt(qwen3: Path) -> None:
    s = sampling(qwen3, num_blocks=40)
    s.run(request("first", length=450, scope="busy"))
    for number in range(30):
        s.sampler.start_sample(request(str(number), length=450, max_tokens=60, scope="busy"))
    s.step()
    assert len(s.sampler.slots.running) == 11, "7 blocks of the prompt are common, and two are each one's own"
    assert s.sampler.blocks.num_in_use <= 30


def test_solo_request_of_many_samples_runs_them_all_at_once(each_kind: Path) -> None:
    s = sampling(each_kind)
    s.sampler.start_sample(request("solo", num_samples=64))
    s.step()
    (solo,) = s.sampler.slots.running
    assert len(solo.sequences) == 64


def test_single_sequence_may_have_all_memory_and_two_of_them_run_one_by_one(qwen3: Path) -> None:
    s = sampling(qwen3, num_blocks=4)
    s.sampler.start_sample(request("large", length=130, num_samples=2, max_tokens=60))
    s.step()
    (large,) = s.sampler.slots.running
    assert len(large.sequences) == 1
    s.run()
    assert [len(sequence.tokens) for sequence in s.result("large").sequences] == [60, 60]
    assert_all_free(s)


@pytest.mark.parametrize("way", ["cancel", "fail", "reset"])
def test_memory_is_free_after_every_kind_of_end(each_kind: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    s = sampling(each_kind, prefill_tokens_max=256)
    s.sampler.start_sample(request("decoding", length=100, num_samples=3, max_tokens=100))
    s.step()
    s.sampler.start_sample(request("prefilling", length=400, num_samples=2, max_tokens=100))
    s.sampler.start_sample(request("behind", prompt=prompt_of(300, seed=5), max_tokens=10))
    s.step()
    pool = s.sampler.blocks
    assert pool.num_in_use > 0
    if way == "cancel":
        for op_id in ("decoding", "prefilling", "behind"):
            s.sampler.cancel_sample(op_id)
    elif way == "reset":
        s.sampler.reset()
        assert pool.num_idle == 0
    else:

        def failing(*_values: Any) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(s.driver.engine.base_model, "forward", failing)  # no request makes every pass fail
        s.run()
    assert_all_free(s)
    s.sampler.decode_step()  # returns the last events
    assert not s.sampler.can_decode()


def test_least_recently_used_prompt_is_evicted_first(qwen3: Path) -> None:
    s = sampling(qwen3, num_blocks=7)

    def num_cached(seed: int) -> int:
        return s.run(request(f"{len(s.events)}", prompt=prompt_of(129, seed), max_tokens=1))[0].num_cached_tokens

    assert [num_cached(seed) for seed in (0, 1, 0)] == [0, 0, 128]
    assert [num_cached(seed) for seed in (2, 3)] == [0, 0], "each prompt has two whole blocks, and runs in three"
    assert [num_cached(seed) for seed in (0, 1)] == [128, 0]


def test_version_published_again_finds_no_cached_prompt(each_kind: Path) -> None:
    s = sampling(each_kind)
    s.publish("a")
    (before,) = s.sequences(request("before", "a/v", length=200))
    s.driver.train(s.driver.backward("a", make_data("cross_entropy", [9])))
    s.driver.train(s.driver.step("a", AdamParams(learning_rate=0.05)))
    s.driver.train(s.driver.save("a", publish_as="a/v"))
    (after,) = s.run(request("after", "a/v", length=200))
    (solo,) = Sampling(s.driver, make_sampler(s.driver)).sequences(request("solo", "a/v", length=200))
    assert after.num_cached_tokens == 0
    assert_same_bits(after.sequences, solo)
    assert after.sequences[0].logprobs.tolist() != before[0].logprobs.tolist()
    s.driver.engine.bank.remove("a/v")
    s.run(request("other"))
    assert s.sampler.blocks.num_idle == 0


def test_training_leaves_memory_that_samples_have_not_taken_yet(qwen3: Path) -> None:
    free, block = 8 << 20, block_bytes(Driver(qwen3).engine.base_model)

    def fitting_tokens(free_bytes: int, num_blocks: int) -> int | None:
        engine = make_engine(qwen3, cache_bytes_max=num_blocks * block, free_bytes=lambda _: free_bytes)
        assert engine.info.num_cache_blocks == num_blocks
        return engine.info.fitting_tokens

    few = fitting_tokens(free, num_blocks=1)
    assert few is not None
    assert fitting_tokens(free + 9 * block, num_blocks=1) != few
    assert fitting_tokens(free + 9 * block, num_blocks=10) == few


def test_blocks_are_promised_until_they_are_used(qwen3: Path) -> None:
    driver = Driver(qwen3)
    model = driver.engine.base_model
    block = block_bytes(model)
    memory = MemoryShare(model.device, measure=lambda _: 100 * block)
    s = Sampling(driver, Sampler(model, driver.engine.bank, SamplerLimits(cache_bytes_max=10 * block), memory))
    assert memory.free_bytes() == 90 * block
    for _ in range(3):
        s.run(request(f"{len(s.events)}", length=70, max_tokens=10))
    assert memory.free_bytes() == 93 * block


def test_cache_takes_its_share_of_the_free_memory(qwen3: Path) -> None:
    block = block_bytes(Driver(qwen3).engine.base_model)

    def num_blocks(**settings: Any) -> int | None:
        return make_engine(qwen3, free_bytes=lambda _: 4000 * block, **settings).info.num_cache_blocks

    assert num_blocks(cache_bytes_max=None) == 1000
    assert num_blocks(cache_bytes_max=None, cache_share=0.5) == 2000
    assert num_blocks(cache_bytes_max=30 * block, cache_share=0.5) == 30


def test_cache_takes_at_most_a_quarter_of_the_free_memory(qwen3: Path) -> None:
    driver = Driver(qwen3)
    model = driver.engine.base_model
    memory = MemoryShare(model.device, measure=lambda _: 40 * block_bytes(model))
    sampler = Sampler(model, driver.engine.bank, SamplerLimits(cache_bytes_max=1 << 30), memory)
    assert sampler.num_cache_blocks == 10


def test_a_request_that_runs_out_of_memory_gets_that_of_other_adapters(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patched: a forward on a CPU does not run out of memory."""
    s = sampling(qwen3)
    bank = s.driver.engine.bank
    bank.limit(1 << 30)
    s.publish("a", "b")
    (alone,) = s.sequences(request("alone", "a/v"))
    assert bank.num_resident > 1
    model = s.driver.engine.base_model
    forward, most = model.forward, bank.device_bytes

    def short_of_memory(*args: Any, **options: Any) -> torch.Tensor:
        if bank.device_bytes == most:
            raise torch.OutOfMemoryError
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", short_of_memory)
    (again,) = s.sequences(request("again", "a/v"))
    assert_same_bits(again, alone)
    assert [key for key in ("a", "b", "a/v", "b/v") if bank.entry(key).row is not None] == ["a/v"]


def test_overflow_left_in_a_block_changes_no_later_sample(each_kind: Path) -> None:
    s = sampling(each_kind, num_blocks=12)
    s.publish("overflowed")
    (solo,) = s.sequences(request("solo", length=70, max_tokens=70, num_samples=2))
    s.driver.engine.bank.acquire(["overflowed/v"])[0].weights.fill_(float("nan"))
    (overflowed,) = s.run(request("overflowed", "overflowed/v", length=150, max_tokens=60))
    assert code(overflowed) == ErrorCode.NON_FINITE
    model = s.driver.engine.base_model  # private: every block and state, also those that nobody used
    memories = [memory for layer in range(model.num_attention_layers) for memory in s.sampler._cache.layer(layer)]
    if (states := s.sampler._pass._states) is not None:
        memories += [states._inputs, states._states]
    for memory in memories:
        memory.fill_(float("nan"))
    s.sampler.blocks.drop_all()
    (after,) = s.sequences(request("after", length=70, max_tokens=70, num_samples=2))
    assert_same_bits(after, solo)

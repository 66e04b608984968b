"""Shares of steps: a scope with many sequences or long prompts does not slow another, and no bit depends on that."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import workers.engine
from tests.support.numerics.harness import make_engine
from tests.support.numerics.samplers import Sampling, assert_same_bits, make_sampler, request, sampling
from workers.contract.messages import SampleResult, TokenEvent
from workers.sampling.delta_states import OWNER_PLACES
from workers.selftest.step_costs import NUM_SEQUENCES, sequences_of_fixed_time

NUM_MORE = 3.5
"""With a neighbour of one slot: four rows a step."""


@pytest.fixture
def bounded(each_kind: Path) -> Sampling:
    s = sampling(each_kind)
    s.sampler.bound_scopes(NUM_MORE)
    return s


def drawn_in_a_step(s: Sampling) -> Counter[tuple[str, int]]:
    """Run a step; return how many tokens it streamed, by request and sequence."""
    begin = len(s.events)
    s.step()
    return Counter((each.op_id, each.sequence_index) for each in s.events[begin:] if isinstance(each, TokenEvent))


def test_of_a_scope_beside_a_smaller_one_a_step_takes_its_share_of_sequences_in_turn(bounded: Sampling) -> None:
    wanted = [
        request("five", scope="many", length=5, num_samples=5, max_tokens=30, stream=True),
        request("three", scope="many", length=9, num_samples=3, max_tokens=30, stream=True),
    ]
    for one in wanted:
        bounded.sampler.start_sample(one)
    for _ in range(2):
        bounded.step()
    alone = drawn_in_a_step(bounded)
    many = {(one.op_id, index) for one in wanted for index in range(one.num_samples)}
    assert alone == dict.fromkeys(many, 1), "a scope alone is not bounded"
    bounded.sampler.start_sample(request("one", scope="few", max_tokens=9, stream=True))
    assert len(drawn_in_a_step(bounded)) == 8 + 1, "the other scope's prompt has more rows than the eight sequences"
    for _ in range(2):
        assert len(drawn_in_a_step(bounded)) == 4 + 1
    for _ in range(3):
        first, second = drawn_in_a_step(bounded), drawn_in_a_step(bounded)
        assert first.total() == second.total() == 4 + 1
        assert first + second == dict.fromkeys(many, 1) | {("one", 0): 2}
    bounded.step()
    assert bounded.result("one").error is None
    assert drawn_in_a_step(bounded) == dict.fromkeys(many, 1), "alone again"


def test_prompts_count_for_the_share_and_the_other_scope_draws_in_each_step(
    bounded: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded.sampler.start_sample(request("few", scope="few", max_tokens=120, stream=True))
    bounded.step()
    counts = bounded.count_rows(monkeypatch)
    for number in range(4):
        bounded.sampler.start_sample(request(f"{number}", scope="many", length=130 + number, max_tokens=4))
    num_steps = 40
    for _ in range(num_steps):
        assert drawn_in_a_step(bounded)["few", 0] == 1
    share, at_once = 1 + NUM_MORE, 2 * bounded.sampler.blocks.block_tokens
    assert share * num_steps <= sum(counts) - num_steps < share * num_steps + at_once < 4 * 130
    bounded.run()
    assert [bounded.result(f"{number}").error for number in range(4)] == [None] * 4


def test_a_scope_with_few_sequences_and_long_prompts_is_the_larger_one(bounded: Sampling) -> None:
    bounded.sampler.start_sample(request("many", scope="many", num_samples=9, max_tokens=60, stream=True))
    bounded.step()
    for number in range(3):
        bounded.sampler.start_sample(request(f"{number}", scope="long", length=200, max_tokens=1))
    for _ in range(20):
        assert len([key for key in drawn_in_a_step(bounded) if key[0] == "many"]) == 9


def test_the_rows_that_a_scope_had_in_advance_are_paid_for_while_it_is_away(bounded: Sampling) -> None:
    bounded.sampler.start_sample(request("few", scope="few", max_tokens=300, stream=True))
    bounded.step()
    num_steps = 0
    for number in range(4):
        bounded.sampler.start_sample(request(f"{number}", scope="many", length=60, num_samples=2, max_tokens=1))
        while not any(isinstance(each, SampleResult) and each.op_id == f"{number}" for each in bounded.events):
            bounded.step()
            num_steps += 1
        bounded.step()  # without it
        num_steps += 1
    assert num_steps >= 3 * 60 / (1 + NUM_MORE)


def test_scopes_with_as_many_slots_each_are_not_bounded(bounded: Sampling) -> None:
    for scope in ("a", "b"):
        bounded.sampler.start_sample(request(scope, scope=scope, num_samples=8, max_tokens=5, stream=True))
    bounded.step()
    assert len(drawn_in_a_step(bounded)) == 16


def test_sequences_that_waited_have_the_same_bits(bounded: Sampling) -> None:
    bounded.publish("a", "b")
    wanted = [
        request("many", "a/v", length=70, num_samples=7, seed=1, top_p=0.9, topk_sample_logprobs=2, scope="many"),
        request("more", "b/v", length=130, num_samples=4, seed=2, prompt_logprobs=True, scope="many"),
        request("rest", length=3, num_samples=6, seed=3, scope="many"),
        request("few", "a/v", length=9, seed=4, max_tokens=60, scope="few"),
    ]
    solo = [bounded.sequences(one)[0] for one in wanted]
    for bits, shared in zip(solo, bounded.sequences(*wanted), strict=True):
        assert_same_bits(bits, shared)


def test_a_request_cancelled_while_its_sequences_wait_frees_their_memory(bounded: Sampling) -> None:
    kept = request("kept", scope="few", max_tokens=20)
    (solo,) = bounded.sequences(kept)
    bounded.sampler.start_sample(kept)
    bounded.sampler.start_sample(request("gone", scope="many", length=9, num_samples=9, max_tokens=20))
    for _ in range(6):
        bounded.step()
    bounded.sampler.cancel_sample("gone")
    bounded.run()
    assert_same_bits(bounded.result("kept").sequences, solo)
    assert (bounded.sampler.num_cache_blocks_used, bounded.sampler.blocks.num_reserved) == (0, 0)


class _Clock:
    """Time that passes in forwards alone: so much for each, and so much for each row."""

    def __init__(self, s: Sampling, monkeypatch: pytest.MonkeyPatch, forward_s: float, row_s: float) -> None:
        self._now_s = 0.0
        model = s.driver.engine.base_model
        forward = model.forward

        def timed(tokens: torch.Tensor, *others: Any) -> torch.Tensor:
            self._now_s += forward_s + row_s * len(tokens)
            return forward(tokens, *others)

        monkeypatch.setattr(model, "forward", timed)

    def __call__(self) -> float:
        return self._now_s


@pytest.mark.parametrize(("row_s", "expected"), [(0.25, 8.0), (4.0, 0.5), (0.0, math.inf)])
def test_the_trial_finds_how_many_sequences_take_the_fixed_time(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, row_s: float, expected: float
) -> None:
    s = sampling(qwen3)
    clock = _Clock(s, monkeypatch, 2.0, row_s)
    assert sequences_of_fixed_time(s.sampler, nullcontext, clock) == pytest.approx(expected)
    assert (s.sampler.can_decode(), s.sampler.num_cache_blocks_used) == (False, 0)


def test_of_a_trial_whose_steps_fail_no_scope_is_bounded(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s = sampling(qwen3)
    model = s.driver.engine.base_model
    forward, num_forwards = model.forward, 0

    def fail_behind_the_prompt(*args: Any) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 2:
            raise MemoryError
        return forward(*args)

    monkeypatch.setattr(model, "forward", fail_behind_the_prompt)
    assert sequences_of_fixed_time(s.sampler, nullcontext) == math.inf
    assert not s.sampler.can_decode()


def test_of_a_trial_of_a_hybrid_in_several_waves_no_scope_is_bounded(model_directories: dict[str, Path]) -> None:
    s = sampling(model_directories["qwen3.5"])
    s.sampler.states.num_slots = 2 * OWNER_PLACES * (NUM_SEQUENCES // 2)
    assert sequences_of_fixed_time(s.sampler, nullcontext) == math.inf


def test_without_room_for_the_trial_no_scope_is_bounded(qwen3: Path) -> None:
    s = sampling(qwen3)
    for sampler in (
        make_sampler(s.driver, 2 * NUM_SEQUENCES - 1),
        make_sampler(s.driver, num_sequences_max=NUM_SEQUENCES - 1),
    ):
        assert sequences_of_fixed_time(sampler, nullcontext) == math.inf


def test_an_engine_on_a_cpu_bounds_scopes_by_its_trial(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patches the trial, whose times are the machine's."""
    monkeypatch.setattr(workers.engine, "sequences_of_fixed_time", lambda *_: 2.0)
    engine = make_engine(qwen3, cache_bytes_max=1 << 30)
    engine.start_sample(request("many", scope="many", num_samples=9, max_tokens=40, stream=True))
    engine.start_sample(request("few", scope="few", max_tokens=40, stream=True))
    for _ in range(20):
        engine.decode_step()
    drawn = Counter(event.op_id for event in engine.decode_step())
    assert drawn == {"many": 3, "few": 1}

"""Samples of hybrids: states that go on, fork, are kept for prompts that begin alike, and survive a failed pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.numerics.samplers import (
    Sampling,
    assert_same_bits,
    make_sampler,
    prompt_of,
    request,
    sampling,
)
from workers.contract.messages import ErrorCode
from workers.sampling.sampler import Sampler


@pytest.fixture
def hybrid(model_directories: dict[str, Path]) -> Path:
    return model_directories["qwen3.5"]


def assert_no_places(sampler: Sampler) -> None:
    states = sampler.states
    assert states.num_places == 0
    assert len(states._free) + len(states._prefix_of) == states.num_slots


def test_a_prompt_goes_on_from_the_last_block_of_one_that_begins_alike(hybrid: Path) -> None:
    """And a second turn, from where the first one's prompt ended."""
    s = sampling(hybrid)
    s.publish("a")
    first = request("first", "a/v", prompt=prompt_of(200), max_tokens=3)
    again = replace(first, op_id="again")
    turn = request("turn", "a/v", prompt=np.concatenate([prompt_of(200), prompt_of(90, seed=3)]), max_tokens=3)
    fresh = Sampling(s.driver, make_sampler(s.driver))
    (solo,), (of_turn,) = fresh.sequences(first), Sampling(s.driver, make_sampler(s.driver)).sequences(turn)
    found = {}
    for one in (first, again, turn):
        result = s.run(one)[0]
        found[one.op_id] = result.num_cached_tokens
    assert found == {"first": 0, "again": 192, "turn": 192}
    assert_same_bits(s.result("again").sequences, solo)
    assert_same_bits(s.result("turn").sequences, of_turn)
    assert_no_places(s.sampler)


def test_a_long_prompt_leaves_a_state_at_every_eighth_block_and_at_its_last(hybrid: Path) -> None:
    s = sampling(hybrid, prefill_tokens_max=128)
    long, other = prompt_of(509), prompt_of(509, seed=1)
    s.run(request("long", prompt=np.concatenate([long[:500], other[500:]]), max_tokens=1))
    assert len(s.sampler.states._prefix_of) == 1, "those at the ends of its parts have left"
    assert (
        s.run(request("again", prompt=np.concatenate([long[:500], other[500:]]), max_tokens=1))[0].num_cached_tokens
        == 448
    )
    assert (
        s.run(request("half", prompt=np.concatenate([long[:448], other[448:500]]), max_tokens=1))[0].num_cached_tokens
        == 448
    )


def test_a_prompt_that_waits_for_the_same_blocks_follows_the_one_that_computes_them(hybrid: Path) -> None:
    s = sampling(hybrid, prefill_tokens_max=64)
    wanted = [request(str(number), prompt=prompt_of(300), max_tokens=2, seed=number) for number in range(3)]
    solo = [Sampling(s.driver, make_sampler(s.driver)).sequences(one)[0] for one in wanted]
    results = s.run(*wanted)
    assert sum(result.num_cached_tokens for result in results) == 2 * 256, "they compute the blocks in turn"
    for result, bits in zip(results, solo, strict=True):
        assert_same_bits(result.sequences, bits)
    assert_no_places(s.sampler)


def test_a_pass_that_failed_after_it_wrote_states_runs_again_with_the_same_bits(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts run again from the states before it, by halves; a state that was moved on twice would differ."""
    s = sampling(hybrid)
    wanted = [
        request("long", prompt=prompt_of(200), max_tokens=12, num_samples=2),
        request("short", prompt=prompt_of(9), max_tokens=12, num_samples=3, seed=4),
    ]
    solo = [Sampling(s.driver, make_sampler(s.driver)).sequences(one)[0] for one in wanted]
    model = s.driver.engine.base_model
    unembed, calls = model.unembed, [0]

    def failing(*arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] % 3 == 1:
            raise RuntimeError("a kernel failed")
        return unembed(*arguments)

    monkeypatch.setattr(model, "unembed", failing)
    results = s.run(*wanted)
    monkeypatch.undo()
    for result, bits in zip(results, solo, strict=True):
        if result.error is None:
            assert_same_bits(result.sequences, bits)
        else:
            assert result.error.code is ErrorCode.INTERNAL
    assert any(result.error is None for result in results)
    assert_no_places(s.sampler)


def test_states_take_half_of_the_memory_and_bound_the_sequences(hybrid: Path) -> None:
    s = sampling(hybrid, num_blocks=8)
    states = s.sampler.states
    assert s.sampler.num_sequence_slots == states.num_slots // 2 - 1 < 128
    assert s.sampler.num_cache_blocks <= 5
    wanted = [request(str(number), length=20, max_tokens=5, seed=number) for number in range(12)]
    solo = Sampling(s.driver, make_sampler(s.driver)).sequences(*wanted)
    for bits, result in zip(solo, s.run(*wanted), strict=True):
        assert_same_bits(result.sequences, bits)
    assert_no_places(s.sampler)


def test_checkpoints_give_way_to_samples(hybrid: Path) -> None:
    s = sampling(hybrid, num_blocks=64, num_sequences_max=2)
    states = s.sampler.states
    for number in range(states.num_slots + 3):
        s.run(request(f"p{number}", prompt=prompt_of(70, seed=number), max_tokens=1))
    assert len(states._prefix_of) <= states.num_slots
    (bits,) = s.sequences(request("after", length=70, max_tokens=4, num_samples=2))
    assert_same_bits(
        Sampling(s.driver, make_sampler(s.driver)).sequences(request("after", length=70, max_tokens=4, num_samples=2))[
            0
        ],
        bits,
    )
    assert_no_places(s.sampler)


def test_a_checkpoint_leaves_with_its_block(hybrid: Path) -> None:
    """When the block's memory is needed, and when its version is gone."""
    s = sampling(hybrid, num_blocks=12)
    pool, states = s.sampler.blocks, s.sampler.states
    for number in range(2 * pool.num_blocks):
        s.run(request(f"p{number}", prompt=prompt_of(70, seed=number), max_tokens=1))
        assert len(states._prefix_of) <= pool.num_idle
    assert pool.num_evictions > 0
    pool.drop_all()
    assert not states._prefix_of

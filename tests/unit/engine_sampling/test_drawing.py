"""Tokens from logits: the distribution, the filters against a naive twin, and the random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.numerics.random_numbers import uniform
from workers.contract.messages import SamplingParams
from workers.sampling.drawing import (
    BLOCK_VALUES,
    Distribution,
    _all_weights,
    draw,
    draw_rows,
    likeliest,
    top_k,
    top_p,
    uniforms,
)

INT64_SEEDS = (-(2**63), -(2**62), -2, -1, 0, 1, 2**62, 2**63 - 1)
LOGITS = np.array([0.5, -1.0, 2.0, 2.0, -3.0, 1.0, 0.0, 1.5], np.float32)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)


def test_random_numbers_differ_by_seed_sample_and_position_and_are_uniform() -> None:
    numbers = [uniform(seed, sample, position) for seed in range(10) for sample in range(10) for position in range(10)]
    assert len(set(numbers)) == 1000
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert ((counts - 100.0) ** 2 / 100).sum() < 27.9  # chi square, 9 degrees of freedom, 1 in 1000


def test_every_int64_seed_has_its_own_random_numbers() -> None:
    """Conversion through floating point would give all negative seeds the same numbers."""
    keys = [(seed, index, position) for seed in INT64_SEEDS for index in range(3) for position in range(5)]
    numbers = [uniform(*key) for key in keys]
    assert len(set(numbers)) == len(keys)
    assert all(0 <= number < 1 for number in numbers)


def test_random_numbers_never_change() -> None:
    """A sample that is run again from its logged seed must have the same tokens, also after an upgrade."""
    numbers = [uniform(7, 3, position) for position in range(3)]
    assert numbers == [0.4821286018761155, 0.6807485287933278, 0.5862841579788101]
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)


def test_greedy_takes_the_lowest_of_the_largest() -> None:
    assert draw(LOGITS, params(temperature=0.0), 0.9) == 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    expected = np.exp(LOGITS.astype(np.float64) / temperature)
    expected /= expected.sum()
    num_draws = 20_000
    drawn = [draw(LOGITS, params(temperature=temperature), uniform(3, 0, position)) for position in range(num_draws)]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    chi_square = ((counts - num_draws * expected) ** 2 / (num_draws * expected)).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, 1 in 1000


def naive_kept(weights: NDArray[np.float64], k: int, p: float) -> list[int]:
    order = sorted(range(len(weights)), key=lambda index: (-weights[index], index))
    if k > 0:
        order = order[:k]
    total, kept, mass = sum(weights[index] for index in order), [], 0.0
    for index in order:
        kept.append(index)
        mass += weights[index]
        if mass >= p * total and p < 1:
            break
    return sorted(kept)


@given(
    logits=st.lists(st.sampled_from([-30.0, -2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=40),
    k=st.integers(-1, 12),
    p=st.sampled_from([0.05, 0.3, 0.65, 0.92, 0.9999, 1.0]),
    number=st.floats(0, 1, exclude_max=True),
)
def test_filters_keep_the_tokens_of_a_naive_implementation(
    logits: list[float], k: int, p: float, number: float
) -> None:
    array = np.array(logits, np.float32)
    weights = np.exp(array.astype(np.float64) - array.max())
    kept = naive_kept(weights, k, p)
    cumulative = np.cumsum(weights[kept])
    picked = next(
        (token for token, mass in zip(kept, cumulative, strict=True) if number * cumulative[-1] < mass), kept[-1]
    )
    assert draw(array, params(top_k=k if k > 0 else -1, top_p=p), number) == picked


def test_top_k_and_top_p_take_the_lowest_ids_among_equals() -> None:
    weights = np.array([1.0, 2.0, 2.0, 2.0, 1.0])
    assert top_k(weights, 2).tolist() == [1, 2]
    assert top_p(weights, 0.3).tolist() == [1, 2]
    assert top_p(weights, 0.01).tolist() == [1]


def test_number_just_below_one_picks_a_kept_token() -> None:
    assert draw(LOGITS, params(top_k=3), 1 - 2.0**-53) == 7


@given(
    seed=st.integers(0, 1000),
    vocab_size=st.sampled_from([63, 65, 1000, 4096]),
    number=st.one_of(st.floats(0, 1, exclude_max=True), st.just(1 - 2.0**-53)),
)
def test_draw_inverts_the_cumulative_distribution_and_never_picks_a_zero_weight(
    seed: int, vocab_size: int, number: float
) -> None:
    """Most tokens have weight zero: e^-800 is zero in double precision."""
    rng = np.random.default_rng(seed)
    logits = np.where(rng.random(vocab_size) < 0.9, -800.0, rng.standard_normal(vocab_size)).astype(np.float32)
    logits[rng.integers(vocab_size // 2)] = 1.0
    weights = np.exp(logits.astype(np.float64) - logits.max())
    token = draw(logits, params(), number)
    assert weights[token] > 0
    before, rounding = math.fsum(weights[:token]), 1e-12 * weights.sum()
    assert before - rounding <= number * weights.sum() <= before + weights[token] + rounding


@given(seed=st.integers(-(2**63), 2**63 - 1), stream=st.sampled_from([0, 3, 2**63 + 1]), start=st.integers(0, 200))
def test_random_numbers_are_the_same_one_by_one_and_many_at_once(seed: int, stream: int, start: int) -> None:
    together = uniforms(seed, stream, start, 70)
    assert together.tolist() == [uniform(seed, stream, position) for position in range(start, start + 70)]


def test_one_distribution_serves_many_numbers() -> None:
    distribution = Distribution(LOGITS, params(top_k=5, top_p=0.9))
    for number in np.linspace(0, 1, 50, endpoint=False):
        assert distribution.pick(float(number)) == draw(LOGITS, params(top_k=5, top_p=0.9), float(number))


def test_likeliest_come_first_and_the_lowest_of_equals() -> None:
    assert likeliest(LOGITS, 3).tolist() == [2, 3, 7]
    assert likeliest(LOGITS, 1).tolist() == [2]
    assert likeliest(LOGITS, 100).tolist() == [2, 3, 7, 5, 0, 6, 1, 4]


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}])
@pytest.mark.parametrize("vocab_size", [8, 97, 2048, BLOCK_VALUES // 3])
def test_rows_are_drawn_as_each_one_solo(changes: dict[str, Any], vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.standard_normal((7, vocab_size)).astype(np.float32)
    numbers = rng.random(7).tolist()
    solo = [draw(row, params(**changes), number) for row, number in zip(logits, numbers, strict=True)]
    assert draw_rows(logits, [params(**changes)] * 7, [[number] for number in numbers]) == solo


def test_rows_with_parameters_of_their_own_are_drawn_as_each_one_solo() -> None:
    rng = np.random.default_rng(2)
    own = [params(temperature=t, top_k=k, top_p=p) for t in (0.0, 0.7, 1.0) for k in (-1, 5) for p in (0.8, 1.0)] * 2
    logits = rng.standard_normal((len(own), 300)).astype(np.float32)
    numbers = rng.random(len(own)).tolist()
    solo = [draw(*drawing) for drawing in zip(logits, own, numbers, strict=True)]
    assert draw_rows(logits, own, [[number] for number in numbers]) == solo


def test_every_number_of_a_row_is_drawn_as_solo_and_a_row_without_one_gives_no_token() -> None:
    rng = np.random.default_rng(3)
    own = [params(temperature=t, top_k=k) for t in (0.0, 0.7) for k in (-1, 5)] * 2
    logits = rng.standard_normal((len(own), 300)).astype(np.float32)
    numbers = [rng.random(place % 4).tolist() for place in range(len(own))]
    solo = [draw(row, by, number) for row, by, of_row in zip(logits, own, numbers, strict=True) for number in of_row]
    assert draw_rows(logits, own, numbers) == solo


@pytest.mark.parametrize("vocab_size", [97, 2048])
def test_weights_of_a_row_have_the_same_bits_in_any_batch(vocab_size: int) -> None:
    logits = np.random.default_rng(1).standard_normal((9, vocab_size)).astype(np.float32)
    together = _all_weights(logits, 0.7)  # private: drawn tokens rarely show a difference of bits
    for row, weights in zip(logits, together, strict=True):
        assert _all_weights(row, 0.7).tobytes() == weights.tobytes()

"""Drawing as a device does it, here on CPU tensors, against drawing on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.contract.messages import SamplingParams
from workers.sampling import device_drawing, drawing

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.9},
]


def drawn(
    logits: np.ndarray[Any, np.dtype[np.float32]], params: list[SamplingParams], numbers: list[float]
) -> tuple[list[int], list[float]]:
    """Draw a token of each row as a device does."""
    return drawn_by(logits, params, [[number] for number in numbers])


def drawn_by(
    logits: np.ndarray[Any, np.dtype[np.float32]], params: list[SamplingParams], numbers: list[list[float]]
) -> tuple[list[int], list[float]]:
    """Draw as a device does, by any numbers of each row."""
    rows = torch.from_numpy(logits)
    tokens, logprobs, is_finite = device_drawing.draw_rows(rows, rows.log_softmax(-1), params, numbers).read()
    assert all(is_finite)
    return tokens, logprobs


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([2, 97, 2048]), levels=st.sampled_from([3, 10_000]))
def test_rows_are_drawn_as_on_a_cpu(seed: int, vocab_size: int, levels: int) -> None:
    """`levels`: of the logits. With few of them many are equal."""
    rng = np.random.default_rng(seed)
    params = [SamplingParams(max_tokens=1, **changes) for changes in SETTINGS]
    logits = (rng.integers(0, levels, (len(params), vocab_size)) * (10 / levels)).astype(np.float32)
    numbers = rng.random(len(params)).tolist()
    tokens, logprobs = drawn(logits, params, numbers)
    assert tokens == drawing.draw_rows(logits, params, [[number] for number in numbers])
    expected = torch.from_numpy(logits).log_softmax(-1)[torch.arange(len(params)), tokens]
    assert logprobs == expected.tolist()


@pytest.mark.parametrize("top_k", [1, 3])
def test_the_lowest_ids_are_kept_of_different_logits_with_equal_weights(top_k: int) -> None:
    """Logits as small as these are gone when the largest logit is subtracted."""
    logits = np.array([[1e-25, -5, 2e-25, 3e-25, 1.0, 4e-25]], np.float32)
    params = [SamplingParams(max_tokens=1, top_k=1 + top_k)]
    for number in np.linspace(0, 0.999, 40):
        assert drawn(logits, params, [number])[0] == drawing.draw_rows(logits, params, [[number]])


def test_a_row_is_drawn_as_solo_among_others() -> None:
    rng = np.random.default_rng(0)
    params = [SamplingParams(max_tokens=1, **changes) for changes in SETTINGS]
    logits, numbers = rng.normal(size=(len(params), 97)).astype(np.float32), rng.random(len(params)).tolist()
    tokens, _ = drawn(logits, params, numbers)
    for row, token in enumerate(tokens):
        assert drawn(logits[row : row + 1], params[row : row + 1], numbers[row : row + 1])[0] == [token]


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([2, 97, 2048]))
def test_first_tokens_of_a_prompt_are_drawn_as_on_a_cpu_beside_next_tokens(seed: int, vocab_size: int) -> None:
    """Many sequences begin with the row of their prompt; a request without tokens has a row and no number."""
    rng = np.random.default_rng(seed)
    params = [SamplingParams(max_tokens=1, **changes) for changes in SETTINGS]
    logits = rng.normal(size=(len(params), vocab_size)).astype(np.float32)
    numbers = [rng.random(count).tolist() for count in rng.permutation([0, 0, 1, 1, 1, 2, 3, 5, 9])]
    tokens, logprobs = drawn_by(logits, params, numbers)
    assert tokens == drawing.draw_rows(logits, params, numbers)
    rows = np.repeat(np.arange(len(params)), list(map(len, numbers)))
    assert logprobs == torch.from_numpy(logits).log_softmax(-1)[rows, tokens].tolist()


def test_every_first_token_of_a_row_is_drawn_as_solo() -> None:
    rng = np.random.default_rng(3)
    params = [SamplingParams(max_tokens=1, **changes) for changes in SETTINGS]
    logits = rng.normal(size=(len(params), 97)).astype(np.float32)
    numbers = [rng.random(1 + place % 4).tolist() for place in range(len(params))]
    solo = [
        drawn(logits[row : row + 1], params[row : row + 1], [number])[0][0]
        for row, of_row in enumerate(numbers)
        for number in of_row
    ]
    assert drawn_by(logits, params, numbers)[0] == solo


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_numbers_at_the_ends_pick_kept_tokens(number: float) -> None:
    logits = np.array([[-np.float32(200), 1, 0, -200]], np.float32).repeat(2, axis=0)
    params = [SamplingParams(max_tokens=1, temperature=0.1), SamplingParams(max_tokens=1, temperature=0.1, top_k=2)]
    tokens, _ = drawn(logits, params, [number] * 2)
    assert tokens == drawing.draw_rows(logits, params, [[number]] * 2)
    assert set(tokens) <= {1, 2}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("changes", SETTINGS)
def test_rows_that_are_not_finite_are_named(bad: float, changes: dict[str, Any]) -> None:
    logits = torch.zeros((3, 97))
    logits[1, 96] = bad
    params = [SamplingParams(max_tokens=1, **changes)] * 3
    tokens, _, is_finite = device_drawing.draw_rows(logits, logits, params, [[0.5], [0.999], [0.5]]).read()
    assert is_finite == [True, False, True]
    assert tokens[0] == tokens[2] == drawing.draw_rows(logits[:1].numpy(), params[:1], [[0.5]])[0], "others are drawn"


@pytest.mark.parametrize("numbers", [[[0.5], []], [[], []]])
def test_the_row_of_a_request_without_tokens_is_named_too(numbers: list[list[float]]) -> None:
    logits = torch.tensor([[0, 1], [0, torch.nan]])
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=0)]
    tokens, _, is_finite = device_drawing.draw_rows(logits, logits, params, numbers).read()
    assert len(tokens) == sum(map(len, numbers))
    assert is_finite == [True, False]


@given(seed=st.integers(0, 2**32 - 1), vocab_size=st.sampled_from([2, 97, 2048]), levels=st.sampled_from([3, 10_000]))
def test_the_likeliest_tokens_are_those_of_a_cpu(seed: int, vocab_size: int, levels: int) -> None:
    """`levels`: of the logits. With few of them many are equal. More rows than are found at once."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, (device_drawing.LISTED_ROWS + 3, vocab_size)) * (200 / levels)
    logits[0, : vocab_size // 2] = -np.inf
    logprobs = torch.from_numpy(logits.astype(np.float32)).log_softmax(-1)
    for k in (1, 5, vocab_size):
        found, expected = device_drawing.likeliest(logprobs, k), device_drawing.likeliest_of(logprobs, k)
        assert found.token_ids.shape == (len(logits), min(k, vocab_size))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.logprobs.tobytes() == expected.logprobs.tobytes()

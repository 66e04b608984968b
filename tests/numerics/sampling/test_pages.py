"""Attention over pages, with a slow kernel instead of the GPU's: samples are those of attention by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.numerics.cases import long
from tests.support.numerics.harness import ARCHITECTURES, RARER_ARCHITECTURES, Driver
from tests.support.numerics.samplers import Sampling, make_sampler, prompt_of, request
from tests.support.numerics.slow_pages import slow_pages
from workers.contract.capacity import BLOCK_TOKENS, num_announced_blocks, num_blocks_for, num_own_blocks
from workers.contract.messages import SampledSequence, SampleRequest
from workers.sampling.attention.pages import page_kernel_for
from workers.sampling.kv_cache import PAGE_TOKENS

slow = pytest.mark.slow


def paged(model: Path) -> tuple[Sampling, Sampling]:
    """Return samplers by blocks and by pages, with versions a/v and b/v in the bank that they share."""
    driver = Driver(model)
    by_blocks, by_pages = (
        Sampling(driver, make_sampler(driver)),
        Sampling(driver, make_sampler(driver, 400, slow_pages)),
    )
    by_blocks.publish("a", "b")
    return by_blocks, by_pages


def assert_same_samples(mine: Sequence[SampledSequence], theirs: Sequence[SampledSequence]) -> None:
    """Compare samples; log-probabilities to rounding, because two partial results are joined by pointwise operations,
    whose last values a CPU computes by other instructions."""
    for one, other in zip(mine, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def crowd(longest: int) -> list[SampleRequest]:
    """Return requests with prompts of less and more than a page, one and many samples, one of `longest` tokens."""
    return [
        request("short", "a/v", length=5, num_samples=3, max_tokens=20, seed=1),
        request("page", "b/v", length=PAGE_TOKENS, num_samples=2, max_tokens=8, seed=2, top_p=0.9),
        request("long", "", length=300, num_samples=1, max_tokens=9, seed=3, prompt_logprobs=True),
        request("grows", "a/v", length=40, num_samples=1, max_tokens=longest, seed=4, temperature=0.7),
        request("again", "b/v", prompt=np.concatenate([prompt_of(PAGE_TOKENS), prompt_of(9)]), max_tokens=5, seed=5),
    ]


GROW = {"gemma3"}
"""Has samples longer than a page in each run, which take most of the time: its layers have a window or none."""
GROWING = [
    pytest.param(name, PAGE_TOKENS + 9, marks=[] if name in GROW else pytest.mark.long)
    for name in (*ARCHITECTURES, *RARER_ARCHITECTURES)
]
SHORT = [
    pytest.param(name, BLOCK_TOKENS + 9, marks=pytest.mark.long if name == "qwen3.5-moe" else [])
    for name in ARCHITECTURES
    if name not in GROW
]


@slow
@pytest.mark.parametrize(("architecture", "longest"), [*GROWING, *SHORT])
def test_samples_by_pages_are_those_by_blocks(
    model_directories: dict[str, Path], architecture: str, longest: int
) -> None:
    by_blocks, by_pages = paged(model_directories[architecture])
    for mine, theirs in zip(by_pages.run(*crowd(longest)), by_blocks.run(*crowd(longest)), strict=True):
        assert mine.error is None
        assert_same_samples(mine.sequences, theirs.sequences)
        if mine.prompt_logprobs is not None and theirs.prompt_logprobs is not None:
            np.testing.assert_allclose(mine.prompt_logprobs, theirs.prompt_logprobs, rtol=0, atol=1e-4)


@slow
@pytest.mark.parametrize("longest", [BLOCK_TOKENS + 9, *long(PAGE_TOKENS + 9)])
def test_samples_by_pages_are_the_same_solo_and_co_batched(qwen3: Path, longest: int) -> None:
    _, by_pages = paged(qwen3)
    together = by_pages.sequences(*crowd(longest))
    for wanted, sequences in zip(crowd(longest), together, strict=True):
        assert_same_samples(by_pages.sequences(wanted)[0], sequences)


@slow
def test_prompts_share_whole_pages(qwen3: Path) -> None:
    _, by_pages = paged(qwen3)
    first, again = request("first", length=PAGE_TOKENS + 9), request("again", length=PAGE_TOKENS + 9)
    results = [by_pages.run(one)[0] for one in (first, again)]
    assert [result.num_cached_tokens for result in results] == [0, PAGE_TOKENS]
    assert_same_samples(results[0].sequences, results[1].sequences)
    pool = by_pages.sampler.blocks
    assert (pool.num_in_use, pool.num_reserved) == (0, 0)


@slow
def test_a_cpu_attends_by_blocks(qwen3: Path) -> None:
    assert page_kernel_for(Driver(qwen3).engine.base_model) is None


def test_what_fits_into_the_announced_blocks_fits_into_the_pages() -> None:
    for num_pages in range(1, 6):
        announced = num_announced_blocks(num_pages, PAGE_TOKENS)
        for prompt in range(1, 2 * PAGE_TOKENS, 7):
            for max_tokens in range(1, 3 * PAGE_TOKENS, 13):
                needed = [
                    num_blocks_for(prompt, size) + num_own_blocks(max_tokens, size)
                    for size in (BLOCK_TOKENS, PAGE_TOKENS)
                ]
                assert needed[0] > announced or needed[1] <= num_pages
    assert num_announced_blocks(7, BLOCK_TOKENS) == 7

"""The kernel of our own for attention over pages, in Triton's interpreter, against attention row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.numerics.interpreted import interpret, metered
from tests.support.numerics.random_pages import RandomPages
from tests.support.numerics.random_steps import RandomStep
from tests.support.numerics.slow_pages import slow_pages
from workers.model.sampling_layers import SplitProjections
from workers.sampling.attention import pages as attention_pages
from workers.sampling.attention.pages import PART_KEYS, PARTS_MAX, PagedAttention, triton_pages
from workers.sampling.kv_cache import PAGE_TOKENS

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


@pytest.fixture(autouse=True)
def interpreted() -> None:
    interpret()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype"),
    [
        ((2, 2), 16, torch.float32),
        ((6, 2), 24, torch.float32),
        ((4, 1), 8, torch.bfloat16),
        ((3, 1), 80, torch.float16),
        ((2, 1), 256, torch.bfloat16),
    ],
)
def test_attention_is_that_row_by_row_and_reads_nothing_beyond(
    num_heads: tuple[int, int], head_dim: int, dtype: torch.dtype, *, is_causal: bool
) -> None:
    """Sequences of one key, of a page and of several parts, one without rows; other slots are not numbers."""
    pages = RandomPages.of(num_heads, head_dim, dtype, [1, 9, 0, 40, 2], [1, 300, 1, PAGE_TOKENS, PART_KEYS + 50])
    reads = pages.reads(is_causal=is_causal)
    out, log_sums = triton_pages(pages.query, pages.keys, pages.values, reads, 0.2)
    exact = pages.to(torch.float32)
    expected, expected_sums = slow_pages(exact.query, exact.keys, exact.values, reads, 0.2)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(log_sums, expected_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 70, PART_KEYS + 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_row_sees_the_keys_of_its_window(window: int, *, is_causal: bool) -> None:
    """Which end at the row's own token, or behind further keys of the sequence, and may begin in any part."""
    pages = RandomPages.of((4, 2), 16, torch.float32, [1, 9, 0, 40], [1, 300, 1, PART_KEYS + 50])
    reads = pages.reads(is_causal=is_causal)
    if not is_causal:
        of_rows = [5, *range(300, 300 + 63, 7), *range(PART_KEYS + 50, PART_KEYS + 50 + 40 * 30, 30)]
        reads = replace(reads, behinds=torch.tensor(of_rows, dtype=torch.int32))
    out, log_sums = triton_pages(pages.query, pages.keys, pages.values, reads, 0.2, window)
    expected, expected_sums = slow_pages(pages.query, pages.keys, pages.values, reads, 0.2, window)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sums, expected_sums, rtol=1e-5, atol=1e-5)
    if not is_causal and window == 1:
        assert (log_sums[:, 0] == -torch.inf).all(), "the window is behind all keys"


@pytest.mark.parametrize("is_causal", [False, True])
def test_bits_of_a_sequence_do_not_depend_on_the_others_or_on_the_most_queries(*, is_causal: bool) -> None:
    pages = RandomPages.of((4, 2), 32, torch.bfloat16, [3, 0, 45, 17], [31, 1, 257, PART_KEYS + 9])
    together = triton_pages(pages.query, pages.keys, pages.values, pages.reads(is_causal=is_causal), 0.2)
    for number in (0, 2, 3):
        rows = pages.rows(number)
        reads = pages.reads(slice(number, number + 1), is_causal=is_causal, more_queries=51)
        out, log_sums = triton_pages(pages.query[rows], pages.keys, pages.values, reads, 0.2)
        assert torch.equal(out, together[0][rows])
        assert torch.equal(log_sums, together[1][:, rows])


def test_what_is_not_a_number_stays_in_its_sequence() -> None:
    pages = RandomPages.of((2, 2), 16, torch.float32, [2, 3], [40, 50])
    expected, _ = triton_pages(pages.query, pages.keys, pages.values, pages.reads(is_causal=False), 0.2)
    for memory in (pages.keys, pages.values):
        memory[pages.table[0, 0], 7] = torch.nan
    out, _ = triton_pages(pages.query, pages.keys, pages.values, pages.reads(is_causal=False), 0.2)
    assert torch.equal(out[2:], expected[2:])
    assert out[:2].isnan().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_it_launches_and_moves_what_the_fake_device_counts(*, is_causal: bool) -> None:
    pages = RandomPages.of((4, 2), 32, torch.bfloat16, [24] * 3, [2 * PAGE_TOKENS] * 3)
    with metered() as moved:
        triton_pages(pages.query, pages.keys, pages.values, pages.reads(is_causal=is_causal), 0.2)
    assert moved.num_launches == moved.num_counted == 1
    assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)


def test_parts_are_joined_by_one_more_launch_and_the_last_has_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = RandomPages.of((4, 2), 16, torch.float32, [3, 2], [3 * PART_KEYS] * 2)
    reads = pages.reads(is_causal=False)
    expected, expected_sums = slow_pages(pages.query, pages.keys, pages.values, reads, 0.2)
    for parts_max, num_launches in ((PARTS_MAX, 2), (2, 2), (1, 1)):
        # patched: seventeen parts would take the interpreter a minute
        monkeypatch.setattr(attention_pages, "PARTS_MAX", parts_max)
        with metered() as moved:
            out, log_sums = triton_pages(pages.query, pages.keys, pages.values, reads, 0.2)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(log_sums, expected_sums, rtol=1e-5, atol=1e-5)
        assert moved.num_launches == moved.num_counted == num_launches
        assert moved.num_bytes == pytest.approx(moved.num_counted_bytes, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_step_is_that_of_separate_operations(dtype: torch.dtype) -> None:
    """Next tokens as rows of their prompts, and a chunk behind them; queries in both orders in memory."""
    num_heads, results = (6, 2), list[torch.Tensor]()
    step = RandomStep.of(num_heads, 24, dtype, has_norms=True)
    for kernel in (triton_pages, slow_pages):
        attend = PagedAttention(step.cache, kernel, step.tables)
        results.append(SplitProjections(attend, *num_heads).projected(0, step.projected))
        results.append(attend.projected(0, step.projected))
    tolerance = 1e-5 if dtype == torch.float32 else 2.0**-5
    for actual in results[:3]:
        torch.testing.assert_close(actual, results[3], rtol=tolerance, atol=tolerance)

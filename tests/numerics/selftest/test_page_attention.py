"""The trial of attention over pages: it accepts the right kernel, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.numerics.harness import Driver
from tests.support.numerics.slow_pages import slow_pages
from workers.sampling.attention.pages import PageKernel, PageReads
from workers.sampling.kv_cache import PAGE_TOKENS
from workers.selftest import page_attention
from workers.selftest.page_attention import is_right, tried_page_kernel


def sees_all(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    return slow_pages(query, keys, values, replace(reads, is_causal=False), scaling, window)


def one_key_too_many(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    last = (reads.lengths + 1).clamp(max=PAGE_TOKENS * reads.table.shape[1])
    return slow_pages(query, keys, values, replace(reads, lengths=last, most_keys=int(last.max())), scaling, window)


def pages_in_order(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    table = reads.table.sort(1).values
    return slow_pages(query, keys, values, replace(reads, table=table), scaling, window)


def base_two(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    out, sums = slow_pages(query, keys, values, reads, scaling, window)
    return out, sums / torch.log(torch.tensor(2.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_right_kernel_passes(qwen3: Path, dtype: str) -> None:
    assert is_right(Driver(qwen3, dtype=dtype).engine.base_model, slow_pages)


def without_windows(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    del window
    return slow_pages(query, keys, values, reads, scaling)


def windows_behind_the_prompt(
    query: Tensor, keys: Tensor, values: Tensor, reads: PageReads, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    return slow_pages(query, keys, values, replace(reads, behinds=None), scaling, window)


def test_windows_and_sinks_are_tried_of_a_model_that_has_them(model_directories: dict[str, Path]) -> None:
    for name in ("mistral-window", "gpt-oss"):
        model = Driver(model_directories[name], dtype="bfloat16").engine.base_model
        assert model.has_sliding_window
        assert is_right(model, slow_pages)
        assert not is_right(model, without_windows)
        assert not is_right(model, windows_behind_the_prompt)


@pytest.mark.parametrize("kernel", [one_key_too_many, pages_in_order, base_two, sees_all])
def test_a_wrong_kernel_does_not(qwen3: Path, kernel: PageKernel) -> None:
    assert not is_right(Driver(qwen3, dtype="bfloat16").engine.base_model, kernel)


def test_attention_is_by_blocks_if_the_kernel_fails(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Driver(qwen3).engine.base_model
    assert tried_page_kernel(model) is None, "a CPU has no kernel"
    # patched: no kernel of a GPU runs here
    monkeypatch.setattr(page_attention, "page_kernel_for", lambda _: slow_pages)
    assert tried_page_kernel(model) is slow_pages
    monkeypatch.setattr(page_attention, "page_kernel_for", lambda _: base_two)
    assert tried_page_kernel(model) is None
    assert "attention is by blocks" in caplog.text

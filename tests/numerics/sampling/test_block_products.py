"""Attention over key-value blocks: rows are independent, and the combined blocks give the attention over all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.numerics.harness import Driver
from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.attention import block_products, step
from workers.sampling.attention.block_products import (
    HIDDEN,
    ROWS_MULTIPLES,
    BlockReads,
    attend_rows,
    attend_to_blocks,
    combine,
    find_rows_multiple,
)
from workers.sampling.attention.step import BlockSteps

HEAD_DIM = 32


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@given(
    heads_per_key=st.integers(1, 5),
    num_seqs=st.integers(1, 5),
    num_seen=st.integers(1, 2 * BLOCK_TOKENS),
    sink=st.none() | st.floats(-200, 200),
)
def test_two_combined_blocks_are_the_attention_over_both(
    heads_per_key: int, num_seqs: int, num_seen: int, sink: float | None
) -> None:
    """With any number of padding rows, any part of the second block hidden, and sinks."""
    num_keys, scaling = 2, HEAD_DIM**-0.5
    queries = values(num_seqs, num_keys * heads_per_key, HEAD_DIM)
    keys = values(2 * num_seqs, num_keys, HEAD_DIM, BLOCK_TOKENS)
    vals = values(2 * num_seqs, num_keys, BLOCK_TOKENS, HEAD_DIM)
    mask = torch.zeros(2 * BLOCK_TOKENS).masked_fill_(torch.arange(2 * BLOCK_TOKENS) >= num_seen, HIDDEN)
    # The first block of each sequence, then the second of each.
    parts = BlockReads(
        queries=torch.arange(num_seqs).repeat(2),
        num_rows=-(-heads_per_key // 4) * 4,
        blocks=torch.arange(2 * num_seqs),
        runs=[(0, 0, 2 * num_seqs)],
        mask=mask.view(2, 1, 1, 1, BLOCK_TOKENS).expand(2, num_seqs, 1, 1, BLOCK_TOKENS).flatten(0, 1),
    )
    results = attend_to_blocks(queries, keys, vals, parts, scaling)
    owners = torch.arange(num_seqs).repeat(2)
    sinks = values(num_keys, heads_per_key) + (sink or 0)
    levels = [(0, num_seqs), (num_seqs, num_seqs)]
    joined = combine(*results, owners, levels, None if sink is None else sinks)  # (S, K, G, E)
    for seq in range(num_seqs):
        key = keys[[seq, num_seqs + seq]].permute(1, 0, 3, 2).flatten(1, 2)[:, :num_seen]  # (K, seen, E)
        value = vals[[seq, num_seqs + seq]].transpose(0, 1).flatten(1, 2)[:, :num_seen]
        query = queries[seq].unflatten(0, (num_keys, heads_per_key))
        scores = query @ key.transpose(1, 2) * scaling  # (K, G, seen)
        if sink is not None:
            scores = torch.cat([scores, sinks.unsqueeze(-1)], -1)
        expected = scores.softmax(-1)[..., :num_seen] @ value
        torch.testing.assert_close(joined[seq], expected, rtol=1e-4, atol=1e-5)


def test_log_sum_exp_is_that_of_the_scores_and_finite_if_all_keys_are_hidden() -> None:
    query, key, value = values(3, 1, 4, 8), values(3, 1, 8, 16), values(3, 1, 16, 8)
    mask = torch.zeros(3, 1, 1, 16)
    mask[1, ..., 5:] = HIDDEN
    mask[2] = HIDDEN
    result, log_sum_exp = attend_rows(query, key, value, mask, 0.5)
    expected = ((query @ key) * 0.5 + mask).logsumexp(-1)
    torch.testing.assert_close(log_sum_exp, expected, rtol=1e-6, atol=1e-6)
    assert result.isfinite().all()
    assert float(log_sum_exp[2].max()) < -1e29, "a hidden block has no weight next to a visible one"


@pytest.mark.parametrize(("good_multiple", "expected"), [(16, 16), (1000, None)])
def test_number_of_rows_is_searched_until_rows_are_independent(
    good_multiple: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patched: a product whose bits depend on the number of rows, except for multiples of 16, or always."""
    real = block_products.attend_rows

    def uneven(query: Tensor, *args: Tensor | float) -> tuple[Tensor, Tensor]:
        result, log_sum_exp = real(query, *args)  # type: ignore[arg-type]
        return result * (1 + 2.0**-20 * (query.shape[2] % good_multiple)), log_sum_exp

    monkeypatch.setattr(block_products, "attend_rows", uneven)
    find_rows_multiple.cache_clear()
    try:
        assert find_rows_multiple(HEAD_DIM, BLOCK_TOKENS, torch.get_num_threads()) == expected
    finally:
        find_rows_multiple.cache_clear()


def test_missing_number_of_rows_is_logged_and_in_the_fingerprint(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Driver(qwen3).engine
    monkeypatch.setattr(step, "find_rows_multiple", lambda *_: None)
    # patched: this library has a number of rows for which rows are independent
    made = BlockSteps(None, engine.base_model)  # type: ignore[arg-type]
    assert made._rows_multiple == ROWS_MULTIPLES[-1]
    assert "may depend on its neighbours" in caplog.text
    assert "samples depend on their neighbours" in Driver(qwen3).engine.info.fingerprint
    assert "samples depend on their neighbours" not in engine.info.fingerprint

"""Attention of the next token of every running sequence, over its prompt's key-value blocks and its own.

Blocks are read where they lie in memory; adjacent ones are one call, whichever sequences they belong to. `decode_plan`
chooses the calls. Samples of one prompt are rows of the same products, so their prompt is read once for all of them.

Does not depend on requests, versions or tokens.

Main invariant: a sequence's result depends only on its own blocks and their number, because `block_products` keeps
rows apart. A key outside a sliding window is not read, or has the weight zero.

Dimensions: T rows of the pass, S sequences, N blocks of the memory, B tokens of a block, K key-value heads, H query
heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.attention.block_products import attend_to_blocks, combine
from workers.sampling.attention.decode_plan import DecodePlan, DecodePlanner, NextToken


class DecodeAttention:
    """The next token of every running sequence; and the tokens after it, while no sequence begins, ends or grows."""

    def __init__(self, tokens: Sequence[NextToken], heads_per_key: int, rows_multiple: int) -> None:
        """Take the tokens; `heads_per_key` is H / K, and products have a multiple of `rows_multiple` query rows."""
        self._layout = _layout(tokens)
        self._planner = DecodePlanner(tokens, heads_per_key, rows_multiple)
        first, last = tokens[0].row, tokens[-1].row
        rows = [token.row for token in tokens]
        self._rows: slice | Tensor = slice(first, last + 1)
        """The tokens' rows of the pass; adjacent rows, as in a pass without prompts, need no gathering."""
        if rows != list(range(first, last + 1)):
            self._rows = torch.tensor(rows)
        self._block = torch.tensor([token.own.blocks[-1] for token in tokens])
        self._offset = _offsets(tokens)
        self._plans: dict[int | None, DecodePlan] = {}
        """By sliding window."""

    def try_continue(self, tokens: Sequence[NextToken]) -> bool:
        """Move to the next tokens if only the sequences' lengths differ; return whether they do.

        Most plans stay as they are, which saves making them.
        """
        if _layout(tokens) != self._layout:
            return False
        self._planner.move_to(tokens)
        self._offset = _offsets(tokens)
        plan = self._plans.get(None)
        self._plans.clear()  # the keys inside a window change with every token
        if plan is not None:
            self._plans[None] = self._planner.remask(plan)
        return True

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Write the tokens' keys or values, among rows (T, K, E), to their blocks of (N, K, B, E)."""
        memory[self._block, :, self._offset] = rows[self._rows]

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        """Fill the tokens' rows of `out` (T, H, E), from queries (T, H, E), keys (N, K, E, B), values (N, K, B, E)."""
        if window not in self._plans:
            self._plans[window] = self._planner.plan(window, queries)
        plan = self._plans[window]
        result, log_sum_exp = attend_to_blocks(queries, keys, values, plan.by_sequence, scaling)
        if plan.by_tile is not None:
            of_tiles = attend_to_blocks(queries, keys, values, plan.by_tile, scaling)
            result, log_sum_exp = (torch.cat(pair) for pair in zip(of_tiles, (result, log_sum_exp), strict=True))
        result, log_sum_exp = (tensor.index_select(0, plan.results).float() for tensor in (result, log_sum_exp))
        joined = combine(result, log_sum_exp, plan.owners, plan.levels).index_select(0, plan.order)  # (S, K, G, E)
        out[self._rows] = joined.flatten(1, 2).to(out.dtype)


def _layout(tokens: Sequence[NextToken]) -> list[tuple[int, int, int, int, int]]:
    """Return everything that plans depend on except lengths. A sequence's blocks are only appended to."""
    return [
        (token.row, id(token.prompt), token.own.index, len(token.own.blocks), token.own.blocks[-1]) for token in tokens
    ]


def _offsets(tokens: Sequence[NextToken]) -> Tensor:
    """Return each token's position in its block, (S,)."""
    return torch.tensor([token.own.length % BLOCK_TOKENS for token in tokens])

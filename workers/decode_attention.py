"""The attention of one token more of every running sequence, over its prompt's blocks of keys and its own.

Knows positions and blocks; not requests, versions or tokens. A call's batch are blocks that lie beside each other in
memory, of whichever sequences, read where they are. Samples of one prompt are rows of the same products (a *tile*), so
a prompt's keys are read once for all in a tile.

Main invariant: a sequence's result depends on its own blocks and their number alone, as `block_attention` keeps rows
apart. What a sliding window hides is not computed, or has the weight zero.

Dimensions: T rows of the pass, S sequences, N blocks of the memory, B tokens of a block, P parts (a block, and who
looks at it), K key-value heads, H query heads, G query heads per key-value head, R rows of a tile, E head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.block_attention import Parts, attend_to_blocks, mask_of, put_together
from workers.kv_cache import BLOCK_TOKENS, PromptBlocks

TILE_ROWS = 16
"""Query rows that look at a prompt's block together, at most."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """A row of the pass that is the next token of a running sequence."""

    row: int
    prompt: PromptBlocks
    index: int
    """Of the sequence among the samples of its prompt."""
    blocks: Sequence[int]
    """Of the sequence's own tokens; the last has room for this one."""
    length: int
    """Own tokens before this one."""


@dataclass(frozen=True, slots=True)
class _View:
    """What the running sequences see through one kind of layer."""

    of_prompts: Parts | None
    """By tiles."""
    of_own: Parts
    """By sequences."""
    own_parts: Sequence[tuple[int, int, int]]
    """Of `of_own`: block, sequence, and which of its own blocks it is."""
    results: Tensor
    """What is put together, the first block of every sequence first, then the second, ...: each the place among the
    results of `of_prompts` (part by part, in each the places of a tile) and of `of_own` behind them."""
    owners: Tensor
    """Whose each of `results` is, as a place in `order`."""
    levels: list[tuple[int, int]]
    """Where the first, second, ... blocks begin in `results`, and how many there are; they fall."""
    order: Tensor
    """(S,) where each sequence stands in the order of falling numbers of blocks."""


class DecodeAttention:
    """The next token of every running sequence; and the tokens behind, as long as nobody comes, goes or grows."""

    def __init__(self, tokens: Sequence[NextToken], heads_per_key: int, rows_multiple: int) -> None:
        """`heads_per_key` is G; products have a multiple of `rows_multiple` query rows."""
        self._tokens = tokens
        self._standing = _standing(tokens)
        self._heads_per_key = heads_per_key
        self._rows = torch.tensor([token.row for token in tokens])
        self._block = torch.tensor([token.blocks[-1] for token in tokens])
        self._slot = torch.tensor([token.length % BLOCK_TOKENS for token in tokens])
        self._rows_multiple = rows_multiple
        of_prompt: dict[int, list[int]] = {}
        for number, token in enumerate(tokens):
            of_prompt.setdefault(id(token.prompt), []).append(number)
        self._tile_size = min(max(1, TILE_ROWS // heads_per_key), max(map(len, of_prompt.values())))
        self._place = [(0, 0)] * len(tokens)
        """Of each sequence: its tile, and its place there."""
        members: list[list[int]] = []
        for numbers in of_prompt.values():
            for start in range(0, len(numbers), self._tile_size):
                tile = numbers[start : start + self._tile_size]
                for place, number in enumerate(tile):
                    self._place[number] = (len(members), place)
                members.append(tile + tile[:1] * (self._tile_size - len(tile)))
        self._members = np.array(members)
        """(tiles, tile size) sequences; the first of a tile again where a place is empty."""
        self._own_members = np.arange(len(tokens))[:, None]
        self._views: dict[int | None, _View] = {}

    def go_on(self, tokens: Sequence[NextToken]) -> bool:
        """Turn to other tokens, if only the lengths differ: whether they do. Saves making out who sees what anew."""
        if _standing(tokens) != self._standing:
            return False
        self._tokens = tokens
        self._slot = torch.tensor([token.length % BLOCK_TOKENS for token in tokens])
        view = self._views.get(None)
        self._views.clear()  # what a window shows moves with every token
        if view is not None:
            mask = _mask(self._own_mask(view.own_parts, None), view.of_own.mask)
            self._views[None] = replace(view, of_own=replace(view.of_own, mask=mask))
        return True

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Put the tokens' keys or values among rows (T, K, E) where they belong in (N, K, B, E)."""
        memory[self._block, :, self._slot] = rows[self._rows]

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        """Fill the tokens' rows of `out` (T, H, E)."""
        if window not in self._views:
            self._views[window] = self._view(window, queries)
        view = self._views[window]
        all_parts = (view.of_own,) if view.of_prompts is None else (view.of_prompts, view.of_own)
        parts = [attend_to_blocks(queries, keys, values, parts, scaling) for parts in all_parts]
        result, weight = (
            torch.cat(tensors).index_select(0, view.results).float() for tensors in zip(*parts, strict=True)
        )
        joined = put_together(result, weight, view.owners, view.levels).index_select(0, view.order)
        out[self._rows] = joined.flatten(1, 2).to(out.dtype)

    # ------------------------------------------------------------------ who sees what

    def _view(self, window: int | None, like: Tensor) -> _View:
        prompt_parts, own_parts, seen = self._parts(window)
        place_of = {part: place for place, part in enumerate(prompt_parts)}
        num_of_prompts = len(prompt_parts) * self._tile_size
        own_place_of = {part: num_of_prompts + place for place, part in enumerate(own_parts)}
        results_of = []
        for number, (token, (first, first_own)) in enumerate(zip(self._tokens, seen, strict=True)):
            tile, place = self._place[number]
            of_prompt = enumerate(token.prompt.blocks[first:], first)
            own = enumerate(token.blocks[first_own:], first_own)
            results_of.append(
                [place_of[block, tile, part] * self._tile_size + place for part, block in of_prompt]
                + [own_place_of[block, number, part] for part, block in own]
            )
        falling = sorted(range(len(results_of)), key=lambda number: -len(results_of[number]))
        results: list[int] = []
        owners: list[int] = []
        levels: list[tuple[int, int]] = []
        for level in range(len(results_of[falling[0]])):
            members = [number for number in falling if len(results_of[number]) > level]
            levels.append((len(results), len(members)))
            results += [results_of[number][level] for number in members]
            owners += range(len(members))
        order = torch.empty(len(falling), dtype=torch.long)
        order[torch.tensor(falling)] = torch.arange(len(falling))
        device = like.device
        return _View(
            self._parts_of(prompt_parts, self._members, self._prompt_mask(prompt_parts, window), like)
            if prompt_parts
            else None,
            self._parts_of(own_parts, self._own_members, self._own_mask(own_parts, window), like),
            own_parts,
            torch.tensor(results, device=device),
            torch.tensor(owners, device=device),
            levels,
            order.to(device),
        )

    def _parts(
        self, window: int | None
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], list[tuple[int, int]]]:
        """Parts (block, who, which of its blocks) of prompts and of own tokens; per sequence the first it sees of both.

        In the order of blocks in memory, so that many are beside each other.
        """
        prompt_parts: dict[tuple[int, int, int], None] = {}
        own_parts = []
        seen = []
        for number, token in enumerate(self._tokens):
            first = first_own = 0
            if window is not None:
                begin = token.prompt.length + token.length - window + 1
                first = max(0, begin) // BLOCK_TOKENS
                first_own = max(0, begin - token.prompt.length) // BLOCK_TOKENS
            blocks = enumerate(token.prompt.blocks[first:], first)
            prompt_parts |= dict.fromkeys((block, self._place[number][0], part) for part, block in blocks)
            own_parts += [(block, number, part) for part, block in enumerate(token.blocks[first_own:], first_own)]
            seen.append((first, first_own))
        return _in_runs(prompt_parts), _in_runs(own_parts), seen

    def _parts_of(
        self,
        parts: Sequence[tuple[int, int, int]],
        members: NDArray[np.int64],
        is_hidden: NDArray[np.bool_],
        like: Tensor,
    ) -> Parts:
        runs: list[tuple[int, int, int]] = []
        for place, (block, _, _) in enumerate(parts):
            if runs and runs[-1][0] + runs[-1][2] == block:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((block, place, 1))
        num_rows = -(-members.shape[1] * self._heads_per_key // self._rows_multiple) * self._rows_multiple
        if is_hidden.shape[1] > 1:
            is_hidden = np.pad(is_hidden, ((0, 0), (0, num_rows - is_hidden.shape[1]), (0, 0)))
        return Parts(
            self._rows[torch.from_numpy(members[[who for _, who, _ in parts]].ravel())].to(like.device),
            num_rows,
            torch.tensor([block for block, _, _ in parts], device=like.device),
            runs,
            _mask(is_hidden, like),
        )

    def _own_mask(self, parts: Sequence[tuple[int, int, int]], window: int | None) -> NDArray[np.bool_]:
        """Which keys are hidden, (P, 1, B)."""
        lengths = np.array([self._tokens[number].length - part * BLOCK_TOKENS for _, number, part in parts])
        return _hidden(lengths[:, None], np.full((len(parts), 1), BLOCK_TOKENS), window)

    def _prompt_mask(self, parts: Sequence[tuple[int, int, int]], window: int | None) -> NDArray[np.bool_]:
        """Which keys are hidden: (P, 1, B), or by row (P, R, B) where samples of one prompt see it differently."""
        lengths = np.array([self._tokens[self._members[tile, 0]].prompt.length for _, tile, _ in parts])
        begins = np.array([part * BLOCK_TOKENS for _, _, part in parts])
        num_keys = (lengths - begins)[:, None]
        if window is None:
            return _hidden(num_keys, num_keys, None)
        own = np.array([token.length for token in self._tokens])[self._members]
        own = own.repeat(self._heads_per_key, axis=1)  # (tiles, rows)
        positions = own[[tile for _, tile, _ in parts]] + num_keys  # (P, rows), counted from the block's beginning
        return _hidden(positions, np.broadcast_to(num_keys, positions.shape), window)


def _standing(tokens: Sequence[NextToken]) -> list[tuple[int, int, int, int, int]]:
    """What decides where each token's keys lie and in which row it is; a sequence's blocks are only added to."""
    return [(token.row, id(token.prompt), token.index, len(token.blocks), token.blocks[-1]) for token in tokens]


def _mask(is_hidden: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Hidden keys (P, rows, B) as what is added to scores (P, 1, rows, B)."""
    return mask_of(torch.from_numpy(is_hidden), like).unsqueeze(1)


def _in_runs(parts: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Order parts (block, who, which) so that as many as can be stand behind the block that is before theirs.

    Samples in several tiles look at the same blocks: each tile's are a run of their own.
    """
    runs: dict[int, list[list[tuple[int, int, int]]]] = {}
    for part in sorted(parts):
        before = runs.get(part[0])
        run = before.pop() if before else []
        run.append(part)
        runs.setdefault(part[0] + 1, []).append(run)
    return [part for ends in runs.values() for run in ends for part in run]


def _hidden(positions: NDArray[np.int64], num_keys: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    """Which keys of a block are hidden (P, rows, B) from queries at positions (P, rows) counted from its beginning.

    Those behind the query, beyond the first `num_keys` (P, rows), or outside its window.
    """
    keys = np.arange(BLOCK_TOKENS)
    hidden = (keys > positions[..., None]) | (keys >= num_keys[..., None])
    if window is not None:
        hidden |= keys <= positions[..., None] - window
    return hidden

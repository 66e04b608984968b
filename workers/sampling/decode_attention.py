"""The attention of one token more of every running sequence, over its prompt's blocks of keys and its own.

Knows positions and blocks; not requests, versions or tokens. A call's batch are blocks that lie beside each other in
memory, of whichever sequences, read where they are. Samples of one prompt are rows of the same products (a *tile*), so
a prompt's keys are read once for all in a tile. Where nobody shares a prompt, its blocks are like a sequence's own, and
all blocks are one call.

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
from torch.nn import functional as F

from workers.contract.capacity import BLOCK_TOKENS
from workers.sampling.block_attention import Parts, attend_to_blocks, mask_of, put_together
from workers.sampling.kv_cache import PromptBlocks

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
class _Sight:
    """Where the queries of parts stand, each of a single sequence; (P,) each."""

    numbers: NDArray[np.int64]
    """Of the sequences."""
    offsets: NDArray[np.int64]
    """From the sequence's own tokens to the query's position, counted from the beginning of the block."""
    num_keys: NDArray[np.int64]
    """Keys in the block."""

    def mask(self, tokens: Sequence[NextToken], window: int | None, like: Tensor) -> Tensor:
        """(P, 1, 1, B)."""
        lengths = np.array([token.length for token in tokens])
        positions = lengths[self.numbers] + self.offsets
        return _mask(_hidden(positions[:, None], self.num_keys[:, None], window), like)


@dataclass(frozen=True, slots=True)
class _View:
    """What the running sequences see through one kind of layer."""

    of_tiles: Parts | None
    """Prompts' blocks, by tiles; None where a tile is a single sequence."""
    of_each: Parts
    """By sequences: their own blocks, and their prompts' where these are not in `of_tiles`."""
    sight: _Sight
    """Of `of_each`."""
    results: Tensor
    """What is put together, the first block of every sequence first, then the second, ...: each the place among the
    results of `of_tiles` (part by part, in each the places of a tile) and of `of_each` behind them."""
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
        first, last = tokens[0].row, tokens[-1].row
        are_beside = [token.row for token in tokens] == list(range(first, last + 1))
        self._places: slice | Tensor = slice(first, last + 1) if are_beside else self._rows
        """The same; rows beside each other, as in a pass without prompts, need not be looked up."""
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
        self._each = np.arange(len(tokens))[:, None]
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
            mask = view.sight.mask(tokens, None, view.of_each.mask)
            self._views[None] = replace(view, of_each=replace(view.of_each, mask=mask))
        return True

    def write(self, memory: Tensor, rows: Tensor) -> None:
        """Put the tokens' keys or values among rows (T, K, E) where they belong in (N, K, B, E)."""
        memory[self._block, :, self._slot] = rows[self._places]

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        """Fill the tokens' rows of `out` (T, H, E)."""
        if window not in self._views:
            self._views[window] = self._view(window, queries)
        view = self._views[window]
        result, weight = attend_to_blocks(queries, keys, values, view.of_each, scaling)
        if view.of_tiles is not None:
            of_tiles = attend_to_blocks(queries, keys, values, view.of_tiles, scaling)
            result, weight = (torch.cat(pair) for pair in zip(of_tiles, (result, weight), strict=True))
        result, weight = (tensor.index_select(0, view.results).float() for tensor in (result, weight))
        joined = put_together(result, weight, view.owners, view.levels).index_select(0, view.order)
        out[self._places] = joined.flatten(1, 2).to(out.dtype)

    # ------------------------------------------------------------------ who sees what

    def _view(self, window: int | None, like: Tensor) -> _View:
        tile_parts, each_parts, seen = self._parts(window)
        place_of = {part: place * self._tile_size for place, part in enumerate(tile_parts)}
        num_of_tiles = len(tile_parts) * self._tile_size
        each_place_of = {part: num_of_tiles + place for place, part in enumerate(each_parts)}
        results_of = []
        for number, (token, (first, first_own)) in enumerate(zip(self._tokens, seen, strict=True)):
            tile, place = self._place[number]
            if self._tile_size > 1:
                of_prompt = [place_of[block, tile, which] + place for which, block in _prompt_blocks(token, first)]
            else:
                of_prompt = [each_place_of[block, number, which] for which, block in _prompt_blocks(token, first)]
            own = [each_place_of[block, number, which] for which, block in _own_blocks(token, first_own)]
            results_of.append(of_prompt + own)
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
        sight = self._sight(each_parts)
        return _View(
            self._parts_of(tile_parts, self._members, _mask(self._tile_mask(tile_parts, window), like))
            if tile_parts
            else None,
            self._parts_of(each_parts, self._each, sight.mask(self._tokens, window, like)),
            sight,
            torch.tensor(results, device=device),
            torch.tensor(owners, device=device),
            levels,
            order.to(device),
        )

    def _parts(
        self, window: int | None
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], list[tuple[int, int]]]:
        """Parts (block, who, which of their blocks) by tiles and by sequences; per sequence the first block it sees of
        its prompt's and of its own.

        In the order of blocks in memory, so that many are beside each other.
        """
        tile_parts: dict[tuple[int, int, int], None] = {}
        each_parts = []
        seen = []
        for number, token in enumerate(self._tokens):
            first = first_own = 0
            if window is not None:
                begin = token.prompt.length + token.length - window + 1
                first = max(0, begin) // BLOCK_TOKENS
                first_own = max(0, begin - token.prompt.length) // BLOCK_TOKENS
            if self._tile_size > 1:
                tile = self._place[number][0]
                tile_parts |= dict.fromkeys((block, tile, which) for which, block in _prompt_blocks(token, first))
            else:
                each_parts += [(block, number, which) for which, block in _prompt_blocks(token, first)]
            each_parts += [(block, number, which) for which, block in _own_blocks(token, first_own)]
            seen.append((first, first_own))
        return _in_runs(tile_parts), _in_runs(each_parts), seen

    def _parts_of(
        self,
        parts: Sequence[tuple[int, int, int]],
        members: NDArray[np.int64],
        mask: Tensor,
    ) -> Parts:
        """`members`: of each who, the sequences that look; `mask` (P, 1, 1 or rows, B)."""
        runs: list[tuple[int, int, int]] = []
        for place, (block, _, _) in enumerate(parts):
            if runs and runs[-1][0] + runs[-1][2] == block:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((block, place, 1))
        num_rows = -(-members.shape[1] * self._heads_per_key // self._rows_multiple) * self._rows_multiple
        if mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, num_rows - mask.shape[2]))
        return Parts(
            self._rows[torch.from_numpy(members[[who for _, who, _ in parts]].ravel())].to(mask.device),
            num_rows,
            torch.tensor([block for block, _, _ in parts], device=mask.device),
            runs,
            mask,
        )

    def _sight(self, parts: Sequence[tuple[int, int, int]]) -> _Sight:
        """Of parts of single sequences."""
        offsets, num_keys = [], []
        for _, number, which in parts:
            prompt = self._tokens[number].prompt
            own = which - len(prompt.blocks)
            rest = prompt.length - which * BLOCK_TOKENS
            offsets.append(rest if own < 0 else -own * BLOCK_TOKENS)
            num_keys.append(rest if own < 0 else BLOCK_TOKENS)
        return _Sight(np.array([number for _, number, _ in parts]), np.array(offsets), np.array(num_keys))

    def _tile_mask(self, parts: Sequence[tuple[int, int, int]], window: int | None) -> NDArray[np.bool_]:
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


def _prompt_blocks(token: NextToken, first: int) -> Iterable[tuple[int, int]]:
    """Which of its blocks, and the block, from the prompt's `first` on."""
    return enumerate(token.prompt.blocks[first:], first)


def _own_blocks(token: NextToken, first: int) -> Iterable[tuple[int, int]]:
    """The same of its own; its prompt's are counted before."""
    return enumerate(token.blocks[first:], len(token.prompt.blocks) + first)


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

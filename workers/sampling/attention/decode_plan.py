"""The plan of one decode step's attention: which blocks are read in one call, by which sequences, with which masks.

Up to `TILE_ROWS` query rows of one prompt's samples form a *tile*, which reads each of the prompt's blocks once. If no
prompt has several samples, every sequence reads its prompt's blocks like its own.

Does not depend on tensors' contents, requests, versions or tokens.

Main invariant: the results of a sequence are combined in the order of its blocks, the prompt's first.

Dimensions: S sequences, B tokens of a block, P reads (a block and its reader), R query rows of a product, G query heads
per key-value head, M results.
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
from workers.host.uploads import on_device
from workers.sampling.attention.block_products import BlockReads, score_mask
from workers.sampling.kv_cache import PromptBlocks, SequenceBlocks

TILE_ROWS = 16
"""Query rows of a tile, at most."""

Read = tuple[int, int, int]
"""A block, its reader (the number of a tile or of a sequence), and the block's index among the reader's blocks."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """A row of the pass that is the next token of a running sequence."""

    row: int
    prompt: PromptBlocks
    own: SequenceBlocks


@dataclass(frozen=True, slots=True)
class _Queries:
    """The queries of reads by single sequences; (P,) each."""

    sequences: NDArray[np.int64]
    """Numbers of the sequences."""
    offsets: NDArray[np.int64]
    """Added to the sequence's length, the query's position counted from the beginning of the block."""
    num_keys: NDArray[np.int64]
    """Keys in the block."""

    def mask(self, tokens: Sequence[NextToken], window: int | None, like: Tensor) -> Tensor:
        """Return the mask of hidden keys, (P, 1, 1, B)."""
        lengths = np.array([token.own.length for token in tokens])
        positions = lengths[self.sequences] + self.offsets
        return _mask(_is_hidden(positions[:, None], self.num_keys[:, None], window), like)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The reads of the running sequences in layers of one sliding window."""

    by_tile: BlockReads | None
    """Blocks of prompts; None if every tile is a single sequence."""
    by_sequence: BlockReads
    """The sequences' own blocks, and those of their prompts that are not in `by_tile`."""
    queries: _Queries
    """Of `by_sequence`."""
    results: Tensor
    """(M,) the results to combine, in the order that `block_products.combine` takes: indices into those of `by_tile`,
    with those of `by_sequence` after them."""
    owners: Tensor
    """(M,) the sequence of each result, as an index into the sequences sorted by falling numbers of blocks."""
    levels: list[tuple[int, int]]
    """First index in `results`, and count, of the sequences' first blocks, second blocks, and so on."""
    order: Tensor
    """(S,) each sequence's index among the sorted ones."""


class DecodePlanner:
    """Makes the plans for one set of sequences."""

    def __init__(self, tokens: Sequence[NextToken], heads_per_key: int, rows_multiple: int) -> None:
        """Make tiles; `heads_per_key` is G, and products have a multiple of `rows_multiple` query rows."""
        self._tokens = tokens
        self._heads_per_key = heads_per_key
        self._rows_multiple = rows_multiple
        self._rows = np.array([token.row for token in tokens])
        by_prompt: dict[int, list[int]] = {}
        for number, token in enumerate(tokens):
            by_prompt.setdefault(id(token.prompt), []).append(number)
        self._tile_size = min(max(1, TILE_ROWS // heads_per_key), max(map(len, by_prompt.values())))
        self._tile_of = [(0, 0)] * len(tokens)
        """Per sequence: its tile, and its index there."""
        members: list[list[int]] = []
        for numbers in by_prompt.values():
            for start in range(0, len(numbers), self._tile_size):
                tile = numbers[start : start + self._tile_size]
                for index, number in enumerate(tile):
                    self._tile_of[number] = (len(members), index)
                members.append(tile + tile[:1] * (self._tile_size - len(tile)))
        self._tiles = np.array(members)
        """(tiles, tile size) sequences; the first one is repeated where a tile is not full."""
        self._singles = np.arange(len(tokens))[:, None]

    def move_to(self, tokens: Sequence[NextToken]) -> None:
        """Plan for other tokens of the same sequences, of which only the lengths differ."""
        self._tokens = tokens

    def remask(self, plan: DecodePlan) -> DecodePlan:
        """Return a plan without a window for the present lengths."""
        mask = plan.queries.mask(self._tokens, None, plan.by_sequence.mask)
        return replace(plan, by_sequence=replace(plan.by_sequence, mask=mask))

    def plan(self, window: int | None, like: Tensor) -> DecodePlan:
        """Return the plan for layers with this sliding window, on the device and in the dtype of `like`."""
        tile_reads, own_reads, results_of = self._reads(window)
        falling = sorted(range(len(results_of)), key=lambda number: -len(results_of[number]))
        results: list[int] = []
        owners: list[int] = []
        levels: list[tuple[int, int]] = []
        for level in range(len(results_of[falling[0]])):
            members = [number for number in falling if len(results_of[number]) > level]
            levels.append((len(results), len(members)))
            results += [results_of[number][level] for number in members]
            owners += range(len(members))
        order = np.argsort(falling)
        by_tile = None
        if tile_reads:
            mask = _mask(self._is_hidden_from_tiles(tile_reads, window), like)
            by_tile = self._block_reads(tile_reads, self._tiles, mask)
        queries = self._queries(own_reads)
        device = like.device
        return DecodePlan(
            by_tile,
            self._block_reads(own_reads, self._singles, queries.mask(self._tokens, window, like)),
            queries,
            on_device(results, device),
            on_device(owners, device),
            levels,
            on_device(order, device),
        )

    def _reads(self, window: int | None) -> tuple[list[Read], list[Read], list[list[int]]]:
        """Return the reads by tiles and by sequences, in an order in which many blocks are adjacent, and per sequence
        the indices of its results, block by block."""
        tile_reads: dict[Read, None] = {}
        own_reads: list[Read] = []
        reads_of: list[tuple[list[Read], list[Read]]] = []
        for number, token in enumerate(self._tokens):
            first = first_own = 0
            if window is not None:
                begin = token.prompt.length + token.own.length - window + 1
                first = max(0, begin) // BLOCK_TOKENS
                first_own = max(0, begin - token.prompt.length) // BLOCK_TOKENS
            own = [(block, number, index) for index, block in _own_blocks(token, first_own)]
            if self._tile_size > 1:
                tile = self._tile_of[number][0]
                prompt = [(block, tile, index) for index, block in _prompt_blocks(token, first)]
                tile_reads |= dict.fromkeys(prompt)
            else:
                prompt = [(block, number, index) for index, block in _prompt_blocks(token, first)]
                own_reads += prompt
            own_reads += own
            reads_of.append((prompt, own))
        ordered_tiles, ordered_own = _in_runs(tile_reads), _in_runs(own_reads)
        num_tile_results = len(ordered_tiles) * self._tile_size
        tile_result = {read: index * self._tile_size for index, read in enumerate(ordered_tiles)}
        own_result = {read: num_tile_results + index for index, read in enumerate(ordered_own)}
        results_of = []
        for number, (prompt, own) in enumerate(reads_of):
            if self._tile_size > 1:
                index_in_tile = self._tile_of[number][1]
                of_prompt = [tile_result[read] + index_in_tile for read in prompt]
            else:
                of_prompt = [own_result[read] for read in prompt]
            results_of.append(of_prompt + [own_result[read] for read in own])
        return ordered_tiles, ordered_own, results_of

    def _block_reads(self, reads: Sequence[Read], sequences_of: NDArray[np.int64], mask: Tensor) -> BlockReads:
        """Return reads as tensors; `sequences_of` (readers, queries), `mask` (P, 1, 1 or rows, B)."""
        runs: list[tuple[int, int, int]] = []
        for index, (block, _, _) in enumerate(reads):
            if runs and runs[-1][0] + runs[-1][2] == block:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
            else:
                runs.append((block, index, 1))
        num_rows = -(-sequences_of.shape[1] * self._heads_per_key // self._rows_multiple) * self._rows_multiple
        if mask.shape[2] > 1:
            mask = F.pad(mask, (0, 0, 0, num_rows - mask.shape[2]))
        queries = self._rows[sequences_of[[reader for _, reader, _ in reads]].ravel()]
        return BlockReads(
            on_device(queries, mask.device),
            num_rows,
            on_device([block for block, _, _ in reads], mask.device),
            runs,
            mask,
        )

    def _queries(self, reads: Sequence[Read]) -> _Queries:
        """Return the queries of reads by single sequences."""
        offsets, num_keys = [], []
        for _, number, index in reads:
            prompt = self._tokens[number].prompt
            own = index - len(prompt.blocks)
            rest = prompt.length - index * BLOCK_TOKENS
            offsets.append(rest if own < 0 else -own * BLOCK_TOKENS)
            num_keys.append(rest if own < 0 else BLOCK_TOKENS)
        return _Queries(np.array([number for _, number, _ in reads]), np.array(offsets), np.array(num_keys))

    def _is_hidden_from_tiles(self, reads: Sequence[Read], window: int | None) -> NDArray[np.bool_]:
        """Return which keys are hidden: (P, 1, B), or by row (P, R, B) if a tile's sequences see them differently."""
        lengths = np.array([self._tokens[self._tiles[tile, 0]].prompt.length for _, tile, _ in reads])
        begins = np.array([index * BLOCK_TOKENS for _, _, index in reads])
        num_keys = (lengths - begins)[:, None]
        if window is None:
            return _is_hidden(num_keys, num_keys, None)
        own = np.array([token.own.length for token in self._tokens])[self._tiles]
        own = own.repeat(self._heads_per_key, axis=1)  # (tiles, rows)
        positions = own[[tile for _, tile, _ in reads]] + num_keys  # (P, rows), counted from the block's beginning
        return _is_hidden(positions, np.broadcast_to(num_keys, positions.shape), window)


def _prompt_blocks(token: NextToken, first: int) -> Iterable[tuple[int, int]]:
    """Yield index and block of a prompt's blocks, from `first` on."""
    return enumerate(token.prompt.blocks[first:], first)


def _own_blocks(token: NextToken, first: int) -> Iterable[tuple[int, int]]:
    """Yield index and block of a sequence's own blocks, from `first` on; the prompt's blocks are counted before."""
    return enumerate(token.own.blocks[first:], len(token.prompt.blocks) + first)


def _in_runs(reads: Iterable[Read]) -> list[Read]:
    """Order reads so that as many blocks as possible follow the block before them in memory.

    Several tiles may read the same blocks: each tile's reads are a run of their own.
    """
    runs: dict[int, list[list[Read]]] = {}
    for read in sorted(reads):
        before = runs.get(read[0])
        run = before.pop() if before else []
        run.append(read)
        runs.setdefault(read[0] + 1, []).append(run)
    return [read for ends in runs.values() for run in ends for read in run]


def _is_hidden(positions: NDArray[np.int64], num_keys: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    """Return which keys of a block are hidden (P, rows, B) from queries at positions (P, rows) counted from its start.

    Hidden are keys after the query, beyond the first `num_keys` (P, rows), and outside the window.
    """
    keys = np.arange(BLOCK_TOKENS)
    hidden = (keys > positions[..., None]) | (keys >= num_keys[..., None])
    if window is not None:
        hidden |= keys <= positions[..., None] - window
    return hidden


def _mask(is_hidden: NDArray[np.bool_], like: Tensor) -> Tensor:
    """Return hidden keys (P, rows, B) as an addend of scores (P, 1, rows, B)."""
    return score_mask(torch.from_numpy(is_hidden), like).unsqueeze(1)

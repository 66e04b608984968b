"""One pass of sampling: the next token of many sequences of many versions, and pieces of prompts, in one forward.

Knows rows, versions and where keys lie; not requests, nor how tokens are drawn.

Main invariant: a part's outcome depends on that part and its version alone. A pass that failed can be run again: it
writes nothing but the keys and values of its own rows.

Dimensions: T rows of the pass, D hidden size, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.bank.bank import Bank, Row
from workers.contract.capacity import BLOCK_TOKENS
from workers.model.base_model import BaseModel
from workers.model.lora import Segment
from workers.sampling.block_attention import ROWS_MULTIPLES, find_rows_multiple
from workers.sampling.decode_attention import DecodeAttention, NextToken
from workers.sampling.kv_cache import KVCache, PromptBlocks
from workers.sampling.step_attention import PromptChunk, StepAttention

logger = logging.getLogger(__name__)

LOGIT_ROWS = 256
"""Rows of logits that are held at once for what is wanted of a prompt."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a running sequence is."""

    index: int
    """Among the samples of its prompt."""
    blocks: Sequence[int]
    """Of its own tokens; the last has room for one more."""
    length: int
    """Own tokens whose keys and values are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPart:
    """The next token of sequences that continue one prompt."""

    key: str
    """Their version's key in the bank; empty for the base model alone."""
    prompt: PromptBlocks
    tokens: NDArray[np.int64]
    """(S,)"""
    places: Sequence[Place]
    """One per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive tokens of a prompt, from the beginning of a block to the end of one or of the prompt."""

    key: str
    prompt: PromptBlocks
    tokens: NDArray[np.int64]
    start: int
    """Position of the first of `tokens`."""
    first_row: int
    """The first position of the prompt, its last apart, whose logits are wanted."""
    note: Callable[[int, Tensor], None]
    """Takes logits (N, V), fp32, of consecutive positions, and the first of these."""

    @property
    def stop(self) -> int:
        """The position after the last of `tokens`."""
        return self.start + len(self.tokens)

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.stop == self.prompt.length


Part = NextPart | PromptPart


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Logits of rows (N, V), fp32, untempered."""

    logits: NDArray[np.float32]
    logprobs: Tensor

    def logprobs_of(self, tokens: Sequence[int]) -> list[float]:
        """The log-probability of each row's token; of one row, of all these tokens."""
        picked = torch.tensor(tokens, device=self.logprobs.device).unsqueeze(1)  # (n, 1)
        return self.logprobs.expand(len(tokens), -1).gather(1, picked).squeeze(1).tolist()

    def pick(self, places: Sequence[int]) -> LogitsRows:
        """Rows in another order; without copying if they are all, in order."""
        if list(places) == list(range(len(self.logits))):
            return self
        return LogitsRows(self.logits[places], self.logprobs[places])

    def some(self, places: slice) -> LogitsRows:
        """Some of the rows, without copying."""
        return LogitsRows(self.logits[places], self.logprobs[places])

    def alone(self) -> LogitsRows:
        """A copy, which keeps no other rows in memory."""
        return LogitsRows(self.logits.copy(), self.logprobs.clone())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a pass gives to draw from."""

    rows: LogitsRows | None
    """Of all parts that have any."""
    places: list[slice | None]
    """Per part, its rows among them: one per sequence, the last of a prompt; None where a prompt goes on."""


class SamplePass:
    """Runs passes on one base model and bank. One thread only."""

    def __init__(self, base_model: BaseModel, bank: Bank, cache: KVCache) -> None:
        self._base_model = base_model
        self._bank = bank
        self._cache = cache
        self._heads_per_key = base_model.num_heads // base_model.num_key_value_heads
        self._rows_multiple = 1
        self.are_samples_alike = True
        """Whether a sample's bits do not depend on its company, as far as attention goes; a GPU promises nothing."""
        if base_model.device.type == "cpu":
            found = find_rows_multiple(base_model.head_dim, BLOCK_TOKENS, torch.get_num_threads())
            if found is None:
                logger.warning("on this processor the bits of a sample may depend on its neighbours")
                self.are_samples_alike = False
            self._rows_multiple = found or ROWS_MULTIPLES[-1]
        self._decoding: DecodeAttention | None = None
        """Of the last pass: mostly the same sequences go on."""

    def run(self, parts: Sequence[Part]) -> Outcome:
        """One forward of parts of at most as many versions as the bank has slots."""
        # Before inference mode: what is made in it can never be written outside, and rows that move belong to the bank.
        rows_of = self._acquire(parts)
        with torch.inference_mode():
            return self._run(parts, rows_of)

    def _run(self, parts: Sequence[Part], rows_of: dict[str, Row]) -> Outcome:
        order = sorted(range(len(parts)), key=lambda index: _place_in_bank(rows_of.get(parts[index].key)))
        ordered = [parts[index] for index in order]
        starts = np.cumsum([0, *(len(part.tokens) for part in ordered)]).tolist()
        device = self._base_model.device
        hidden = self._base_model.forward(
            torch.from_numpy(np.concatenate([part.tokens for part in ordered])).to(device),
            torch.from_numpy(np.concatenate([_positions(part) for part in ordered])).to(device),
            _segments([(part.key, len(part.tokens)) for part in ordered], rows_of),
            self._attention(ordered, starts),
        )  # (T, D)
        of_part = [hidden[start:stop] for start, stop in pairwise(starts)]
        for part, rows in zip(ordered, of_part, strict=True):
            if isinstance(part, PromptPart):
                self._note(part, rows, rows_of)
        drawn = [rows[_drawn(part)] for part, rows in zip(ordered, of_part, strict=True)]
        stops = np.cumsum([len(rows) for rows in drawn]).tolist()
        places = [slice(stop - len(rows), stop) if len(rows) else None for rows, stop in zip(drawn, stops, strict=True)]
        drawn_from = self._logits(drawn, [part.key for part in ordered], rows_of) if any(places) else None
        return Outcome(drawn_from, [places[place] for place in np.argsort(order)])

    def _acquire(self, parts: Sequence[Part]) -> dict[str, Row]:
        keys = list(dict.fromkeys(part.key for part in parts if part.key))
        return dict(zip(keys, self._bank.acquire(keys), strict=True))

    def _attention(self, parts: Sequence[Part], starts: Sequence[int]) -> StepAttention:
        chunks, tokens = [], []
        for part, start in zip(parts, starts, strict=False):
            if isinstance(part, PromptPart):
                chunks.append(PromptChunk(start, part.prompt, part.start, part.stop))
                continue
            tokens += [
                NextToken(start + number, part.prompt, place.index, place.blocks, place.length)
                for number, place in enumerate(part.places)
            ]
        if not tokens:
            self._decoding = None
        elif self._decoding is None or not self._decoding.go_on(tokens):
            self._decoding = DecodeAttention(tokens, self._heads_per_key, self._rows_multiple)
        return StepAttention(self._cache, chunks, self._decoding, heads_per_key=self._heads_per_key)

    def _logits(self, hidden: Sequence[Tensor], keys: Sequence[str], rows_of: dict[str, Row]) -> LogitsRows:
        """Rows for drawing, from the hidden states (n, D) of every part, which may be none."""
        counts = [len(rows) for rows in hidden]
        segments = _segments([pair for pair in zip(keys, counts, strict=True) if pair[1]], rows_of)
        logits = self._base_model.unembed(torch.cat(list(hidden)), segments).float()  # (N, V)
        return LogitsRows(logits.cpu().numpy(), logits.log_softmax(-1))

    def _note(self, part: PromptPart, hidden: Tensor, rows_of: dict[str, Row]) -> None:
        """Tell what is wanted of the prompt's positions, from the hidden states (n, D) of its tokens."""
        end = part.stop - 1 if part.is_last else part.stop
        for start in range(max(part.start, part.first_row), end, LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, end)
            segments = _segments([(part.key, stop - start)], rows_of)
            rows = hidden[start - part.start : stop - part.start]
            part.note(start, self._base_model.unembed(rows, segments).float())


def _place_in_bank(row: Row | None) -> tuple[int, int]:
    """Adapters beside each other in one slab are computed in one batch; the base model's rows come first."""
    return (0, 0) if row is None else (id(row.slab), row.groups.slot)


def _segments(runs: Sequence[tuple[str, int]], rows_of: dict[str, Row]) -> list[Segment]:
    """One segment per version from runs of rows (version key, count) in row order."""
    counts: dict[str, int] = {}
    for key, count in runs:
        counts[key] = counts.get(key, 0) + count
    segments = []
    stop = 0
    for key, count in counts.items():
        start, stop = stop, stop + count
        if key:
            segments.append(Segment(start, stop, rows_of[key].groups))
    return segments


def _positions(part: Part) -> NDArray[np.int64]:
    if isinstance(part, PromptPart):
        return np.arange(part.start, part.stop, dtype=np.int64)
    return np.array([part.prompt.length + place.length for place in part.places], np.int64)


def _drawn(part: Part) -> slice:
    """The rows of a part that tokens are drawn from."""
    if isinstance(part, NextPart):
        return slice(None)
    return slice(-1, None) if part.is_last else slice(0)

"""One pass of sampling: the next token of many sequences of many versions, and parts of prompts, in one forward.

Does not depend on requests or on how tokens are drawn.

Main invariant: the outcome of a part depends only on that part and its version. A failed pass can be run again: it
writes only the keys and values of its own rows, and states to slots that nothing reads before the pass has succeeded.

Dimensions: T rows of the pass, n rows of a part, S sequences of a part, D hidden size, N rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.bank.bank import Bank
from workers.bank.entries import Row
from workers.contract.messages import LOGPROBS_TEMPERATURE_MIN
from workers.host.uploads import on_device
from workers.model.base_model import BaseModel
from workers.model.segments import Segment
from workers.sampling.attention.decode_plan import NextToken
from workers.sampling.attention.step import PromptChunk, Steps
from workers.sampling.delta_states import DeltaStates, StateChunk, StateMove
from workers.sampling.kv_cache import PromptBlocks, SequenceBlocks
from workers.sampling.step_graphs import StepGraphs

LOGIT_ROWS = 256
"""Rows of logits of a prompt that are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPart:
    """The next token of sequences that continue one prompt."""

    key: str
    """Their version's key in the bank; empty for the base model without an adapter."""
    prompt: PromptBlocks
    tokens: NDArray[np.int64]
    """(S,)"""
    logprobs_temperature: float
    """What logits are divided by for log-probabilities at sampled positions, above 0."""
    sequences: Sequence[SequenceBlocks]
    """One per token."""
    moves: Sequence[StateMove] = ()
    """Of a hybrid, how their states move on; one per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPart:
    """Consecutive tokens of a prompt, from the beginning of a block to the end of a block or of the prompt."""

    key: str
    prompt: PromptBlocks
    tokens: NDArray[np.int64]
    """(n,)"""
    start: int
    """Position of the first of `tokens`."""
    logprobs_temperature: float
    """As in `NextPart`; for the position after the prompt."""
    first_row: int
    """The first position of the prompt whose logits are wanted by `note`."""
    note: Callable[[int, Tensor], None]
    """Takes the first of consecutive positions, and their logits (N, V), fp32. Never the prompt's last position."""
    move: StateMove | None = None
    """Of a hybrid, how the prompt's state moves on."""

    @property
    def stop(self) -> int:
        """The position after the last of `tokens`."""
        return self.start + len(self.tokens)

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends with this part."""
        return self.stop == self.prompt.length


Part = NextPart | PromptPart


@dataclass(frozen=True, slots=True)
class LogitsRows:
    """Rows of logits, before temperature, and log-probabilities at the temperatures of their parts.

    Both are on the model's device.
    """

    logits: Tensor
    """(N, V) fp32."""
    logprobs: Tensor
    """(N, V) fp32."""
    is_of_graph: bool = False
    """Whether they are the first rows of what all step graphs write; then the next step overwrites them."""

    @property
    def values(self) -> NDArray[np.float32]:
        """The logits (N, V) in host memory; on a CPU it is theirs."""
        return self.logits.cpu().numpy()

    def logprobs_of(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token in its row."""
        return self.logprobs[rows, tokens].tolist()

    @staticmethod
    def joined(parts: Sequence[LogitsRows]) -> LogitsRows:
        """Return the rows of all parts, in their order; does not copy if there is one part."""
        if len(parts) == 1:
            return parts[0]
        return LogitsRows(torch.cat([part.logits for part in parts]), torch.cat([part.logprobs for part in parts]))

    def pick(self, rows: Sequence[int]) -> LogitsRows:
        """Return rows in another order; does not copy if they are all rows in order."""
        if list(rows) == list(range(len(self.logits))):
            return self
        index = on_device(rows, self.logits.device)
        return LogitsRows(self.logits.index_select(0, index), self.logprobs.index_select(0, index))

    def some(self, rows: slice) -> LogitsRows:
        """Return some of the rows, as views."""
        return LogitsRows(self.logits[rows], self.logprobs[rows])

    def copy(self) -> LogitsRows:
        """Return a copy, so that views do not keep all rows of a pass in memory."""
        return LogitsRows(self.logits.clone(), self.logprobs.clone())


@dataclass(frozen=True, slots=True)
class Outcome:
    """The logits that a pass gives for drawing."""

    logits: LogitsRows | None
    """Of all parts that have any; None if none has."""
    rows_of: list[slice | None]
    """Per part, its rows of `logits`: one per sequence, or that of a prompt's last token. None: the prompt goes on."""


class SamplePass:
    """Runs passes on one base model and bank. Used by one thread only."""

    def __init__(
        self,
        base_model: BaseModel,
        bank: Bank,
        steps: Steps,
        graphs: StepGraphs | None = None,
        states: DeltaStates | None = None,
    ) -> None:
        """Attend by `steps`; passes without prompts run by `graphs`, if there are any. A hybrid has `states`."""
        self._base_model = base_model
        self._bank = bank
        self._steps = steps
        self._graphs = graphs
        self._states = states

    def run(self, parts: Sequence[Part]) -> Outcome:
        """Run one forward of parts with at most as many versions as the bank has slots."""
        # Before inference mode: tensors made in it cannot be written outside, and the bank's rows are.
        bank_rows = self._acquire(parts)
        with torch.inference_mode():
            return self._run(parts, bank_rows)

    def follow(self, parts: Sequence[NextPart], drawn: Tensor) -> LogitsRows | None:
        """Run one forward of next tokens that the host does not have yet; return their rows. None: no graph runs it.

        Parts are in the order of their rows in the last pass, and `drawn` (at least D,) has their token ids on the
        device.
        """
        if self._graphs is None:
            return None
        bank_rows = self._acquire(parts)
        with torch.inference_mode():
            return self._by_graph(self._graphs, parts, bank_rows, drawn)

    def _run(self, parts: Sequence[Part], bank_rows: dict[str, Row]) -> Outcome:
        order = sorted(range(len(parts)), key=lambda index: self._order(parts[index], bank_rows))
        ordered = [parts[index] for index in order]
        starts = np.cumsum([0, *(len(part.tokens) for part in ordered)]).tolist()
        if self._graphs is not None and (logits := self._by_graph(self._graphs, ordered, bank_rows)) is not None:
            return Outcome(logits, [slice(starts[place], starts[place + 1]) for place in np.argsort(order)])
        hidden = self._hidden(ordered, starts, bank_rows)  # (T, D)
        hidden_of = [hidden[start:stop] for start, stop in pairwise(starts)]  # (n, D) each
        for part, rows in zip(ordered, hidden_of, strict=True):
            if isinstance(part, PromptPart):
                self._note(part, rows, bank_rows)
        drawn = [rows[_drawn_rows(part)] for part, rows in zip(ordered, hidden_of, strict=True)]
        stops = np.cumsum([len(rows) for rows in drawn]).tolist()
        rows_of = [
            slice(stop - len(rows), stop) if len(rows) else None for rows, stop in zip(drawn, stops, strict=True)
        ]
        logits = self._logits(drawn, ordered, bank_rows) if any(rows_of) else None
        return Outcome(logits, [rows_of[index] for index in np.argsort(order)])

    def _acquire(self, parts: Sequence[Part]) -> dict[str, Row]:
        keys = list(dict.fromkeys(part.key for part in parts if part.key))
        return dict(zip(keys, self._bank.acquire(keys), strict=True))

    def _order(self, part: Part, bank_rows: dict[str, Row]) -> tuple[bool, int, int]:
        """Return a key that sorts parts as attention wants them; then adapters of one slab together."""
        is_last = self._steps.are_prompts_last and isinstance(part, PromptPart)
        return is_last, *_bank_order(bank_rows.get(part.key))

    def _by_graph(
        self, graphs: StepGraphs, parts: Sequence[Part], bank_rows: dict[str, Row], drawn: Tensor | None = None
    ) -> LogitsRows | None:
        """Return the rows of parts, in their order, with token ids from `drawn` if given; None: run without a graph."""
        if any(isinstance(part, PromptPart) for part in parts):
            return None
        counts = [len(part.tokens) for part in parts]
        token_ids, positions = (np.concatenate(rows) for rows in zip(*map(_inputs, parts), strict=True))
        segments = _segments([(part.key, count) for part, count in zip(parts, counts, strict=True)], bank_rows)
        _, tokens = _places(parts, np.cumsum([0, *counts]).tolist())
        rows = graphs.run(token_ids, positions, tokens, segments, _temperatures(parts, counts), drawn)
        return None if rows is None else LogitsRows(*rows, is_of_graph=True)

    def _hidden(self, parts: Sequence[Part], starts: Sequence[int], bank_rows: dict[str, Row]) -> Tensor:
        """Return the last hidden states (T, D) of parts, in their order."""
        token_ids, positions = (np.concatenate(rows) for rows in zip(*map(_inputs, parts), strict=True))
        segments = _segments([(part.key, len(part.tokens)) for part in parts], bank_rows)
        chunks, tokens = _places(parts, starts)
        device = self._base_model.device
        inputs = on_device(token_ids, device), on_device(positions, device)
        recur = None if self._states is None else self._states.begin(*_moves(parts, starts))
        return self._base_model.forward(*inputs, segments, self._steps.begin(chunks, tokens), recur)

    def _logits(self, hidden: Sequence[Tensor], parts: Sequence[Part], bank_rows: dict[str, Row]) -> LogitsRows:
        """Return the rows for drawing, from the hidden states of every part, (0, D) for a part without any."""
        counts = [len(rows) for rows in hidden]
        runs = [(part.key, count) for part, count in zip(parts, counts, strict=True) if count]
        logits = self._base_model.unembed(torch.cat(list(hidden)), _segments(runs, bank_rows)).float()  # (N, V)
        return LogitsRows(logits, _logprobs(logits, _temperatures(parts, counts)))

    def _note(self, part: PromptPart, hidden: Tensor, bank_rows: dict[str, Row]) -> None:
        """Call `part.note` with the logits that are wanted, from the hidden states (n, D) of the part's tokens."""
        end = part.stop - 1 if part.is_last else part.stop
        for start in range(max(part.start, part.first_row), end, LOGIT_ROWS):
            stop = min(start + LOGIT_ROWS, end)
            segments = _segments([(part.key, stop - start)], bank_rows)
            rows = hidden[start - part.start : stop - part.start]
            part.note(start, self._base_model.unembed(rows, segments).float())


def _temperatures(parts: Sequence[Part], counts: Sequence[int]) -> NDArray[np.float64]:
    """Return the temperature of each row's log-probabilities, of parts with so many rows each."""
    return np.repeat([part.logprobs_temperature for part in parts], counts)


def _logprobs(logits: Tensor, temperatures: NDArray[np.float64]) -> Tensor:
    """Return log_softmax(logits / temperature) (N, V) of rows (N, V) with a temperature each, above 0.

    A row at temperature 1 has the bits of its own log_softmax, whatever the others are at.
    """
    if (temperatures == 1).all():
        return logits.log_softmax(-1)
    divisors = np.maximum(temperatures[:, None], LOGPROBS_TEMPERATURE_MIN)
    return (logits / on_device(divisors, logits.device, logits.dtype)).log_softmax(-1)


def _bank_order(row: Row | None) -> tuple[int, int]:
    """Return a key that sorts adapters of one slab together, so that they are one batch; the base model comes first."""
    return (-1, 0) if row is None else (row.slab.number, row.groups.slot)


def _segments(runs: Sequence[tuple[str, int]], bank_rows: dict[str, Row]) -> list[Segment]:
    """Return a segment for adjacent runs of rows (version key, count) of one version, in row order."""
    segments = []
    stop = 0
    for key, own in groupby(runs, key=lambda run: run[0]):
        start, stop = stop, stop + sum(count for _, count in own)
        if key:
            segments.append(Segment(start, stop, bank_rows[key].groups))
    return segments


def _inputs(part: Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a part's token ids, and their positions."""
    if isinstance(part, PromptPart):
        return part.tokens, np.arange(part.start, part.stop, dtype=np.int64)
    return part.tokens, np.array([part.prompt.length + sequence.length for sequence in part.sequences], np.int64)


def _places(parts: Sequence[Part], starts: Sequence[int]) -> tuple[list[PromptChunk], list[NextToken]]:
    """Return the chunks and the next tokens of parts that begin at these rows."""
    chunks: list[PromptChunk] = []
    tokens: list[NextToken] = []
    for part, start in zip(parts, starts, strict=False):
        if isinstance(part, PromptPart):
            chunks.append(PromptChunk(start, part.prompt, part.start, part.stop))
        else:
            tokens += [NextToken(row, part.prompt, sequence) for row, sequence in enumerate(part.sequences, start)]
    return chunks, tokens


def _moves(parts: Sequence[Part], starts: Sequence[int]) -> tuple[list[StateChunk], list[tuple[int, StateMove]]]:
    """Return the chunks and the next tokens of a hybrid's parts that begin at these rows."""
    chunks: list[StateChunk] = []
    tokens: list[tuple[int, StateMove]] = []
    for part, start in zip(parts, starts, strict=False):
        if isinstance(part, NextPart):
            tokens += enumerate(part.moves, start)
        else:
            assert part.move is not None
            chunks.append(StateChunk(start, start + len(part.tokens), part.move))
    return chunks, tokens


def _drawn_rows(part: Part) -> slice:
    """Return the rows of a part that tokens are drawn from."""
    if isinstance(part, NextPart):
        return slice(None)
    return slice(-1, None) if part.is_last else slice(0)

"""A sample request on a worker: how far it is, what it holds, and what comes out of it.

Knows requests, their sequences and their stops; not passes, versions' weights or who waits for memory.

Main invariant: a sequence's tokens are drawn from its own logits with its own random numbers, whatever the others do.

Dimensions: S sequences, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.contract.capacity import BLOCK_TOKENS, num_blocks_for, num_own_blocks
from workers.contract.messages import (
    ItemError,
    SampledSequence,
    SampleEvent,
    SampleRequest,
    SampleResult,
    StopReason,
    TokenEvent,
    TokenLogprobs,
)
from workers.sampling.block_pool import Prefix
from workers.sampling.drawing import Distribution, NonFiniteLogitsError, check_finite, likeliest, uniforms
from workers.sampling.kv_cache import PromptBlocks
from workers.sampling.prompt_outputs import PromptOutputs
from workers.sampling.sample_pass import LogitsRows, Place
from workers.sampling.stop_strings import StopStrings

NUMBERS_AHEAD = 64
"""Random numbers of a sequence that are made at once."""


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One continuation that has begun and has not ended."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[NDArray[np.intp], NDArray[np.float32]]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of the key-value memory, for its own tokens."""
    _numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def num_cached(self) -> int:
        """Own tokens whose keys and values are there: all but the last."""
        return len(self.tokens) - 1

    @property
    def num_blocks_wanted(self) -> int:
        """Blocks that it needs to go on."""
        return self.num_cached // BLOCK_TOKENS + 1

    @property
    def place(self) -> Place:
        """Where it is, for the pass."""
        return Place(self.index, self.blocks, self.num_cached)

    def number(self, seed: int) -> float:
        """The random number of its next token."""
        position = len(self.tokens)
        if position % NUMBERS_AHEAD == 0:
            self._numbers = uniforms(seed, self.index, position, NUMBERS_AHEAD)
        return float(self._numbers[position % NUMBERS_AHEAD])


class Running:
    """A request from when it was taken until its result."""

    def __init__(self, request: SampleRequest, stop_strings: StopStrings | None, vocab_size: int) -> None:
        """Of a request that was checked."""
        self.request = request
        self.outputs = PromptOutputs(request, vocab_size)
        self.prompt = PromptBlocks([], len(request.prompt))
        self.chain: list[Prefix] = []
        """What is remembered of its prompt, block by block, and held by this; the blocks behind are its own."""
        self.position = 0
        """Tokens of the prompt whose keys and values are there."""
        self.num_cached_tokens = 0
        self.first: LogitsRows | None = None
        """One row that every sequence's first token is drawn from; until the last has begun."""
        self.sequences: list[RunningSequence] = []
        """Those that have begun and not ended."""
        self.num_seats = 0
        """Sequences that may run at a time, with memory reserved to their last token."""
        self.num_begun = 0
        self.engine_s = 0.0
        self.is_over = False
        self.failure: NonFiniteLogitsError | None = None
        """What is wrong with its prompt's logits: it ends with this after the pass, which is the others' as well."""
        self._stop_strings = stop_strings
        self._vocab_size = vocab_size
        self._finished: list[SampledSequence | None] = [None] * request.num_samples

    # ------------------------------------------------------------------ sizes

    @property
    def key(self) -> str:
        """The version's key; empty for the base model."""
        return self.request.version.key

    @property
    def line(self) -> str:
        """In which line it waits: its scope's; without one its adapter's, whichever version it is."""
        version = self.request.version
        return self.request.scope or (version.key if version.spec is None else version.spec.adapter_id)

    @property
    def num_prompt_blocks(self) -> int:
        """Blocks that the prompt takes, remembered ones among them."""
        return num_blocks_for(self.prompt.length)

    @property
    def num_own_blocks(self) -> int:
        """Blocks that each sequence takes at most."""
        return num_own_blocks(self.request.params.max_tokens)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no seat yet."""
        return self.request.num_samples - self.num_begun - self.num_free_seats

    @property
    def num_free_seats(self) -> int:
        """Seats for sequences that have not begun."""
        return self.num_seats - len(self.sequences)

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt's keys and values are there."""
        return self.position == self.prompt.length

    @property
    def num_sampled(self) -> int:
        """Tokens drawn so far."""
        ended = sum(len(sequence.tokens) for sequence in self._finished if sequence is not None)
        return ended + sum(len(sequence.tokens) for sequence in self.sequences)

    def block_tokens(self, block: int) -> bytes:
        """The tokens of a whole block of the prompt."""
        tokens = self.request.prompt[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
        assert len(tokens) == BLOCK_TOKENS
        return tokens.tobytes()

    def use_remembered(self, prefixes: Sequence[Prefix]) -> None:
        """Take blocks that were remembered as the next ones of the prompt."""
        self.chain += prefixes
        self.prompt.blocks.extend(prefix.block for prefix in prefixes)
        self.position += len(prefixes) * BLOCK_TOKENS
        self.num_cached_tokens += len(prefixes) * BLOCK_TOKENS

    @property
    def num_shareable_blocks(self) -> int:
        """Blocks that need not be computed again if they are remembered: all before what logits are wanted of."""
        return min(self.outputs.first_row, self.prompt.length - 1) // BLOCK_TOKENS

    def note(self, row: int, logits: Tensor) -> None:
        """Take in logits (N, V) of the prompt's positions from `row` on, or that they are not finite."""
        try:
            self.outputs.note(row, logits)
        except NonFiniteLogitsError as error:
            self.failure = error.with_traceback(None)  # which holds the pass's tensors

    # ------------------------------------------------------------------ sequences

    def begin(self) -> tuple[list[SampleEvent], list[RunningSequence]]:
        """Begin a sequence on every free seat and draw their first tokens: what to tell, and those that have ended."""
        assert self.first is not None
        begun = [RunningSequence(self.num_begun + number) for number in range(self.num_free_seats)]
        self.num_begun += len(begun)
        self.sequences += begun
        first = self.first
        if self.num_begun == self.request.num_samples:
            self.first = None
        if not begun:
            return [], []
        check_finite(first.logits)
        params = self.request.params
        if params.max_tokens == 0:
            return [], [self._finish(sequence, StopReason.LENGTH) for sequence in begun]
        distribution = Distribution(first.logits[0], params)
        tokens = [distribution.pick(number) for number in self._numbers(begun)]
        return self._take(begun, tokens, first.logprobs_of(tokens), first, [0] * len(begun))

    def numbers(self) -> list[float]:
        """The random numbers of the next token of every running sequence."""
        return self._numbers(self.sequences)

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], rows: LogitsRows, first_row: int
    ) -> tuple[list[SampleEvent], list[RunningSequence]]:
        """Take in what was drawn for every running sequence from its row, the first from `first_row`: what to tell, and
        those that have ended."""
        return self._take(self.sequences, tokens, logprobs, rows, range(first_row, first_row + len(tokens)))

    def _numbers(self, sequences: Sequence[RunningSequence]) -> list[float]:
        params = self.request.params
        return [0.0 if params.temperature == 0 else sequence.number(params.seed) for sequence in sequences]

    def _take(
        self,
        sequences: Sequence[RunningSequence],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        rows: LogitsRows,
        places: Sequence[int],
    ) -> tuple[list[SampleEvent], list[RunningSequence]]:
        request = self.request
        events: list[SampleEvent] = []
        reasons: list[tuple[RunningSequence, StopReason]] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if request.stream:
                events.append(
                    TokenEvent(op_id=request.op_id, sequence_index=sequence.index, token=token, logprob=logprob)
                )
            reason = self._reason(sequence.tokens)
            if reason is not None:
                reasons.append((sequence, reason))
        if request.topk_sample_logprobs:
            self._note_likeliest(sequences, rows, places)
        return events, [self._finish(*ended) for ended in reasons]

    def _note_likeliest(self, sequences: Sequence[RunningSequence], rows: LogitsRows, places: Sequence[int]) -> None:
        logprobs = rows.logprobs.cpu().numpy()
        for place, sequence in zip(places, sequences, strict=True):
            row = logprobs[place]
            tokens = likeliest(row, self.request.topk_sample_logprobs)
            sequence.topk.append((tokens, row[tokens]))

    def _reason(self, tokens: Sequence[int]) -> StopReason | None:
        """Why a sequence ends with its last token, if it does."""
        params = self.request.params
        if tokens[-1] in params.stop_tokens or (self._stop_strings and self._stop_strings.is_completed(tokens)):
            return StopReason.STOP
        return StopReason.LENGTH if len(tokens) == params.max_tokens else None

    def _finish(self, sequence: RunningSequence, reason: StopReason) -> RunningSequence:
        topk = None
        if self.request.topk_sample_logprobs:
            shape = (len(sequence.tokens), min(self.request.topk_sample_logprobs, self._vocab_size))
            topk = TokenLogprobs(
                token_ids=np.array([tokens for tokens, _ in sequence.topk], np.int32).reshape(shape),
                logprobs=np.array([logprobs for _, logprobs in sequence.topk], np.float32).reshape(shape),
            )
        self._finished[sequence.index] = SampledSequence(
            tokens=np.array(sequence.tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            stop_reason=reason,
            topk=topk,
        )
        self.sequences.remove(sequence)
        return sequence

    # ------------------------------------------------------------------ result

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence is not None for sequence in self._finished)

    def result(self, error: ItemError | None = None) -> SampleResult:
        """What the request comes to, finished or failed."""
        outputs = self.outputs
        return SampleResult(
            op_id=self.request.op_id,
            sequences=() if error else tuple(sequence for sequence in self._finished if sequence is not None),
            prompt_logprobs=None if error else outputs.logprobs,
            topk_prompt=None if error else outputs.topk,
            prompt_target_logprobs=None if error else outputs.targets,
            prompt_alt_tokens=None if error else outputs.alternatives,
            error=error,
            num_prompt_tokens=self.position,
            num_cached_tokens=self.num_cached_tokens,
            num_sampled_tokens=self.num_sampled,
            engine_s=self.engine_s,
        )

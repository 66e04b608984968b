"""A sample request on a worker, from its admission to its result; its sequences, and the strings that stop them.

Does not depend on passes, on the bank, or on the order in which requests get slots and memory.

Main invariants: a sequence's tokens are drawn from its own logits with its own random numbers, whatever else runs. Stop
strings are searched in the decoded text of the last tokens, so a string is found for every way in which tokens divide
it, also inside a token's text or a character's bytes.

Dimensions: V vocabulary, N rows of logits, S sequences, k likeliest tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from workers.contract.capacity import num_own_blocks
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
from workers.sampling.delta_states import StateOwner
from workers.sampling.device_drawing import likeliest_of
from workers.sampling.drawing import NonFiniteLogitsError, uniforms
from workers.sampling.kv_cache import SequenceBlocks
from workers.sampling.prompts import Prompt, PromptOutputs
from workers.sampling.sample_pass import LogitsRows

_TURNS = itertools.count()
NUMBERS_AHEAD = 64
"""Random numbers of a sequence that are generated at once."""
SLACK_TOKENS = 8
"""Tokens decoded in addition to a stop string's length in bytes: the first ones may decode differently without the
tokens before them, and some have no text."""


class StopStrings:
    """The stop strings of one request."""

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(string.encode()) for string in strings) + SLACK_TOKENS

    def is_completed(self, tokens: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string; the text before it has none."""
        text: str = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a model directory. Raises ValueError if it has no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError("this base model has no tokenizer.json, so stop strings cannot be used; use stop tokens")
    return Tokenizer.from_file(str(path))


@dataclass(slots=True, eq=False)
class ActiveSequence:
    """A sequence that has begun and has not ended."""

    index: int
    block_tokens: int
    """Tokens of a block."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Key-value blocks of its own tokens."""
    state: StateOwner | None = None
    """Of a hybrid, from its first decode step on; that reads the prompt's."""
    turn: int = field(default_factory=lambda: next(_TURNS))
    """Of two sequences the one with the lower number has not decoded for longer."""
    _numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    _numbers_from: int = -1
    """The position of the first of these numbers; -1: there are none yet."""

    @property
    def num_cached(self) -> int:
        """Own tokens whose keys and values are computed: all but the last."""
        return len(self.tokens) - 1

    def num_blocks_wanted(self, num_unread: int = 0) -> int:
        """Return the blocks that its next decode step needs, with so many tokens drawn that the host has not read."""
        return (self.num_cached + num_unread) // self.block_tokens + 1

    def location(self, num_unread: int = 0) -> SequenceBlocks:
        """Return the same blocks as attention sees them."""
        return SequenceBlocks(self.index, self.blocks, self.num_cached + num_unread)

    @property
    def has_own_state(self) -> bool:
        """Whether it has decoded in a step, of a hybrid, and so does not read the prompt's state any more."""
        return self.state is not None and self.state.current is not None

    def begin_state(self, state: StateOwner) -> StateOwner:
        """Own this state from now on; return it."""
        self.state = state
        return state

    def end_turn(self) -> None:
        """Go behind all other sequences."""
        self.turn = next(_TURNS)

    def add_block(self, block: int) -> None:
        """Append a block for further tokens."""
        self.blocks.append(block)

    def next_number(self, seed: int, num_unread: int = 0) -> float:
        """Return the random number of its next token, behind so many that the host has not read."""
        position = len(self.tokens) + num_unread
        first = position - position % NUMBERS_AHEAD
        if first != self._numbers_from:
            self._numbers, self._numbers_from = uniforms(seed, self.index, first, NUMBERS_AHEAD), first
        return float(self._numbers[position - first])


class ActiveRequest:
    """A request that waits, runs its prompt, or decodes."""

    def __init__(
        self, request: SampleRequest, stop_strings: StopStrings | None, vocab_size: int, block_tokens: int
    ) -> None:
        """Take a request that was checked; `block_tokens`: of a key-value block."""
        self.request = request
        self.outputs = PromptOutputs(request, vocab_size)
        # The last token, and tokens before logits that are wanted, are computed even if their block is shared.
        num_shareable = min(self.outputs.first_row, len(request.prompt) - 1) // block_tokens
        self.prompt = Prompt(request.prompt, num_shareable, block_tokens)
        self._block_tokens = block_tokens
        self.state: StateOwner | None = None
        """Of a hybrid's prompt, from its first slot on."""
        self.sequences: list[ActiveSequence] = []
        self.num_slots = 0
        """Sequence slots that it has."""
        self.num_begun = 0
        """Sequences that have begun, ended ones included."""
        self.engine_s = 0.0
        self._began_s: float | None = None
        self._prefilled_s = self._ended_s = 0.0
        """Ends of the last pass with a part of the prompt, and of the last pass, by the worker's clock."""
        self.is_over = False
        self.failure: NonFiniteLogitsError | None = None
        """Set when the prompt's logits are not finite: the request fails after the pass, which others share."""
        self.first: LogitsRows | None = None
        """The row (1, V) that the first tokens of sequences without a slot are drawn from; until the last has begun."""
        self._stop_strings = stop_strings
        self._vocab_size = vocab_size
        self._finished: list[SampledSequence | None] = [None] * request.num_samples

    @property
    def key(self) -> str:
        """The version's key; empty for the base model."""
        return self.request.version.key

    @property
    def scope(self) -> str:
        """The scope that its slots count for: the request's; without one, the adapter of its version."""
        version = self.request.version
        return self.request.scope or (version.key if version.spec is None else version.spec.adapter_id)

    @property
    def logprobs_temperature(self) -> float:
        """The temperature of the log-probabilities at sampled positions."""
        return (self.request.params.temperature or 1.0) if self.request.scales_logprobs else 1.0

    @property
    def num_own_blocks(self) -> int:
        """Blocks that each sequence takes at most, its prompt not counted."""
        return num_own_blocks(self.request.params.max_tokens, self._block_tokens)

    @property
    def num_waiting(self) -> int:
        """Sequences that have no slot yet."""
        return self.request.num_samples - self.num_begun - self.num_free_slots

    @property
    def num_free_slots(self) -> int:
        """Slots for sequences that have not begun."""
        return self.num_slots - len(self.sequences)

    @property
    def can_begin(self) -> bool:
        """Whether a sequence that had no slot when the prompt was computed has one now."""
        return self.first is not None and self.num_free_slots > 0

    @property
    def num_sampled(self) -> int:
        """Tokens drawn so far."""
        ended = sum(len(sequence.tokens) for sequence in self._finished if sequence is not None)
        return ended + sum(len(sequence.tokens) for sequence in self.sequences)

    def begin_state(self, state: StateOwner) -> None:
        """Own the state of the prompt from now on."""
        self.state = state

    def grant_slot(self) -> None:
        """Take one more slot."""
        self.num_slots += 1

    def return_slot(self) -> None:
        """Return the slot of an ended sequence."""
        self.num_slots -= 1

    def ran(self, engine_s: float, began_s: float, ended_s: float) -> None:
        """Add a pass to the times of this request. `engine_s`: its part of that time."""
        self.engine_s += engine_s
        if self._began_s is None:
            self._began_s = began_s
        if not self.num_begun:
            self._prefilled_s = ended_s
        self._ended_s = ended_s

    def end(self) -> None:
        """Mark the request as over; it runs in no further pass."""
        self.is_over = True

    def note(self, row: int, logits: Tensor) -> None:
        """Take logits (N, V) of the prompt's positions from `row` on; record a failure if they are not finite."""
        try:
            self.outputs.note(row, logits)
        except NonFiniteLogitsError as error:
            self.failure = error.with_traceback(None)  # a traceback would keep the pass's tensors in memory

    def prompt_computed(self, first: LogitsRows) -> None:
        """Take the logits (1, V) of the prompt's last position; keep a copy for sequences that have no slot yet."""
        if self.num_waiting:
            self.first = first.copy()

    def begin(self) -> list[ActiveSequence]:
        """Begin a sequence in every free slot; return these sequences."""
        begun = [ActiveSequence(self.num_begun + number, self._block_tokens) for number in range(self.num_free_slots)]
        self.num_begun += len(begun)
        self.sequences += begun
        if self.num_begun == self.request.num_samples:
            self.first = None
        return begun

    def next_numbers(self, sequences: Sequence[ActiveSequence], num_unread: int = 0) -> list[float]:
        """Return the random number of each sequence's next token; none if the request wants no token."""
        params = self.request.params
        if params.max_tokens == 0:
            return []
        if params.temperature == 0:
            return [0.0] * len(sequences)
        return [sequence.next_number(params.seed, num_unread) for sequence in sequences]

    def goes_on_with(self, sequences: Sequence[ActiveSequence]) -> bool:
        """Return whether a step behind the one that draws for these sequences has the same ones, unless one stops.

        And whether nothing needs that step's logits on the host.
        """
        return (
            not self.is_over
            and self.sequences == sequences
            and not self.can_begin
            and not self.request.topk_sample_logprobs
            and all(len(sequence.tokens) + 1 < self.request.params.max_tokens for sequence in sequences)
        )

    def append(
        self,
        sequences: Sequence[ActiveSequence],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        logits: LogitsRows,
        rows: slice,
    ) -> tuple[list[SampleEvent], list[ActiveSequence]]:
        """Append a drawn token to each of some sequences that still run; return events, and sequences that ended.

        `rows` of `logits` gave the tokens: one row per sequence, or one that all of them begin with. A request that
        wants no token has none, and its sequences end.
        """
        request = self.request
        if request.params.max_tokens == 0:
            return [], [self._finish(sequence, StopReason.LENGTH) for sequence in sequences]
        events: list[SampleEvent] = []
        reasons: list[tuple[ActiveSequence, StopReason]] = []
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            if self._finished[sequence.index] is not None:
                continue  # it stopped while this token was drawn
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if request.stream:
                events.append(
                    TokenEvent(op_id=request.op_id, sequence_index=sequence.index, token=token, logprob=logprob)
                )
            reason = self._stop_reason(sequence.tokens)
            if reason is not None:
                reasons.append((sequence, reason))
        if request.topk_sample_logprobs:
            self._note_likeliest(sequences, logits.some(rows))
        return events, [self._finish(*ended) for ended in reasons]

    def _note_likeliest(self, sequences: Sequence[ActiveSequence], rows: LogitsRows) -> None:
        found = likeliest_of(rows.logprobs, self.request.topk_sample_logprobs)  # (S, k), or (1, k) for all
        shape = (len(sequences), found.token_ids.shape[1])
        lists = np.broadcast_to(found.token_ids, shape), np.broadcast_to(found.logprobs, shape)
        for tokens, logprobs, sequence in zip(*lists, sequences, strict=True):
            sequence.topk.append((tokens, logprobs))

    def _stop_reason(self, tokens: Sequence[int]) -> StopReason | None:
        """Return why a sequence ends with its last token; None if it goes on."""
        params = self.request.params
        if tokens[-1] in params.stop_tokens or (self._stop_strings and self._stop_strings.is_completed(tokens)):
            return StopReason.STOP
        return StopReason.LENGTH if len(tokens) == params.max_tokens else None

    def _finish(self, sequence: ActiveSequence, reason: StopReason) -> ActiveSequence:
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

    @property
    def is_finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence is not None for sequence in self._finished)

    def result(self, error: ItemError | None = None) -> SampleResult:
        """Return the request's result; with `error`, one that failed."""
        outputs, phase_s = self.outputs, {}
        if self._began_s is not None:
            phase_s = {"prefill": self._prefilled_s - self._began_s, "decode": self._ended_s - self._prefilled_s}
        return SampleResult(
            op_id=self.request.op_id,
            sequences=() if error else tuple(sequence for sequence in self._finished if sequence is not None),
            prompt_logprobs=None if error else outputs.logprobs,
            topk_prompt=None if error else outputs.topk,
            prompt_target_logprobs=None if error else outputs.targets,
            prompt_alt_tokens=None if error else outputs.alternatives,
            error=error,
            num_prompt_tokens=self.prompt.num_computed,
            num_cached_tokens=self.prompt.num_cached_tokens,
            num_sampled_tokens=self.num_sampled,
            engine_s=self.engine_s,
            phase_s=phase_s,
        )

"""From sampled tokens to the text of a choice, whole or as it grows, and the log-probabilities beside it.

Knows neither JSON nor requests. Main invariant: a choice's pieces, put together, are its whole text, and every token is
told of once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.doors.openai.texts import TextModel
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that could stand somewhere, and its natural log-probability there."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """A token of a choice, or of its prompt."""

    token: int
    logprob: float | None
    """None for a prompt's first token, which nothing precedes."""
    likeliest: tuple[Likely, ...]
    """The likeliest first."""
    offset: int
    """Characters of the choice's text before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What a choice has grown by."""

    text: str
    infos: tuple[TokenInfo, ...]


class Choice:
    """One sampled sequence on its way to text."""

    def __init__(self, model: TextModel, stops: Sequence[str], *, offset: int, is_empty: bool) -> None:
        """`offset`: characters of its text that come before it, of an echoed prompt. `is_empty`: no token is wanted."""
        self._is_empty = is_empty
        self._detokenizer = model.detokenizer(stops)
        self._offset = offset
        self.num_tokens = 0

    def push(self, token: int, logprob: float, likeliest: tuple[Likely, ...] = ()) -> Piece:
        """The next token."""
        if self._is_empty:
            return Piece(text="", infos=())
        info = TokenInfo(token=token, logprob=logprob, likeliest=likeliest, offset=self._offset)
        self.num_tokens += 1
        text = self._detokenizer.push(token)
        self._offset += len(text)
        return Piece(text=text, infos=(info,))

    def rest(self, sequence: ops_pb.SampledSequence, num_pushed: int) -> Iterator[Piece]:
        """The tokens that were not pushed one by one, and what the text was still waiting for."""
        tokens, logprobs = from_tensor(sequence.tokens).tolist(), from_tensor(sequence.logprobs).tolist()
        for place in range(num_pushed, len(tokens)):
            yield self.push(tokens[place], logprobs[place], likeliest_at(sequence, place))
        yield Piece(text=self._detokenizer.finish(), infos=())

    def finish_reason(self, sequence: ops_pb.SampledSequence) -> str:
        """Why it ended."""
        is_stop = sequence.stop_reason == ops_pb.STOP_REASON_STOP and not self._is_empty
        return "stop" if is_stop or self._detokenizer.is_stopped else "length"


def joined(pieces: Sequence[Piece]) -> Piece:
    """All of them as one."""
    return Piece(text="".join(each.text for each in pieces), infos=tuple(i for each in pieces for i in each.infos))


def likeliest_at(sequence: ops_pb.SampledSequence, place: int) -> tuple[Likely, ...]:
    """The likeliest tokens at a place of a sampled sequence, if they were asked for."""
    return _row(sequence.topk, place) if sequence.HasField("topk") else ()


def prompt_infos(prompt: Sequence[int], result: ops_pb.SampleResult, model: TextModel) -> tuple[TokenInfo, ...]:
    """A prompt's tokens as the first ones of a choice, with the log-probabilities that were asked for."""
    logprobs = from_tensor(result.prompt_logprobs).tolist()
    pieces, offset, infos = model.detokenizer(is_prompt=True), 0, []
    for place, token in enumerate(prompt):
        likeliest = _row(result.topk_prompt, place) if place and result.HasField("topk_prompt") else ()
        logprob = None if math.isnan(logprobs[place]) else logprobs[place]
        infos.append(TokenInfo(token=token, logprob=logprob, likeliest=likeliest, offset=offset))
        offset += len(pieces.push(token))
    return tuple(infos)


def _row(table: ops_pb.TokenLogprobs, place: int) -> tuple[Likely, ...]:
    tokens: NDArray[np.int32] = from_tensor(table.token_ids)[place]  # (k,)
    logprobs: NDArray[np.float32] = from_tensor(table.logprobs)[place]  # (k,)
    return tuple(Likely(token, logprob) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True))

"""From sampled tokens to the text of a choice, whole or in pieces, with log-probabilities.

Depends neither on JSON nor on requests. Main invariant: a choice's joined pieces are its whole text, and have every
token once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.doors.openai.text_models import TextModel
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb


@dataclass(frozen=True, slots=True)
class TopToken:
    """One of the most likely tokens at a position, with its natural log-probability."""

    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """A token of a choice, or of its prompt."""

    token: int
    logprob: float | None
    """None for the first token of a prompt."""
    top: tuple[TopToken, ...]
    """Most likely tokens at its position, the most likely first; empty if not requested."""
    offset: int
    """Characters of the choice's text before the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a choice: text, and the tokens that were sampled for it."""

    text: str
    infos: tuple[TokenInfo, ...]


class Choice:
    """Converts one sampled sequence to text."""

    def __init__(self, model: TextModel, stops: Sequence[str], *, offset: int, is_empty: bool) -> None:
        """Begin after `offset` characters of an echoed prompt. With `is_empty`, drop all tokens."""
        self._is_empty = is_empty
        self._detokenizer = model.detokenizer(stops)
        self._offset = offset
        self.num_tokens = 0

    def push(self, token: int, logprob: float, top: tuple[TopToken, ...] = ()) -> Piece:
        """Add the next token; return the piece that became final."""
        if self._is_empty:
            return Piece(text="", infos=())
        offset = self._offset + self._detokenizer.num_held
        info = TokenInfo(token=token, logprob=logprob, top=top, offset=offset)
        self.num_tokens += 1
        text = self._detokenizer.push(token)
        self._offset += len(text)
        return Piece(text=text, infos=(info,))

    def rest(self, sequence: ops_pb.SampledSequence, num_pushed: int) -> Iterator[Piece]:
        """Yield the pieces of the tokens from index `num_pushed` on, and the text that was held back."""
        tokens, logprobs = from_tensor(sequence.tokens).tolist(), from_tensor(sequence.logprobs).tolist()
        for index in range(num_pushed, len(tokens)):
            yield self.push(tokens[index], logprobs[index], _top_tokens(sequence, index))
        yield Piece(text=self._detokenizer.finish(), infos=())

    def finish_reason(self, sequence: ops_pb.SampledSequence) -> str:
        """Return the reason of its end."""
        is_stop = sequence.stop_reason == ops_pb.STOP_REASON_STOP and not self._is_empty
        return "stop" if is_stop or self._detokenizer.is_stopped else "length"


def joined(pieces: Sequence[Piece]) -> Piece:
    """Join pieces into one."""
    return Piece(text="".join(each.text for each in pieces), infos=tuple(i for each in pieces for i in each.infos))


def prompt_infos(
    prompt: Sequence[int], text: str, result: ops_pb.SampleResult, model: TextModel
) -> tuple[TokenInfo, ...]:
    """Return the tokens of a prompt, and of its text, as the first ones of a choice, with the log-probabilities."""
    logprobs = from_tensor(result.prompt_logprobs).tolist()
    pieces, offset, infos = model.prompt_detokenizer(prompt, text), 0, []
    for index, token in enumerate(prompt):
        top = _row(result.topk_prompt, index) if index and result.HasField("topk_prompt") else ()
        logprob = None if math.isnan(logprobs[index]) else logprobs[index]
        infos.append(TokenInfo(token=token, logprob=logprob, top=top, offset=offset))
        offset += len(pieces.push(token))
    return tuple(infos)


def _top_tokens(sequence: ops_pb.SampledSequence, index: int) -> tuple[TopToken, ...]:
    return _row(sequence.topk, index) if sequence.HasField("topk") else ()


def _row(table: ops_pb.TokenLogprobs, index: int) -> tuple[TopToken, ...]:
    tokens: NDArray[np.int32] = from_tensor(table.token_ids)[index]  # (k,)
    logprobs: NDArray[np.float32] = from_tensor(table.logprobs)[index]  # (k,)
    return tuple(TopToken(token, logprob) for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True))

"""The JSON of an answer: whole, or as a stream of chunks. What the two endpoints have apart is their `Style`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from coordinator.doors.http.rendering import written
from coordinator.doors.openai.choices import (
    Choice,
    Likely,
    Piece,
    TokenInfo,
    joined,
    prompt_infos,
)
from coordinator.doors.openai.errors import error_body
from coordinator.doors.openai.runs import Event, check
from coordinator.doors.openai.texts import TextModel
from coordinator.doors.tinker.errors import refusal_of
from tinkerpool.v1 import operations_pb2 as ops_pb

_INLINE_TOKENS_MAX = 2048
"""Of more tokens the text is made beside the event loop."""
LOGPROB_MIN = -9999.0
"""JSON has no infinity; OpenAI writes this for what cannot be."""
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Style(Protocol):
    """How an endpoint writes a choice."""

    kind: str
    """What an answer's id begins with."""
    prompt_param: str
    """Which parameter has the prompt."""
    whole_object: str
    chunk_object: str

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """A whole choice."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """A choice of a chunk that comes before all its text, if there is one."""

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """A choice of a chunk that has more text."""

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """A choice of its last chunk."""

    def logprobs(self, infos: Sequence[TokenInfo], num_likeliest: int, model: TextModel) -> Any:
        """The log-probabilities of tokens."""


class CompletionStyle:
    """POST /completions."""

    kind = "cmpl"
    prompt_param = "prompt"
    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int) -> None:
        """Nothing."""

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """More text."""
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """No text, and the reason."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def logprobs(self, infos: Sequence[TokenInfo], num_likeliest: int, model: TextModel) -> dict[str, Any]:
        """Four lists, one entry for each token."""
        texts = [model.token_text(info.token)[0] for info in infos]
        return {
            "tokens": texts,
            "token_logprobs": [_number(info.logprob) for info in infos],
            "top_logprobs": [_by_text(info, model) for info in infos] if num_likeliest else None,
            "text_offset": [info.offset for info in infos],
        }


class ChatStyle:
    """POST /chat/completions."""

    kind = "chatcmpl"
    prompt_param = "messages"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """A whole choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """More text."""
        return {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """No text, and the reason."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def logprobs(self, infos: Sequence[TokenInfo], num_likeliest: int, model: TextModel) -> dict[str, Any]:
        """An object for each token."""
        content = [
            _token(model, info.token, info.logprob)
            | {"top_logprobs": [_token(model, each.token, each.logprob) for each in info.likeliest]}
            for info in infos
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What an answer depends on."""

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    echoes: Sequence[str] | None
    """The prompts' texts, to begin the choices with; None: they do not."""
    num_choices: int
    """For each prompt."""
    max_tokens: int
    """For each choice; 0: as many as the model takes."""
    stops: Sequence[str]
    num_likeliest: int | None
    """Alternatives beside each token's log-probability; None: no log-probabilities."""
    is_empty: bool
    """No tokens are wanted: the prompt alone."""
    wants_usage: bool
    """A stream tells of the tokens used at its end."""

    @property
    def is_streamed_late(self) -> bool:
        """What is asked for comes with the finished sample alone: then a stream's chunks come all at once."""
        return bool(self.num_likeliest) or (self.num_likeliest is not None and self.echoes is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one call, as far as it is known before anything is sampled."""

    name: str
    """A part of its id."""
    created_s: int
    model_name: str
    model: TextModel
    style: Style
    asked: Asked

    async def whole(self, operations: Sequence[ops_pb.Operation]) -> bytes:
        """The body, of the prompts' finished samples."""
        if sum(operation.num_tokens for operation in operations) > _INLINE_TOKENS_MAX:
            return await asyncio.to_thread(self._whole, operations)
        return self._whole(operations)

    async def stream(self, first: Event, events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
        """The body as server-sent events. A failure is the last of them."""
        growing: dict[int, _Growing] = {}
        try:
            async with aclosing(events):
                for index in range(len(self.asked.prompts) * self.asked.num_choices):
                    growing[index] = _Growing(self._choice(index // self.asked.num_choices))
                    if (begin := self.style.begin(index)) is not None:
                        yield self._chunk(begin)
                    if self.asked.echoes is not None and not self.asked.is_streamed_late:
                        echo = Piece(text=self.asked.echoes[index // self.asked.num_choices], infos=())
                        yield self._chunk(self.style.grown(index, echo, None))
                operations: list[ops_pb.Operation] = []
                happened: Event | None = first
                while happened is not None:
                    place, event = happened
                    if event.HasField("operation"):
                        check(event.operation)
                        operations.append(event.operation)
                        for chunk in self._rest(place, event.operation, growing):
                            yield chunk
                    elif not self.asked.is_streamed_late:
                        index = place * self.asked.num_choices + event.token.sequence_index
                        piece = growing[index].push(event.token.token, event.token.logprob)
                        if piece.text or (piece.infos and self.asked.num_likeliest is not None):
                            yield self._chunk(self.style.grown(index, piece, self._logprobs(piece.infos)))
                    happened = await anext(events, None)
                if self.asked.wants_usage:
                    num_tokens = sum(each.choice.num_tokens for each in growing.values())
                    yield _event(self._frame(self.style.chunk_object, [], self._usage(operations, num_tokens)))
            yield DONE
        except Exception as error:  # noqa: BLE001  # the status is sent: it can be told here alone
            yield _event(error_body(refusal_of(error, "a stream")))

    def _rest(self, place: int, operation: ops_pb.Operation, growing: dict[int, _Growing]) -> list[bytes]:
        """The last chunks of a prompt's choices."""
        chunks = []
        for number, sequence in enumerate(operation.sample.sequences):
            index = place * self.asked.num_choices + number
            each = growing[index]
            pieces = list(each.choice.rest(sequence, each.num_pushed))
            if self.asked.is_streamed_late:
                pieces.insert(0, self._echo(place, operation))
            chunks += [
                self._chunk(self.style.grown(index, piece, self._logprobs(piece.infos) if piece.infos else None))
                for piece in pieces
                if piece.text or (piece.infos and self.asked.num_likeliest is not None)
            ]
            chunks.append(self._chunk(self.style.end(index, each.choice.finish_reason(sequence))))
        return chunks

    def _whole(self, operations: Sequence[ops_pb.Operation]) -> bytes:
        choices: list[dict[str, Any]] = []
        num_tokens = 0
        for place, operation in enumerate(operations):
            echo = self._echo(place, operation)
            for sequence in operation.sample.sequences:
                choice = self._choice(place)
                piece = joined([echo, *choice.rest(sequence, 0)])
                num_tokens += choice.num_tokens
                reason = choice.finish_reason(sequence)
                choices.append(self.style.whole(len(choices), piece, self._logprobs(piece.infos), reason))
        body = self._frame(self.style.whole_object, choices, self._usage(operations, num_tokens))
        return written(body)

    def _choice(self, place: int) -> Choice:
        asked = self.asked
        offset = len(asked.echoes[place]) if asked.echoes is not None else 0
        return Choice(self.model, asked.stops, offset=offset, is_empty=asked.is_empty)

    def _echo(self, place: int, operation: ops_pb.Operation) -> Piece:
        """What a prompt's choices begin with."""
        if self.asked.echoes is None:
            return Piece(text="", infos=())
        infos: tuple[TokenInfo, ...] = ()
        if self.asked.num_likeliest is not None:
            infos = prompt_infos(self.asked.prompts[place], operation.sample, self.model)
        return Piece(text=self.asked.echoes[place], infos=infos)

    def _logprobs(self, infos: Sequence[TokenInfo]) -> Any:
        number = self.asked.num_likeliest
        return self.style.logprobs(infos, number, self.model) if number is not None else None

    def _usage(self, operations: Sequence[ops_pb.Operation], num_tokens: int) -> dict[str, Any]:
        num_prompt_tokens = sum(len(prompt) for prompt in self.asked.prompts)
        num_cached = sum(operation.sample.num_cached_prompt_tokens for operation in operations)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return _event(self._frame(self.style.chunk_object, [choice], None))

    def _frame(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": f"{self.style.kind}-{self.name}",
            "object": kind,
            "created": self.created_s,
            "model": self.model_name,
            "system_fingerprint": _fingerprint(self.model.fingerprint),
            "choices": choices,
            **({"usage": usage} if usage is not None or self.asked.wants_usage else {}),
        }


@dataclass(slots=True)
class _Growing:
    """A choice of a stream."""

    choice: Choice
    num_pushed: int = 0

    def push(self, token: int, logprob: float) -> Piece:
        self.num_pushed += 1
        return self.choice.push(token, logprob)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODER.encode(body).encode() + b"\n\n"


def _fingerprint(numerics: str) -> str:
    return f"fp_{hashlib.sha256(numerics.encode()).hexdigest()[:10]}"


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)


def _by_text(info: TokenInfo, model: TextModel) -> dict[str, float] | None:
    """The likeliest tokens and the token itself. Of tokens with the same text the likeliest stands."""
    if info.logprob is None:
        return None
    found: dict[str, float] = {}
    for each in (*info.likeliest, Likely(info.token, info.logprob)):
        found.setdefault(model.token_text(each.token)[0], max(each.logprob, LOGPROB_MIN))
    return found


def _token(model: TextModel, token: int, logprob: float | None) -> dict[str, Any]:
    text, data = model.token_text(token)
    return {"token": text, "bytes": list(data) if data is not None else None, "logprob": _number(logprob)}

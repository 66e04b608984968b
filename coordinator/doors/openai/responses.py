"""The JSON of a response: whole, or a stream of chunks. A `Style` has the differences between the two endpoints.

Dicts, not the types of the `openai` package, which are made for parsing and take half a second to import. The tests
parse responses with that package.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from coordinator.doors.door import to_refusal
from coordinator.doors.http.calls import INLINE_JSON_BYTES_MAX, Call
from coordinator.doors.http.responses import ENCODER, encode_json
from coordinator.doors.openai.choices import Choice, Piece, TokenInfo, TopToken, joined, prompt_infos
from coordinator.doors.openai.errors import error_body
from coordinator.doors.openai.samples import Event, check
from coordinator.doors.openai.text_models import TextModel
from tinkerpool.v1 import operations_pb2 as ops_pb

_ENTRY_BYTES = 16
"""Of a token or a log-probability in JSON, by which a response takes turns: at least, and 10 microseconds to make."""
SLICE_ENTRIES = 512
"""Tokens and log-probabilities of a stream that are made at a time, in 5 ms: 50 kB of JSON, about as much as a
connection buffers. While its client does not read, no more are made."""
LOGPROB_MIN = -9999.0
"""OpenAI's number for minus infinity, which JSON does not have."""
DONE = b"data: [DONE]\n\n"
Made = TypeVar("Made")


class Style(Protocol):
    """The JSON of an endpoint's choices."""

    kind: str
    """Prefix of a response's id."""
    prompt_param: str
    """Name of the parameter with the prompt."""
    whole_object: str
    chunk_object: str

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return a whole choice."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a stream's first chunk, before any text; None if there is no such chunk."""

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """Return the choice of a chunk with more text."""

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """Return the choice of its last chunk."""

    def logprobs(self, infos: Sequence[TokenInfo], num_top: int, model: TextModel) -> Any:
        """Return the log-probabilities of tokens."""


class CompletionStyle:
    """POST /completions."""

    kind = "cmpl"
    prompt_param = "prompt"
    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return a whole choice."""
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int) -> None:
        """Return None: the first chunk has text."""

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """Return a chunk's choice with more text."""
        return {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """Return the last chunk's choice: no text, and the reason."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def logprobs(self, infos: Sequence[TokenInfo], num_top: int, model: TextModel) -> dict[str, Any]:
        """Return four lists with one entry for each token."""
        texts = [model.token_text(info.token)[0] for info in infos]
        return {
            "tokens": texts,
            "token_logprobs": [_number(info.logprob) for info in infos],
            "top_logprobs": [_by_text(info, model) for info in infos] if num_top else None,
            "text_offset": [info.offset for info in infos],
        }


class ChatStyle:
    """POST /chat/completions."""

    kind = "chatcmpl"
    prompt_param = "messages"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, index: int, piece: Piece, logprobs: Any, reason: str) -> dict[str, Any]:
        """Return a whole choice."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def begin(self, index: int) -> dict[str, Any]:
        """Return the role of the message."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def grown(self, index: int, piece: Piece, logprobs: Any) -> dict[str, Any]:
        """Return a chunk's choice with more text."""
        return {"index": index, "delta": {"content": piece.text}, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, reason: str) -> dict[str, Any]:
        """Return the last chunk's choice: no text, and the reason."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": reason}

    def logprobs(self, infos: Sequence[TokenInfo], num_top: int, model: TextModel) -> dict[str, Any]:
        """Return an object for each token."""
        content = [
            _token(model, info.token, info.logprob)
            | {"top_logprobs": [_token(model, each.token, each.logprob) for each in info.top]}
            for info in infos
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """The parameters of a call that its response depends on."""

    prompts: Sequence[Sequence[int]]
    """Token ids."""
    echoes: Sequence[str] | None
    """Texts of the prompts, which the choices begin with; None: no echo."""
    num_choices: int
    """Choices for each prompt."""
    max_tokens: int
    """Limit for each choice; 0: as many as the model takes."""
    stops: Sequence[str]
    num_top: int | None
    """Most likely tokens at each position, with log-probabilities; None: no log-probabilities at all."""
    is_empty: bool
    """Return the prompt alone, without sampled tokens."""
    wants_usage: bool
    """End a stream with the number of tokens."""

    @property
    def num_entries(self) -> int:
        """Tokens and log-probabilities that a position has."""
        return 2 + self.num_top if self.num_top is not None else 1

    @property
    def is_streamed_late(self) -> bool:
        """Whether a stream waits for the finished sample, which alone has prompt log-probabilities and top tokens."""
        return bool(self.num_top) or (self.num_top is not None and self.echoes is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseWriter:
    """Writes the response of one call."""

    call: Call
    name: str
    """Unique part of the response's id."""
    created_s: int
    model_name: str
    model: TextModel
    style: Style
    options: ResponseOptions

    async def whole(self, operations: Sequence[ops_pb.Operation]) -> bytes:
        """Return the body, from the prompts' finished samples."""
        size = sum(
            self._size(prompt_index, sequence)
            for prompt_index, operation in enumerate(operations)
            for sequence in operation.sample.sequences
        )
        return await self._in_turn(size, size, lambda: self._whole(operations))

    async def stream(
        self, first: Event, events: AsyncGenerator[Event], while_valid: AbstractContextManager[None]
    ) -> AsyncGenerator[bytes]:
        """Yield the body as server-sent events while the caller's key is valid. A failure is the last event."""
        try:
            with while_valid:
                async with aclosing(self._chunks(first, events)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            yield DONE
        except Exception as error:  # noqa: BLE001  # the status is already sent
            yield _event(error_body(to_refusal(error, "a stream")))

    async def _chunks(self, first: Event, events: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
        growing: dict[int, _Growing] = {}
        async with aclosing(events):
            for index in range(len(self.options.prompts) * self.options.num_choices):
                growing[index] = _Growing(self._choice(index // self.options.num_choices))
                if (begin := self.style.begin(index)) is not None:
                    yield self._chunk(begin)
                if self.options.echoes is not None and not self.options.is_streamed_late:
                    echo = Piece(text=self.options.echoes[index // self.options.num_choices], infos=())
                    yield self._chunk(self.style.grown(index, echo, None))
            operations: list[ops_pb.Operation] = []
            received: Event | None = first
            while received is not None:
                prompt_index, event = received
                if event.HasField("operation"):
                    check(event.operation)
                    operations.append(event.operation)
                    async for chunk in self._rest(prompt_index, event.operation, growing):
                        yield chunk
                elif event.HasField("token"):
                    index = prompt_index * self.options.num_choices + event.token.sequence_index
                    piece = growing[index].push(event.token.token, event.token.logprob)
                    if piece.text or (piece.infos and self.options.num_top is not None):
                        yield self._chunk(self.style.grown(index, piece, self._logprobs(piece.infos)))
                received = await anext(events, None)
            if self.options.wants_usage:
                num_tokens = sum(each.choice.num_tokens for each in growing.values())
                yield _event(self._frame(self.style.chunk_object, [], self._usage(operations, num_tokens)))

    async def _rest(
        self, prompt_index: int, operation: ops_pb.Operation, growing: dict[int, _Growing]
    ) -> AsyncGenerator[bytes]:
        """Yield the last chunks of a prompt's choices: each slice is made when those before it were sent."""
        first, echo = prompt_index * self.options.num_choices, None
        choices = [(each, growing[first + number]) for number, each in enumerate(operation.sample.sequences)]
        sizes = [self._size(prompt_index, sequence, each.num_pushed) for sequence, each in choices]
        if self.options.is_streamed_late:
            echo = await self._in_turn(sizes[0], sum(sizes), lambda: self._echo(prompt_index, operation))
        for index, ((sequence, each), size) in enumerate(zip(choices, sizes, strict=True), first):
            num_left = math.prod(sequence.tokens.shape) - each.num_pushed
            num_slices = max(1, math.ceil(num_left * self.options.num_entries / SLICE_ENTRIES))
            slices = self._last_chunks(index, sequence, each, echo, num_slices)
            for _ in range(num_slices):
                await asyncio.sleep(0)  # a connection with room takes all slices without a pause
                yield await self._in_turn(math.ceil(size / num_slices), sum(sizes), partial(next, slices))

    def _last_chunks(
        self, index: int, sequence: ops_pb.SampledSequence, growing: _Growing, echo: Piece | None, num_slices: int
    ) -> Iterator[bytes]:
        """Yield the last chunks of a choice, in so many slices."""
        num_pieces = math.ceil((math.prod(sequence.tokens.shape) - growing.num_pushed) / num_slices)
        pieces = chain([echo] if echo is not None else [], growing.choice.rest(sequence, growing.num_pushed))
        for number in range(1, num_slices + 1):
            chunks = [
                self._chunk(self.style.grown(index, piece, self._logprobs(piece.infos) if piece.infos else None))
                for piece in (islice(pieces, num_pieces) if number < num_slices else pieces)
                if piece.text or (piece.infos and self.options.num_top is not None)
            ]
            if number == num_slices:
                chunks.append(self._chunk(self.style.end(index, growing.choice.finish_reason(sequence))))
            yield b"".join(chunks)

    def _whole(self, operations: Sequence[ops_pb.Operation]) -> bytes:
        choices: list[dict[str, Any]] = []
        num_tokens = 0
        for prompt_index, operation in enumerate(operations):
            echo = self._echo(prompt_index, operation)
            for sequence in operation.sample.sequences:
                choice = self._choice(prompt_index)
                piece = joined([echo, *choice.rest(sequence, 0)])
                num_tokens += choice.num_tokens
                reason = choice.finish_reason(sequence)
                choices.append(self.style.whole(len(choices), piece, self._logprobs(piece.infos), reason))
        body = self._frame(self.style.whole_object, choices, self._usage(operations, num_tokens))
        return encode_json(body)

    def _size(self, prompt_index: int, sequence: ops_pb.SampledSequence, num_pushed: int = 0) -> int:
        """Return how much a choice has, in tokens and log-probabilities, without its first tokens."""
        num_echoed = len(self.options.prompts[prompt_index]) if self.options.echoes is not None else 0
        num_tokens = num_echoed + math.prod(sequence.tokens.shape) - num_pushed
        return num_tokens * self.options.num_entries

    async def _in_turn(self, size: int, size_of_all: int, make: Callable[[], Made]) -> Made:
        """Return what `make` makes of so many tokens and log-probabilities.

        On a thread, in a turn, if all that is made without a pause has many.
        """
        inline_bytes_max = INLINE_JSON_BYTES_MAX if size_of_all * _ENTRY_BYTES <= INLINE_JSON_BYTES_MAX else -1
        return await self.call.in_turn(size * _ENTRY_BYTES, make, inline_bytes_max=inline_bytes_max)

    def _choice(self, prompt_index: int) -> Choice:
        echoes = self.options.echoes
        offset = len(echoes[prompt_index]) if echoes is not None else 0
        return Choice(self.model, self.options.stops, offset=offset, is_empty=self.options.is_empty)

    def _echo(self, prompt_index: int, operation: ops_pb.Operation) -> Piece:
        """Return the first piece of a prompt's choices: the prompt, if it is echoed."""
        if self.options.echoes is None:
            return Piece(text="", infos=())
        text, infos = self.options.echoes[prompt_index], tuple[TokenInfo, ...]()
        if self.options.num_top is not None:
            infos = prompt_infos(self.options.prompts[prompt_index], text, operation.sample, self.model)
        return Piece(text=text, infos=infos)

    def _logprobs(self, infos: Sequence[TokenInfo]) -> Any:
        number = self.options.num_top
        return self.style.logprobs(infos, number, self.model) if number is not None else None

    def _usage(self, operations: Sequence[ops_pb.Operation], num_tokens: int) -> dict[str, Any]:
        num_prompt_tokens = sum(len(prompt) for prompt in self.options.prompts)
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
            **({"usage": usage} if usage is not None or self.options.wants_usage else {}),
        }


@dataclass(slots=True)
class _Growing:
    """A choice of a stream, and the number of its tokens so far."""

    choice: Choice
    num_pushed: int = 0

    def push(self, token: int, logprob: float) -> Piece:
        self.num_pushed += 1
        return self.choice.push(token, logprob)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + ENCODER.encode(body).encode() + b"\n\n"


def _fingerprint(numerics: str) -> str:
    return f"fp_{hashlib.sha256(numerics.encode()).hexdigest()[:10]}"


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LOGPROB_MIN)


def _by_text(info: TokenInfo, model: TextModel) -> dict[str, float] | None:
    """Return the most likely tokens and the token itself, by text; of equal texts, the most likely one."""
    if info.logprob is None:
        return None
    found: dict[str, float] = {}
    for each in (*info.top, TopToken(info.token, info.logprob)):
        found.setdefault(model.token_text(each.token)[0], max(each.logprob, LOGPROB_MIN))
    return found


def _token(model: TextModel, token: int, logprob: float | None) -> dict[str, Any]:
    text, data = model.token_text(token)
    return {"token": text, "bytes": list(data) if data is not None else None, "logprob": _number(logprob)}

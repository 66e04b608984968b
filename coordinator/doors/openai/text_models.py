"""Text of a base model: its tokenizer, chat template and special tokens, read from the files that clients get too."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from coordinator.doors.http.calls import Call
from coordinator.doors.openai.detokenizer import BROKEN, Detokenizer
from coordinator.doors.openai.errors import no_model, refused
from coordinator.doors.openai.templates import ChatTemplate, ChatTemplateError, read_template
from coordinator.limits.turns import Turns
from tinkerpool.v1 import sessions_pb2 as pb

_INLINE_CHARACTERS_MAX = 4096
"""Longer texts are encoded on a thread, and longer conversations rendered, which the tenants share by turns."""
_SHORT_AT_ONCE = 2
"""Short conversations that are rendered at a time. A thousand calls would take all threads of the executor, and the
saves of other tenants would wait behind them."""
_PREFIX_CHARACTERS = 16
"""Characters for each token of the longest prompt. Of a longer text, a prefix of this length is encoded first: if that
alone has twice as many tokens as the model takes, the rest is not encoded. Languages have two to five to a token."""
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTES = {chr(value): value for value in _PRINTABLE} | {
    chr(256 + index): value for index, value in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))
}
"""Bytes by their character in byte-level vocabularies: printable ones stand for themselves, others follow U+0100."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A byte in other vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """A base model and its text."""

    name: str
    vocab_size: int
    """Token ids are 0 to `vocab_size` - 1."""
    max_tokens: int
    """Prompt and sample together."""
    eos_tokens: tuple[int, ...]
    fingerprint: str
    """Fingerprint of the numerics that compute with the model."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    hidden: frozenset[int]
    """Tokens without visible text: special tokens and end-of-sequence tokens."""
    anchor: tuple[int, ...]
    """A token with text, if there is one. Tokens that are decoded after it keep their leading space."""
    turns: Turns = field(default_factory=lambda: Turns(1))
    """Turns at encoding long texts: one at a time leaves the other processors to the workers."""
    short_turns: Turns = field(default_factory=lambda: Turns(_SHORT_AT_ONCE))
    """Turns at rendering short conversations, which wait for no long one."""
    _token_texts: dict[int, tuple[str, bytes | None]] = field(default_factory=dict, init=False)

    def detokenizer(self, stops: Sequence[str] = ()) -> Detokenizer:
        """Return the detokenizer of one sampled sequence."""
        return Detokenizer(self.tokenizer, self.hidden, stops, self.anchor)

    def prompt_detokenizer(self, prompt: Sequence[int], text: str) -> Detokenizer:
        """Return the detokenizer of a prompt with this text: of special tokens it has those that were not added."""
        return Detokenizer(self.tokenizer, () if self.text_of(prompt) == text else self.hidden, (), ())

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    async def texts_of(self, prompts: Sequence[str | list[int]], tenant_id: str) -> list[str]:
        """Return the texts of a tenant's prompts, which are texts or tokens. Of a too long prompt, return a part."""
        tokens = [each[: self.max_tokens] for each in prompts if not isinstance(each, str)]
        async with self.turns.turn(tenant_id):
            decoded = iter(await asyncio.to_thread(self.tokenizer.decode_batch, tokens, skip_special_tokens=False))
        return [each if isinstance(each, str) else next(decoded) for each in prompts]

    def token_text(self, token: int) -> tuple[str, bytes | None]:
        """Return the text of one token, and its bytes if known. Bytes of an incomplete character are escaped."""
        if token not in self._token_texts:
            text = self.text_of([*self.anchor, token])[len(self.text_of(self.anchor)) :]
            data: bytes | None = text.encode()
            if BROKEN in text:
                data = _raw_bytes(self.tokenizer.id_to_token(token) or "")
                text = "bytes:" + "".join(f"\\x{value:02x}" for value in data) if data else text
            self._token_texts[token] = text, data
        return self._token_texts[token]

    async def encode(self, texts: Sequence[str], tenant_id: str, *, add_special_tokens: bool) -> list[list[int]]:
        """Return the tokens of a tenant's texts. Raises ServiceError INVALID_ARGUMENT for one far beyond the model."""
        if sum(map(len, texts)) <= _INLINE_CHARACTERS_MAX:
            return [self._encode(text, add_special_tokens) for text in texts]
        encoded = []
        for text in texts:
            async with self.turns.turn(tenant_id):
                encoded.append(await asyncio.to_thread(self._encode, text, add_special_tokens))
        return encoded

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], num_bytes: int, tenant_id: str
    ) -> list[int]:
        """Return the prompt for the assistant's next message. Raises ServiceError INVALID_ARGUMENT.

        `num_bytes`: of the request with the messages and options.
        """
        if self.template is None:
            raise refused(
                "model",
                f"{self.name} has no chat template: use /v1/completions, with a prompt in the model's format",
                "NO_CHAT_TEMPLATE",
            )
        turns = self.short_turns if num_bytes <= _INLINE_CHARACTERS_MAX else self.turns
        try:
            async with turns.turn(tenant_id):
                text = await asyncio.to_thread(self.template.render, messages, options)
        except ChatTemplateError as error:
            raise refused(
                "messages", f"the chat template of {self.name} does not accept these messages: {error}"
            ) from None
        [tokens] = await self.encode([text], tenant_id, add_special_tokens=False)
        return tokens

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        num_characters = _PREFIX_CHARACTERS * self.max_tokens
        while num_characters < len(text):
            if len(self._tokens(text[:num_characters], add_special_tokens)) > 2 * self.max_tokens:
                raise refused(
                    "prompt",
                    f"{self.name} takes {self.max_tokens} tokens in all, and the prompt has more than "
                    f"{2 * self.max_tokens}: shorten the prompt",
                    "CONTEXT_LENGTH_EXCEEDED",
                )
            num_characters *= 4
        return self._tokens(text, add_special_tokens)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. `encode` of the library would hold the interpreter's lock; this does not."""
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
        return tokens


class TextModels:
    """The base models of a pool, each read at its first use."""

    def __init__(self) -> None:
        self._models: dict[str, TextModel] = {}
        self._reading: dict[str, asyncio.Lock] = {}
        """By model: of calls that come together, one reads it."""

    async def of(self, call: Call, model: pb.BaseModel) -> TextModel:
        """Return a base model's text. Raises ServiceError NOT_FOUND if its tokenizer cannot be read."""
        if model.name not in self._models:
            async with self._reading.setdefault(model.name, asyncio.Lock()):
                if model.name not in self._models:
                    self._models[model.name] = await self._read(call, model)
        return self._models[model.name]

    async def _read(self, call: Call, model: pb.BaseModel) -> TextModel:
        found = await call.service.get_tokenizer(call.principal, pb.GetTokenizerRequest(base_model=model.name))
        try:
            return await asyncio.to_thread(read_text_model, model, dict(found.files))
        except ValueError as error:
            raise no_model(model.name, f"in this API, because {error}; use gRPC or the Tinker API") from None


def read_text_model(model: pb.BaseModel, files: Mapping[str, bytes]) -> TextModel:
    """Make a base model's text from its tokenizer files. Raises ValueError for missing or damaged files."""
    if "tokenizer.json" not in files:
        raise ValueError("it has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # noqa: BLE001  # the library raises no narrower class
        raise ValueError(f"its tokenizer.json cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    return TextModel(
        name=model.name,
        vocab_size=model.vocab_size,
        max_tokens=model.max_sequence_tokens,
        eos_tokens=tuple(model.eos_token_ids),
        fingerprint=model.fingerprint,
        tokenizer=tokenizer,
        template=read_template(files),
        hidden=frozenset(special | set(model.eos_token_ids)),
        anchor=tuple(tokenizer.encode(":", add_special_tokens=False).ids[-1:]),
    )


def _raw_bytes(token: str) -> bytes | None:
    if found := _BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    values = [_BYTES.get(character, -1) for character in token]
    return bytes(values) if values and min(values) >= 0 else None

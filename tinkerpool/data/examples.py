"""Prompts with completions, plain texts, and records of a file, to datums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkerpool.data.chat import ASSISTANT, Message, TrainOn, chat_datum, render_prompt
from tinkerpool.data.tokens import shift
from tinkerpool.types import Datum

EXPECTED = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'


def completion_datum(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    completion: str | Sequence[Message],
    *,
    with_end: bool = True,
    **template_options: Any,
) -> Datum:
    """Return the datum of a prompt and its completion, with weights 1 on the completion and 0 on the prompt.

    The two are encoded apart, as a sampler gets the prompt alone: a space between them belongs to the completion.

    Args:
        tokenizer: of transformers or tokenizers.
        prompt: a text; or messages, which the chat template renders.
        completion: a text; for a prompt of messages also a list with the assistant's message.
        with_end: whether the end-of-text token follows, so that the model learns to stop. Leave it out for completions
            that end with a stop of your own, a line end for example. In chats the template decides.
        template_options: more variables of the chat template.

    Raises:
        ValueError: nothing to train on, or no end-of-text token.
    """
    if not isinstance(prompt, str):
        reply = [{"role": ASSISTANT, "content": completion}] if isinstance(completion, str) else list(completion)
        if all(message.get("role") != ASSISTANT for message in reply):
            raise ValueError(f"the completion has no message of role {ASSISTANT!r}: nothing to train on")
        return chat_datum(tokenizer, [*prompt, *reply], train_on="last", **template_options)
    if not isinstance(completion, str):
        raise ValueError("the completion of a prompt that is a text must be a text")
    before = encode_prompt(tokenizer, prompt)
    after = _ended(tokenizer, tokenizer.encode(completion, add_special_tokens=False), with_end=with_end)
    if not before or not after:
        raise ValueError(f"{'the prompt' if not before else 'the completion'} has no tokens")
    return shift(before + after, [0] * len(before) + [1] * len(after))


def text_datum(tokenizer: Any, text: str, *, with_end: bool = True) -> Datum:
    """Return the datum of a text, with weights 1 on all of its tokens. Raises ValueError for less than two tokens."""
    return shift(_ended(tokenizer, list(tokenizer.encode(text)), with_end=with_end))


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message], **template_options: Any) -> list[int]:
    """Return the tokens of a prompt, to sample from: of a text, or of messages with the beginning of a reply."""
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    return list(tokenizer.encode(render_prompt(tokenizer, prompt, **template_options), add_special_tokens=False))


def to_datum(tokenizer: Any, record: Mapping[str, Any], *, train_on: TrainOn = "all", with_end: bool = True) -> Datum:
    """Return the datum of a record, one of three forms; a chat may have `tools`. Raises ValueError for other forms."""
    if "messages" in record:
        options = {"tools": record["tools"]} if record.get("tools") else {}
        return chat_datum(tokenizer, record["messages"], train_on=train_on, **options)
    if "prompt" in record and "completion" in record:
        if not isinstance(record["prompt"], list):
            text_of(record, "prompt")
            text_of(record, "completion")
        return completion_datum(tokenizer, record["prompt"], record["completion"], with_end=with_end)
    if "text" in record:
        return text_datum(tokenizer, text_of(record, "text"), with_end=with_end)
    raise ValueError(f"expected {EXPECTED}; got the keys {sorted(record)}")


def text_of(record: Mapping[str, Any], key: str) -> str:
    """Return a record's text. Raises ValueError if it is missing or no text."""
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be a text; got {type(value).__name__} (keys: {sorted(record)})")
    return value


def _ended(tokenizer: Any, tokens: Sequence[int], *, with_end: bool) -> list[int]:
    """Return the tokens, with the end-of-text token unless they end with it."""
    if not with_end:
        return list(tokens)
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-text token: say with_end=False, and end texts with your own stop")
    return [*tokens, end] if tokens and tokens[-1] != end else list(tokens)

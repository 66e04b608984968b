"""Chat messages to a datum whose weights are 1 on what the assistant says, by the model's own chat template.

A template with `{% generation %}` blocks marks these texts itself, and transformers reads the marks. In any other
template an assistant message is the text behind the prompt that a sampler gets for it: the rendering up to the message
minus the prompt. That needs a template that renders the beginning of a conversation as the beginning of its rendering;
others are refused.

Main invariant: what is found without marks follows exactly the text that a sampler gets as its prompt.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tinkerpool.data.tokens import shift
from tinkerpool.types import Datum

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, and what else the template reads: `tool_calls`, `reasoning_content`, ..."""
TrainOn = Literal["all", "last"]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
"""The usual roles. Templates have more: `ipython`, `observation`, `function`, ..."""
_TYPO = 0.75
"""Least similarity (of difflib) of a role to a usual one for a misspelling of it: `usre` has this one to `user`."""
_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")
_SHOWN = 40


def chat_datum(
    tokenizer: Any, messages: Sequence[Message], *, train_on: TrainOn = "all", **template_options: Any
) -> Datum:
    """Return the datum of a conversation, as the tokenizer's chat template renders it.

    Weights are 1 on the tokens of assistant messages, with the token that ends each, and 0 elsewhere. Whitespace behind
    that token is the template's, and has weight 0. A token that reaches into the message counts as part of it.

    Args:
        tokenizer: of transformers, with a chat template.
        messages: the conversation; at least one message before the assistant's first.
        train_on: "all": every assistant message. "last": only the last one.
        template_options: more variables of the template, for example `tools=[...]`, `enable_thinking=False`.

    Raises:
        TypeError: the tokenizer knows no chat templates.
        ValueError: malformed messages, or a template that does not show where assistant messages begin and end. For a
            template that rewrites earlier turns (some drop earlier reasoning), train on one turn at a time:
            `[chat_datum(tokenizer, turn, train_on="last") for turn in split_turns(messages)]`.
    """
    messages = _checked(messages)
    if train_on not in {"all", "last"}:
        raise ValueError(f"train_on is {train_on!r}; it must be 'all' or 'last'")
    template = _template(tokenizer, template_options)
    indices = [i for i, message in enumerate(messages) if message["role"] == ASSISTANT]
    if _GENERATION.search(template):
        text, spans = _marked(tokenizer, messages, template, template_options)
        if train_on == "last":
            before = _render(tokenizer, messages[: indices[-1]], template_options)
            is_beginning = text.startswith(before)
            spans = [span for span in spans if span[1] > len(before)] if is_beginning else spans[-1:]
    else:
        text = _render(tokenizer, messages, template_options)
        chosen = indices if train_on == "all" else indices[-1:]
        spans = [_span(tokenizer, messages, i, text, template_options) for i in chosen]
    tokens, mask = _tokens_in(tokenizer, text, spans)
    if not mask.any():
        raise ValueError("the chat template marks no token of these messages as the assistant's: nothing to train on")
    return shift(tokens, mask)


def split_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Return a conversation for each assistant message, which is its last message, with all messages before it."""
    return [list(messages[: i + 1]) for i, message in enumerate(messages) if message["role"] == ASSISTANT]


def render_prompt(tokenizer: Any, messages: Sequence[Message], **template_options: Any) -> str:
    """Return the text after which the assistant's next message begins. Raises TypeError, ValueError."""
    messages = _with_roles(messages)
    _template(tokenizer, template_options)
    return _render(tokenizer, messages, {**template_options, "add_generation_prompt": True})


def _checked(messages: Any) -> list[Message]:
    """Return the messages to train on as a list. Raises ValueError."""
    checked = _with_roles(messages)
    roles = [message["role"] for message in checked]
    if ASSISTANT not in roles:
        raise ValueError(f"messages must have one of role 'assistant' to train on, got roles {roles}")
    if roles[0] == ASSISTANT:
        raise ValueError("messages[0] is the assistant's; a message before it must say what it replies to")
    return checked


def _with_roles(messages: Any) -> list[Message]:
    """Return the messages as a list. Raises ValueError if one has no role, or a usual one that is misspelled.

    Any other role is the template's to take or to refuse: many templates have roles of their own, and many render
    whatever role they get. So a misspelled `user` would be trained on as a role that no sampler ever uses.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of messages, got {_short(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{i}] must have a role, as in {{'role': 'user', 'content': ...}}; got {message!r}"
            )
        if (role := message["role"]) not in ROLES and (meant := _meant_role(role)) is not None:
            raise ValueError(
                f"messages[{i}] has the role {role!r}: did you mean {meant!r}? The usual roles are {', '.join(ROLES)}"
            )
    return list(messages)


def _meant_role(role: str) -> str | None:
    """Return the usual role that a role misspells, in case or letters; None for another one, such as `user_2`."""
    letters = role.strip().lower()
    close = difflib.get_close_matches(letters, ROLES, n=1, cutoff=_TYPO) if letters.isalpha() else []
    return close[0] if close else None


def _template(tokenizer: Any, options: Mapping[str, Any]) -> str:
    """Return the source of the template that renders with these options. Raises TypeError, ValueError."""
    if not hasattr(tokenizer, "apply_chat_template"):
        raise TypeError(
            f"{type(tokenizer).__name__} knows no chat templates: `pip install transformers`, whose tokenizers do; "
            "get_tokenizer returns one of them then"
        )
    if not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, as is usual for base models: set tokenizer.chat_template, or train on "
            "prompts and completions in a format of your own (completion_datum)"
        )
    template: str = tokenizer.get_chat_template(tools=options.get("tools"))
    return template


def _render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    with _template_errors():
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    return text


@contextmanager
def _template_errors() -> Iterator[None]:
    """Raise ValueError for an error of jinja2, which is installed where transformers renders templates."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("jinja2"):
            raise
        raise ValueError(f"the chat template cannot render these messages: {error}") from error


def _marked(
    tokenizer: Any, messages: Sequence[Message], template: str, options: Mapping[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the conversation's text, and where its `{% generation %}` blocks begin and end.

    `apply_chat_template` would return a mask of tokens, which lacks all blocks from the first one on that begins with a
    space, if the tokenizer's offsets leave that space out (transformers 5.23).
    """
    rendering = importlib.import_module("transformers.utils.chat_template_utils")
    variables = {**tokenizer.special_tokens_map, **options}
    with _template_errors():
        [text], [spans] = rendering.render_jinja_template(
            conversations=[messages], chat_template=template, return_assistant_tokens_mask=True, **variables
        )
    return text, spans


def _span(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, options: Mapping[str, Any]
) -> tuple[int, int]:
    """Return where an assistant message's characters begin and end in the conversation's text. Raises ValueError."""
    prompt = _render(tokenizer, messages[:index], {**options, "add_generation_prompt": True})
    until = text if index + 1 == len(messages) else _render(tokenizer, messages[: index + 1], options)
    if not text.startswith(until):
        raise ValueError(
            f"the chat template rewrites earlier turns: messages[{index}] is rendered differently when more messages "
            f"follow ({_difference(until, text)}). Train on one turn at a time: train_on='last' for each of "
            "split_turns(messages)"
        )
    if not until.startswith(prompt):
        raise ValueError(
            f"the chat template renders messages[{index}] not as a continuation of the prompt that a sampler gets "
            f"({_difference(prompt, until)}). Give the message what the prompt begins for it (its reasoning), set the "
            "template's options, or mark assistant messages in the template with {% generation %}"
        )
    if until == prompt:
        raise ValueError(f"the chat template renders nothing for messages[{index}]")
    end = until.rstrip()
    is_ended = any(end.endswith(token) for token in tokenizer.get_added_vocab())
    return len(prompt), len(end) if is_ended and len(end) > len(prompt) else len(until)


def _difference(expected: str, text: str) -> str:
    """Return where two texts begin to differ, in words."""
    at = next((i for i, pair in enumerate(zip(expected, text, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(expected), len(text)) if at is None else at
    return f"{expected[at : at + _SHOWN]!r} becomes {text[at : at + _SHOWN]!r} after {text[max(0, at - _SHOWN) : at]!r}"


def _tokens_in(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], NDArray[np.bool_]]:
    """Return the tokens of a text, and whether each has a character in one of the spans."""
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which text a token stands for; a fast one is needed"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)  # (tokens, begin and end)
    ends = offsets[:, 1]
    # Some tokenizers leave a token's leading space out of its offsets: it begins where the one before it ends.
    begins = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
    mask = np.zeros(len(ends), bool)
    for begin, end in spans:
        mask |= (begins < end) & (ends > begin)
    return encoded["input_ids"], mask


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."

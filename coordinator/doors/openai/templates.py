"""A base model's chat template: from messages to the prompt format that the model was trained on.

Renders as transformers does, without transformers: with the same extensions, filters and globals. A template is
untrusted code that comes with a model, so it runs in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplateError(ValueError):
    """The template cannot render these messages. The text is the template's own, for the user."""


class ChatTemplate:
    """One model's template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Keep the source. It is compiled at its first use, so a faulty one fails chat calls of its model alone."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the prompt of messages. `options` are more variables for the template.

        Raises ChatTemplateError.
        """
        own = {"messages": messages, "add_generation_prompt": True, "tools": None, "documents": None}
        try:
            return self._template.render({**self._special_tokens, **own, **options})
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(str(error)) from None

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        return environment.from_string(self._source)


def read_template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    """Return the template among a model's tokenizer files, or None. Raises ValueError for damaged files."""
    config = _read_object(files, CONFIG_FILE)
    source: Any = config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if TEMPLATE_FILE in files:
        source = files[TEMPLATE_FILE].decode()
    if not source:
        return None
    tokens = {**_read_object(files, _MAP_FILE), **config}
    special = {name: _content(tokens[name]) for name in _SPECIAL_TOKENS if tokens.get(name)}
    return ChatTemplate(source, special)


class _Generation(Extension):
    """The block `{% generation %}`, which marks the assistant's messages for training; rendered like other text."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files.get(name, b"{}"))
    return found


def _content(token: Any) -> str:
    """Return the text of a special token, which is a string or an object with its text."""
    return str(token["content"] if isinstance(token, dict) else token)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON for a prompt; jinja2's own filter would escape `<` and `'` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

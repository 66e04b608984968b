"""JSON bodies of OpenAI's protocol, and the parameters that this pool supports.

Null means the same as absent. A parameter that would change the response and is not supported is refused by name;
parameters that do not affect the response are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.base.errors import ServiceError
from coordinator.doors.http.calls import INLINE_JSON_BYTES_MAX, JSON_BYTES_MAX, Call, Items, check_elements
from coordinator.doors.openai.errors import refused, unsupported

STOPS_MAX = 4
STOP_CHARACTERS_MAX = 1000
"""Length of one stop string; each is searched for at every token."""
TOP_LOGPROBS_MAX = 20
PROMPTS_MAX = 1024

_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier"})
"""Parameters that identify the user or concern billing."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "suffix": ("",),
    "store": (False,),
}
"""Parameters that are not supported, each with the values that have no effect and are accepted."""

Integer = Annotated[int, Field(ge=0, lt=1 << 31)]
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]
Body = TypeVar("Body", bound="Common")


class _WithoutNulls(BaseModel):
    """An object of a request: null means absent, and unknown fields are kept."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(extra="ignore")  # include_obfuscation, which hides the lengths of tokens, is ignored

    include_usage: bool = False


class Common(_WithoutNulls):
    """Parameters of both endpoints."""

    model: str
    n: Positive = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] = -1
    """Not in OpenAI's API: draw from this many most likely tokens; -1: from all."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | Items[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Completion(Common):
    """POST /completions."""

    prompt: Any
    """A text, token ids, or a list of either; see `prompts_of`."""
    max_tokens: Integer = 16
    logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    echo: bool = False
    best_of: Positive | None = None


class Message(_WithoutNulls):
    """One message of a conversation."""

    role: str
    content: Any = None


class Chat(Common):
    """POST /chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)] = 0
    chat_template_kwargs: dict[str, Any] = {}
    """Not in OpenAI's API: more variables for the chat template."""


async def read(call: Call, shape: type[Body]) -> tuple[Body, int]:
    """Return the body of a call, and its bytes. Raises ServiceError, which names the wrong parameter."""
    body = await call.body(bytes_max=JSON_BYTES_MAX)
    asked = await call.in_turn(len(body), lambda: parse(shape, body), inline_bytes_max=INLINE_JSON_BYTES_MAX)
    return asked, len(body)


def parse(shape: type[Body], body: bytes) -> Body:
    """Parse a body and check its parameters. Raises ServiceError INVALID_ARGUMENT."""
    check_elements(body)
    try:
        asked = shape.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise _wrong(error) from None
    for name, value in (asked.model_extra or {}).items():
        if name not in _IGNORED:
            _check_without_effect(name, value)
    if len(asked.stops) > STOPS_MAX:
        raise refused("stop", f"stop has {len(asked.stops)} strings: send at most {STOPS_MAX}")
    if any(not 1 <= len(stop) <= STOP_CHARACTERS_MAX for stop in asked.stops):
        raise refused(
            "stop",
            f"stop has a string of another length than 1 to {STOP_CHARACTERS_MAX} characters: shorten or remove it",
        )
    if asked.stream_options is not None and not asked.stream:
        raise refused("stream_options", "stream_options needs stream=true: set it, or leave stream_options out")
    if isinstance(asked, Completion) and asked.best_of not in (None, asked.n):
        raise unsupported("best_of", "request n choices with logprobs, and choose among them")
    if isinstance(asked, Chat) and asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs=true: set it, or leave top_logprobs out")
    return asked


def prompts_of(value: Any, vocab_size: int) -> list[str | list[int]]:
    """Return a completion's prompts: texts, or token ids below `vocab_size`. Raises ServiceError INVALID_ARGUMENT."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise refused("prompt", "prompt must be a text, a list of token ids, or a non-empty list of either")
    prompts = [value] if _are_integers(value) else value
    if len(prompts) > PROMPTS_MAX:
        raise refused("prompt", f"prompt has {len(prompts)} entries, at most {PROMPTS_MAX}: send several requests")
    for index, entry in enumerate(prompts):
        if isinstance(entry, str):
            continue
        if not (isinstance(entry, list) and entry and _are_integers(entry)):
            raise refused("prompt", f"prompt[{index}] must be a text or a non-empty list of token ids")
        if not 0 <= min(entry) <= max(entry) < vocab_size:
            raise refused(
                "prompt", f"prompt has a number that is not a token id: send numbers from 0 to {vocab_size - 1}"
            )
    return prompts


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Convert messages for chat templates: contents are texts. Raises ServiceError INVALID_ARGUMENT."""
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    if role in ("tool", "function"):
        raise refused(where, f"{where} has the role {role!r}: tools are not supported by this pool")
    if role not in ("system", "user", "assistant"):
        raise refused(where, f"{where} has the role {role[:40]!r}: use system, developer, user or assistant")
    more = message.model_extra or {}
    for name in more:
        if name != "name" and more[name] not in ([], ""):
            raise refused(where, f"{where} has {name[:40]!r}, which this pool does not support: send role and content")
    named = {"name": str(more["name"])} if "name" in more else {}
    return {"role": role, "content": _content(message.content, where), **named}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(where, f"{where} has no content: send a text, or a list of parts of type text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise refused(where, f"{where} has a part of type {str(kind)[:40]!r}: the base models take text only")
        if not isinstance(part.get("text"), str):
            raise refused(where, f"{where} has a part of type text without a text")
        texts.append(part["text"])
    return "".join(texts)


def _are_integers(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


def _check_without_effect(name: str, value: Any) -> None:
    if name not in _WITHOUT_EFFECT:
        raise refused(name[:80], f"{name[:80]!r} is not a known parameter: leave it out", "UNKNOWN_PARAMETER")
    if value not in _WITHOUT_EFFECT[name]:
        allowed = " or ".join(repr(allowed) for allowed in _WITHOUT_EFFECT[name])
        raise unsupported(name, f"leave it out{f', or send {allowed}' if allowed else ''}")


def _wrong(error: ValidationError) -> ServiceError:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = str(fault["loc"][0])[:80] if fault["loc"] else "body"
    where = ".".join(str(part)[:80] for part in fault["loc"]) or "the body"
    return refused(param, f"{where}: {fault['msg'][:200]}")

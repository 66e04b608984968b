"""A service without a pool, for tests of doors and of the command line; the test gives its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from google.protobuf.message import Message

from coordinator.base.errors import Code, ServiceError
from coordinator.base.tenant_limits import TenantLimits
from coordinator.limits.ceiling import Limit
from coordinator.limits.results import Responses, Room
from coordinator.limits.turns import Turns
from coordinator.service.listings import Listed
from coordinator.storage.exported_folder import CONFIG, WEIGHTS
from coordinator.storage.rows import Listing
from coordinator.tenants.principals import Caller, Principal, Role
from tinkerpool.v1 import checkpoints_pb2, operations_pb2, sessions_pb2

KEY = "tp_000000000000_canary-key-that-must-appear-in-no-log-whatever"
PRINCIPAL = Principal(tenant_id="t1", tenant_name="default", key_id="000000000000", role=Role.ADMIN)


class FakeKeys:
    """One valid key."""

    def admit(self, key: str, caller: Caller, least: Role) -> Principal:
        """Return the principal of the valid key."""
        if key != KEY:
            raise ServiceError(Code.UNAUTHENTICATED, "API_KEY_INVALID" if key else "API_KEY_MISSING", "no such key")
        return PRINCIPAL

    def while_valid(self, principal: Principal) -> AbstractContextManager[None]:
        """Return a block that is never interrupted: the key is never revoked."""
        return nullcontext()


class KeysByName(FakeKeys):
    """Every key is the name of its tenant."""

    def admit(self, key: str, caller: Caller, least: Role) -> Principal:
        """Return the principal."""
        return Principal(tenant_id=key, tenant_name=key, key_id=key, role=Role.MEMBER)


STREAMS = (
    "wait_operations",
    "stream_sample",
    "stream_outcome",
    "export_checkpoint",
    "watch_cycles",
    "export_session_trace",
)
"""Use cases that stream."""


class FakeService:
    """Has every use case. Without a response from the test, a use case is UNIMPLEMENTED; a list is streamed."""

    def __init__(self, **responses: Message | str | Exception | list[Message | Exception] | Callable[..., Any]) -> None:
        self.responses = responses
        self.calls: list[tuple[str, Principal, Message]] = []

    async def make_room(self, principal: Principal, request: Message, room: Room) -> None:
        """Take nothing: the test's responses are in memory already."""

    async def finished_operations(
        self, principal: Principal, names: Sequence[str], room: Room, *, is_poll: bool
    ) -> list[operations_pb2.Operation]:
        """Return the operations that `wait_operations` streams."""
        request = operations_pb2.WaitOperationsRequest(names=names)
        found = {each.operation.name: each.operation async for each in self.wait_operations(principal, request)}
        return [found[name] for name in names] if len(names) > 1 else list(found.values())

    async def exported_files(self, principal: Principal, path: str) -> list[str]:
        """Return the names of the files of every checkpoint."""
        return [CONFIG, WEIGHTS]

    async def session_ids(self, principal: Principal, limit: int, offset: int) -> list[str]:
        """Return no session."""
        request = sessions_pb2.ListSessionsRequest(page_size=limit, skip=offset)
        self.calls.append(("session_ids", principal, request))
        return []

    def listed_adapters(self, principal: Principal, request: Any) -> Listed[Any, Any]:
        """Return no adapter."""
        return Listed(Listing([], False, 0, list), lambda row: row, Turns(1), principal.tenant_id)

    def listed_checkpoints(self, principal: Principal, request: Any, known: object = None) -> Listed[Any, Any]:
        """Return what `list_checkpoints` returns, to be read in slices."""
        found = self.responses.get("list_checkpoints", checkpoints_pb2.ListCheckpointsResponse())
        assert isinstance(found, checkpoints_pb2.ListCheckpointsResponse)
        rows = {row.path: row for row in found.checkpoints}
        listing = Listing(
            [(0.0, path) for path in rows], False, found.total_size, lambda keys: [rows[key] for key in keys]
        )
        return Listed(listing, lambda row: row, Turns(1), principal.tenant_id)

    def __getattr__(self, name: str) -> Callable[[Principal, Message], Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        streaming = name in STREAMS

        async def respond_once(principal: Principal, request: Message, *_: Any) -> Message | str:
            self.calls.append((name, principal, request))
            response = self.responses.get(
                name, ServiceError(Code.UNIMPLEMENTED, "UNIMPLEMENTED", f"no response for {name}")
            )
            if callable(response):
                response = await response(principal, request)
            if isinstance(response, Exception):
                raise response
            assert isinstance(response, Message | str)
            return response

        async def stream(principal: Principal, request: Message) -> AsyncIterator[Message]:
            self.calls.append((name, principal, request))
            pieces = self.responses.get(name, [])
            if callable(pieces):
                async for piece in pieces(principal, request):
                    yield piece
                return
            assert isinstance(pieces, list)
            for piece in pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece

        return stream if streaming else respond_once


class FakeBackend:
    """A coordinator without a pool: a fake service, keys, and a health that the test may change."""

    has_failed = False
    traces: Any = None
    why_unready = ""
    """What `unready_reason` returns."""

    def __init__(self, service: Any = None, *, keys: Any = None, health: Callable[[], bool] = lambda: True) -> None:
        self.service: Any = service or FakeService()
        self.authenticator: Any = keys or FakeKeys()
        self.health = health
        self.responses = Responses()
        self.decode_turns = Turns(1)
        self.limits: dict[str, Limit] = {"streams_max": Turns(TenantLimits().streams_max)}

    def unready_reason(self) -> str:
        return self.why_unready

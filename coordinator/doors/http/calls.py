"""An HTTP call: its caller, its parameters and its body, parsed. Does not depend on the protocol of the body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request

from coordinator.base.config import JSON_ITEMS_MAX, JSON_OBJECTS_MAX, JSON_STRINGS_MAX, HttpConfig
from coordinator.base.errors import invalid, unavailable
from coordinator.base.time import Time
from coordinator.doors.door import Backend
from coordinator.doors.http.bodies import HEAD_BYTES, Bodies, HeldBody, UnreadableBody, unreadable
from coordinator.doors.http.connections import CERTIFICATE
from coordinator.doors.http.downloads import Downloads
from coordinator.doors.http.sign_ins import SignIns
from coordinator.doors.peers import is_this_machine
from coordinator.limits.ceiling import Ceiling, Refusal
from coordinator.limits.polls import Polls
from coordinator.limits.results import Room
from coordinator.payloads.elements import INLINE_BYTES_MAX
from coordinator.service import Service
from coordinator.tenants.principals import Caller, Principal

SMALL_BYTES_MAX = 1 << 20
"""Largest body of a call without data for training or sampling."""
JSON_BYTES_MAX = 8 << 20
"""Largest body in JSON: parsing holds the interpreter's lock, and the parsed body is many times as large."""
INLINE_JSON_BYTES_MAX = 32 << 10
"""JSON that Python itself reads or writes, 0.4 s a MiB, is made on the event loop up to this size."""
_FAULTS_SHOWN = 5

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")
Made = TypeVar("Made")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list. Validation stops at the first wrong item: reasons for a million wrong items would take gigabytes."""
Named = Annotated[dict[str, Item], Field(fail_fast=True)]
"""A dictionary, with the same limit."""
_TOO_MANY = Refusal("CALLS_BUSY", "wait for some calls to end")


class Gate:
    """Whether the door accepts new calls."""

    def __init__(self) -> None:
        self._is_closed = False

    def close(self) -> None:
        """Accept no new calls from now on."""
        self._is_closed = True

    def check_open(self) -> None:
        """Raise ServiceError UNAVAILABLE once the gate is closed."""
        if self._is_closed:
            raise unavailable("SHUTTING_DOWN", "the pool is shutting down: try again")


class RunningCalls(Ceiling):
    """The calls that run, by tenant: one has at most three quarters of the places that the others leave.

    So every further tenant finds places, and one with all the long polls of the door can still make short calls.
    """

    def __init__(self, num_places: int) -> None:
        super().__init__(_TOO_MANY, "calls of yours that run")
        self._num_places = num_places

    def maximum(self, tenant_id: str) -> int:
        """Return the most calls of a tenant beside those that run now."""
        return max(1, (self._num_places - self.num_held() + self.used(tenant_id)) * 3 // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorContext:
    """The parts and settings that all handlers of the HTTP door share."""

    backend: Backend
    config: HttpConfig
    gate: Gate
    downloads: Downloads
    sign_ins: SignIns
    polls: Polls
    running: RunningCalls
    bodies: Bodies
    tokenizers: Mapping[str, Path]
    """Base model to the directory of its tokenizer, for clients on this machine; empty if clients may be remote."""
    time: Time

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.backend.service


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an authenticated principal."""

    request: Request
    principal: Principal
    door: DoorContext
    held: HeldBody
    """Receives the body, and holds its bytes until the call ends."""
    room: Room
    """Holds the bytes of the response until it is sent."""

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.door.service

    @property
    def content_type(self) -> str:
        """The media type of the body, in lower case; empty if the call has none."""
        return self.request.headers.get("content-type", "").partition(";")[0].strip().lower()

    def path(self, name: str) -> str:
        """Return a parameter of the URL's path."""
        value: str = self.request.path_params[name]
        return value

    def number(self, name: str, default: int) -> int:
        """Return a number from the URL's query, 0 or more. Raises ServiceError INVALID_ARGUMENT."""
        text = self.request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10):
            raise invalid(f"{name} must be a number, 0 or more, not {text[:40]!r}")
        return int(text)

    async def json(self, model: type[Body], *, bytes_max: int = SMALL_BYTES_MAX) -> Body:
        """Return the body, JSON of at most `bytes_max` bytes, parsed as `model`.

        Raises UnreadableBody, which names the wrong fields, and the errors of `body`.
        """
        body = await self.body(bytes_max=min(bytes_max, JSON_BYTES_MAX))
        return await self.in_turn(len(body), lambda: read_json(model, body))

    async def in_turn(
        self, num_bytes: int, work: Callable[[], Made], *, inline_bytes_max: int = INLINE_BYTES_MAX
    ) -> Made:
        """Return what `work` makes of a message of `num_bytes`: of a large one on a thread, in a turn of the tenant."""
        if num_bytes <= inline_bytes_max:
            return work()
        async with self.door.backend.decode_turns.turn(self.principal.tenant_id) as turn:
            turn.use(num_bytes)
            return await asyncio.to_thread(work)

    async def body(self, *, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """Return the body, decompressed, of at most `bytes_max` bytes.

        Raises UnreadableBody if it is larger or cannot be decompressed; ServiceError BODY_TOO_SLOW, CALLS_BUSY,
        INVALID_ARGUMENT for an unknown encoding, or UNAVAILABLE if the door has closed in the meantime.
        """
        limit = min(bytes_max, self.door.config.message_bytes_max)
        body = await self.held.received(self.request, limit)
        self.door.gate.check_open()
        return body


def check_elements(body: bytes) -> None:
    """Raise UnreadableBody if a JSON body has too many elements: its parser would make an object of each.

    Punctuation inside strings counts as well, so that a scan at the speed of memory suffices.
    """
    if len(body) <= JSON_OBJECTS_MAX:
        return
    counts = {
        f"{JSON_OBJECTS_MAX} objects and lists": (body.count(b"{") + body.count(b"[")) / JSON_OBJECTS_MAX,
        f"{JSON_STRINGS_MAX} strings": body.count(b'"') / 2 / JSON_STRINGS_MAX,
        f"{JSON_ITEMS_MAX} items": body.count(b",") / JSON_ITEMS_MAX,
    }
    if (worst := max(counts, key=lambda what: counts[what])) and counts[worst] > 1:
        raise UnreadableBody(
            "REQUEST_TOO_LARGE",
            f"the request's body has more than {worst}: send fewer or shorter sequences at once",
            body[:HEAD_BYTES],
        )


def read_json(model: type[Body], body: bytes) -> Body:
    """Parse JSON as `model`; an empty body is an empty object. Raises UnreadableBody, which names the wrong fields."""
    check_elements(body)
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        faults = [
            f"{'.'.join(str(part)[:80] for part in fault['loc']) or 'body'}: {fault['msg'][:200]}"
            for fault in errors[:_FAULTS_SHOWN]
        ]
        raise unreadable(f"the request's body is wrong: {'; '.join(faults)}", body) from None


def caller_of(request: Request, door_host: str) -> Caller:
    """Return where a request comes from. `door_host`: where the door listens."""
    return Caller(
        is_local=request.client is not None and is_this_machine(request.client.host, door_host),
        certificate_sha256=request.scope.get("state", {}).get(CERTIFICATE, ""),
    )


def api_key(request: Request) -> str:
    """Return the API key of a request; empty if it has none."""
    if key := request.headers.get("x-api-key", ""):
        return key.strip()
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""

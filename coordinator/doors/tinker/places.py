"""Bodies that no handler can read, refused at the place in the order that their beginning names.

The SDK goes on with the next place whatever the answer is. If nothing took the place of what is refused for good, all
that comes after it would wait for it.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.responses import Response

from coordinator.base.errors import ServiceError
from coordinator.doors.http.calls import INLINE_BYTES_MAX, Call, UnreadableBody
from coordinator.doors.tinker.futures import submit
from coordinator.doors.tinker.results import PROTOBUF
from coordinator.doors.tinker.shapes import Seq
from coordinator.operations.operation import Kind
from coordinator.service.training import PlacedRequest
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.v1 import training_pb2

Handler = Callable[[Call], Awaitable[Response]]
_SEQ_FIELD = re.compile(rb"\x10[\x80-\xff]{0,9}[\x00-\x7f]")
"""`seq_id` of a pass in protobuf: its tag, then bytes of which all but the last have the highest bit."""


class Place(BaseModel):
    """What has to be read of a body for its refusal to take its place."""

    model_id: str
    seq_id: Seq
    is_forward: bool = False


def takes_place(kind: Kind, make: type[PlacedRequest]) -> Callable[[Handler], Handler]:
    """Let a handler's bodies that cannot be read take their place as failed operations of this kind."""

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def answer(call: Call) -> Response:
            try:
                return await handler(call)
            except UnreadableBody as error:
                return await _refused(call, kind, make, error)

        return answer

    return decorate


async def _refused(call: Call, kind: Kind, make: type[PlacedRequest], error: UnreadableBody) -> Response:
    read = _fields if call.content_type == PROTOBUF else _members
    if len(error.begun) > INLINE_BYTES_MAX:
        place = await asyncio.to_thread(_place, read, error.begun)
    else:
        place = _place(read, error.begun)
    if place is None:
        raise error
    if place.is_forward:
        kind, make = Kind.FORWARD, training_pb2.ForwardRequest
    try:
        return await submit(call, call.service.refuse, kind, make(adapter_id=place.model_id, seq=place.seq_id), error)
    except ServiceError as refusal:
        if refusal.retry_delay_s is not None:
            raise  # nothing has that place yet: the same call will find it
        raise error from None


def _place(read: Callable[[bytes], Any], begun: bytes) -> Place | None:
    """The place that the beginning of a body names; None if it names none."""
    try:
        return Place.model_validate(read(begun))
    except (ValueError, DecodeError):  # what pydantic finds wrong is a ValueError, too
        return None


def _members(begun: bytes) -> Any:
    """The members of a JSON object as far as they have come. Raises ValueError."""
    try:
        given = from_json(begun)
    except ValueError:
        given = from_json(begun.rpartition(b",")[0], allow_partial=True)  # what stands before a comma is whole
    if isinstance(given, dict):
        given["is_forward"] = "forward_input" in given and "forward_backward_input" not in given
    return given


def _fields(begun: bytes) -> dict[str, Any]:
    """`model_id` and `seq_id` of a pass in protobuf, which every writer puts in front; whatever follows may be cut.

    Raises DecodeError.
    """
    seq = _SEQ_FIELD.match(begun, 2 + begun[1]) if len(begun) > 1 and begun[1] < 0x80 else None
    found = wire.ForwardBackwardRequest.FromString(begun[: seq.end()] if seq else b"")
    return {"model_id": found.model_id, "seq_id": found.seq_id}

"""Refusals of unreadable bodies, recorded at the sequence number that the head of the body names.

The SDK goes on with the next sequence number whatever the response is. So a permanent refusal must consume its sequence
number, or all later operations would wait for it.
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
from coordinator.doors.http.bodies import UnreadableBody
from coordinator.doors.http.calls import Call
from coordinator.doors.tinker.futures import submit
from coordinator.doors.tinker.results import PROTOBUF
from coordinator.doors.tinker.schemas import Seq
from coordinator.doors.tinker.sdk_versions import mark_batch
from coordinator.payloads.elements import INLINE_BYTES_MAX
from coordinator.service.training import SequencedRequest
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.v1 import training_pb2

Handler = Callable[[Call], Awaitable[Response]]
_SEQ_FIELD = re.compile(rb"\x10[\x80-\xff]{0,9}[\x00-\x7f]")
"""`seq_id` of a pass in protobuf: its tag, then bytes of which all but the last have the highest bit."""


class Head(BaseModel):
    """The fields of a body that its refusal needs."""

    model_id: str
    seq_id: Seq
    is_forward: bool = False


def consumes_seq(make: type[SequencedRequest]) -> Callable[[Handler], Handler]:
    """Decorate a handler: record an unreadable body as a refused request of this type."""

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def handle(call: Call) -> Response:
            try:
                return await handler(call)
            except UnreadableBody as error:
                return await _refuse(call, make, error)

        return handle

    return decorate


async def _refuse(call: Call, make: type[SequencedRequest], error: UnreadableBody) -> Response:
    read = read_protobuf if call.content_type == PROTOBUF else read_json
    if len(error.head) > INLINE_BYTES_MAX:
        head = await asyncio.to_thread(read_head, read, error.head)
    else:
        head = read_head(read, error.head)
    if head is None:
        raise error
    if head.is_forward:
        make = training_pb2.ForwardRequest
    request = make(adapter_id=head.model_id, seq=head.seq_id)
    try:
        mark_batch(call, request)
        return await submit(call, call.service.refuse, request, error)
    except ServiceError as refusal:
        if refusal.retry_delay_s is not None:
            raise  # the sequence number is still free: a retry of the call will find it
        raise error from None


def read_head(read: Callable[[bytes], Any], body: bytes) -> Head | None:
    """Return the model and sequence number that a truncated body names; None if it names none."""
    try:
        return Head.model_validate(read(body))
    except (ValueError, DecodeError):  # pydantic's ValidationError is a ValueError
        return None


def read_json(body: bytes) -> Any:
    """Return the complete members of a truncated JSON object. Raises ValueError."""
    try:
        given = from_json(body)
    except ValueError:
        given = from_json(body.rpartition(b",")[0], allow_partial=True)  # members before a comma are complete
    if isinstance(given, dict):
        given["is_forward"] = "forward_input" in given and "forward_backward_input" not in given
    return given


def read_protobuf(body: bytes) -> dict[str, Any]:
    """Return `model_id` and `seq_id` of a truncated pass in protobuf, which every encoder writes first.

    Raises DecodeError.
    """
    seq = _SEQ_FIELD.match(body, 2 + body[1]) if len(body) > 1 and body[1] < 0x80 else None
    found = wire.ForwardBackwardRequest.FromString(body[: seq.end()] if seq else b"")
    return {"model_id": found.model_id, "seq_id": found.seq_id}

"""The contract's RPCs over HTTP in JSON: `POST /tinkerpool.v1.PoolService/GetPoolStatus` with the request as JSON.

Requests and responses are the messages of the contract in protobuf's JSON form, and refusals are `{"code", "message",
"reason", "metadata"}`, as the Connect protocol has them for single requests. RPCs whose messages have tensors or files
are left to gRPC. The cycles stream as server-sent events. Does not depend on what an RPC does.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.door import to_refusal
from coordinator.doors.http.calls import Call, check_elements
from coordinator.doors.http.responses import event_stream, headers_of, status_of
from coordinator.doors.rpcs import has_bytes, methods, path_of, use_case_name
from tinkerpool.v1 import pool_pb2

CYCLES = "/tinkerpool.v1.PoolService/WatchCycles"


def unary() -> dict[str, MethodDescriptor]:
    """Return the RPCs that have one response and neither tensors nor files, by their paths."""
    return {
        path_of(method): method
        for method in methods()
        if not (method.server_streaming or has_bytes(method.input_type) or has_bytes(method.output_type))
    }


def handler_of(method: MethodDescriptor) -> Callable[[Call], Awaitable[Response]]:
    """Return the handler of an RPC's calls."""
    name, request_type = use_case_name(method), GetMessageClass(method.input_type)

    async def handle(call: Call) -> Response:
        request = _parsed(request_type, await call.body())
        await call.service.make_room(call.principal, request, call.room)
        response = await getattr(call.service, name)(call.principal, request)
        return Response(_json(response), media_type="application/json", headers={"cache-control": "no-store"})

    return handle


async def watch_cycles(call: Call) -> Response:
    """GET of the cycles as server-sent events: each is a `WatchCyclesResponse`. A refusal is the last event."""
    responses = call.service.watch_cycles(call.principal, pool_pb2.WatchCyclesRequest())
    while_valid = call.door.backend.authenticator.while_valid(call.principal)

    async def events() -> AsyncGenerator[bytes]:
        yield b": the next cycles\n\n"  # so that the browser knows at once that the stream is open
        try:
            with while_valid:
                async with aclosing(responses):
                    async for response in responses:
                        yield b"data: " + _json(response) + b"\n\n"
        except Exception as error:  # noqa: BLE001  # the status is already sent
            body = json.dumps(_body(to_refusal(error, CYCLES)), separators=(",", ":"))
            yield f"event: refusal\ndata: {body}\n\n".encode()

    return event_stream(events())


def error_response(error: Exception, where: str, retries: int = 0) -> Response:
    """Return the response to a call that raised. `where` and `retries`: see the doors of the other protocols."""
    refusal = to_refusal(error, where)
    return JSONResponse(_body(refusal), status_code=status_of(refusal), headers=headers_of(refusal, retries))


def _body(refusal: ServiceError) -> dict[str, Any]:
    body = {"code": refusal.code.name.lower(), "message": refusal.message, "reason": refusal.reason}
    return body | ({"metadata": refusal.metadata} if refusal.metadata else {})


def _parsed(request_type: type[Message], body: bytes) -> Message:
    check_elements(body)
    try:
        return json_format.Parse(body.decode() or "{}", request_type())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        name = request_type.DESCRIPTOR.full_name
        raise invalid(f"the body is not a {name} in JSON: {' '.join(str(error).split())[:300]}") from None


def _json(message: Message) -> bytes:
    """Return a message's JSON, with the fields that have their default."""
    return json_format.MessageToJson(message, always_print_fields_with_no_presence=True, indent=None).encode()

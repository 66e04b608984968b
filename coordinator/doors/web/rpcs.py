"""The contract's RPCs over HTTP in JSON: `POST /tinkerpool.v1.PoolService/GetPoolStatus` with the request as JSON.

Requests and responses are the messages of the contract in protobuf's JSON form, and refusals are `{"code", "message",
"reason", "metadata"}`, as the Connect protocol has them for single requests. RPCs whose messages have tensors or files
are left to gRPC. Does not depend on what an RPC does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.door import to_refusal
from coordinator.doors.http.calls import INLINE_JSON_BYTES_MAX, Call, check_elements
from coordinator.doors.http.responses import headers_of, status_of
from coordinator.doors.rpcs import has_bytes, methods, path_of, use_case_name


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
        body = await call.body()
        request = await call.in_turn(
            len(body), lambda: _parsed(request_type, body), inline_bytes_max=INLINE_JSON_BYTES_MAX
        )
        await call.service.make_room(call.principal, request, call.room)
        response = await getattr(call.service, name)(call.principal, request)
        encoded = await call.in_turn(
            response.ByteSize(), lambda: to_json(response), inline_bytes_max=INLINE_JSON_BYTES_MAX
        )
        return Response(encoded, media_type="application/json", headers={"cache-control": "no-store"})

    return handle


def error_response(error: Exception, where: str, retries: int = 0) -> Response:
    """Return the response to a call that raised. `where` and `retries`: see the doors of the other protocols."""
    refusal = to_refusal(error, where)
    return JSONResponse(refusal_body(refusal), status_code=status_of(refusal), headers=headers_of(refusal, retries))


def refusal_body(refusal: ServiceError) -> dict[str, Any]:
    """Return the JSON of a refusal."""
    body = {"code": refusal.code.name.lower(), "message": refusal.message, "reason": refusal.reason}
    return body | ({"metadata": refusal.metadata} if refusal.metadata else {})


def _parsed(request_type: type[Message], body: bytes) -> Message:
    check_elements(body)
    try:
        return json_format.Parse(body.decode() or "{}", request_type())
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        name = request_type.DESCRIPTOR.full_name
        raise invalid(f"the body is not a {name} in JSON: {' '.join(str(error).split())[:300]}") from None


def to_json(message: Message) -> bytes:
    """Return a message's JSON, with the fields that have their default."""
    return json_format.MessageToJson(message, always_print_fields_with_no_presence=True, indent=None).encode()

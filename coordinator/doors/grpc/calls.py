"""From a gRPC call to a use case and back: who calls, what they ask, and how a refusal looks on the wire.

Every RPC of the contract is served by the method of `service` that has its name in snake_case; which RPCs there are is
read from the contract's own descriptors, so this file knows none of them. Main invariants: no use case runs, and no
request body is read, before the API key is checked; no text of an exception that is not a `ServiceError` leaves here.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.service.auth import Principal
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    operations_pb2,
    pool_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")
Context = grpc.aio.ServicerContext[bytes, bytes]
Authenticate = Callable[[str], Principal]
"""From an API key, perhaps empty, to whose it is. Raises ServiceError UNAUTHENTICATED."""

SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (
        sessions_pb2,
        adapters_pb2,
        training_pb2,
        sampling_pb2,
        checkpoints_pb2,
        operations_pb2,
        pool_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The services of the contract."""

ERROR_DOMAIN = "tinkerpool"
"""`ErrorInfo.domain` of every refusal."""

MESSAGE_BYTES_MAX = 1500
"""Longest error text: it travels twice in HTTP/2 headers, which clients limit to 8 KiB, and may triple on the way."""


@dataclass(frozen=True, slots=True)
class _Rpc:
    """One method of the contract and the use case behind it."""

    name: str
    """`<service>.<method>`, for the log."""
    request_type: type[Message]
    use_case: Callable[[Principal, Any], Any]
    is_streaming: bool

    def parse(self, body: bytes) -> Message:
        """The request message. Raises ServiceError INVALID_ARGUMENT."""
        try:
            return self.request_type.FromString(body)
        except DecodeError:
            name = self.request_type.DESCRIPTOR.full_name
            raise invalid(f"the request is not a valid {name} message: are both sides on the same version?") from None


class Calls(grpc.GenericRpcHandler):
    """Finds the use case of a call, for a caller whose key is good."""

    def __init__(self, service: object, authenticate: Authenticate) -> None:
        """Raises AttributeError if `service` lacks a method for an RPC of the contract."""
        self._authenticate = authenticate
        self._rpcs: Mapping[str, _Rpc] = {
            f"/{method.containing_service.full_name}/{method.name}": _rpc(method, service)
            for descriptor in SERVICES
            for method in descriptor.methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Called by grpc for every call, when its metadata is there and its body is not."""
        rpc = self._rpcs.get(handler_call_details.method)
        if rpc is None:
            return None
        try:
            principal = self._authenticate(_api_key(handler_call_details))
        except Exception as error:  # noqa: BLE001  # from here its text would reach the client
            return _refusing(_refusal(error, rpc.name))
        return _streaming(rpc, principal) if rpc.is_streaming else _unary(rpc, principal)


def use_case_name(method: MethodDescriptor) -> str:
    """`CreateAdapter` is served by `create_adapter`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def _rpc(method: MethodDescriptor, service: object) -> _Rpc:
    return _Rpc(
        name=f"{method.containing_service.name}.{method.name}",
        request_type=GetMessageClass(method.input_type),
        use_case=getattr(service, use_case_name(method)),
        is_streaming=method.server_streaming,
    )


def _unary(rpc: _Rpc, principal: Principal) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def respond(body: bytes) -> bytes:
        return _serialize(await rpc.use_case(principal, rpc.parse(body)))

    async def handle(body: bytes, context: Context) -> bytes:
        return await _answer(rpc, context, respond(body))

    return grpc.unary_unary_rpc_method_handler(handle)


def _streaming(rpc: _Rpc, principal: Principal) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def respond(body: bytes) -> AsyncIterator[bytes]:
        responses: AsyncIterator[Message] = rpc.use_case(principal, rpc.parse(body))
        async for response in responses:
            yield _serialize(response)

    async def handle(body: bytes, context: Context) -> None:
        async with aclosing(respond(body)) as responses:  # type: ignore[type-var]
            while (response := await _answer(rpc, context, anext(responses, None))) is not None:
                await context.write(response)

    return grpc.unary_stream_rpc_method_handler(handle)


def _refusing(error: ServiceError) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Refuses without reading the body: on the wire every call is a stream each way, and this one never reads."""

    async def handle(_bodies: AsyncIterator[bytes], context: Context) -> None:
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)


def _serialize(response: Message) -> bytes:
    """Its bytes, the same in every life of the process: a map's entries would lie in an order that each life draws."""
    return response.SerializeToString(deterministic=True)


async def _answer(rpc: _Rpc, context: Context, response: Awaitable[T]) -> T:
    """What the use case answers, or the call's end with its refusal. A cancelled call passes as CancelledError."""
    try:
        return await response
    except Exception as error:  # noqa: BLE001  # from here its text would reach the client
        await _abort(context, _refusal(error, rpc.name))


def _refusal(error: Exception, rpc_name: str) -> ServiceError:
    """What the caller is told. A fault of ours is logged under a new id, and the id is all that the caller sees."""
    if isinstance(error, ServiceError):
        return error
    error_id = secrets.token_hex(6)
    _log.error("error %s in %s", error_id, rpc_name, exc_info=error)
    message = f"internal error {error_id}: a fault of the pool's; its log has more under this id"
    return ServiceError(Code.INTERNAL, "INTERNAL", message, metadata={"error_id": error_id})


async def _abort(context: Context, error: ServiceError) -> NoReturn:
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())


def to_status(error: ServiceError) -> status_pb2.Status:
    """A refusal on the wire: `ErrorInfo` always, `RetryInfo` exactly when the same call may succeed later."""
    message = error.message
    if len(message.encode()) > MESSAGE_BYTES_MAX:
        message = message.encode()[: MESSAGE_BYTES_MAX - 4].decode(errors="ignore") + " ..."
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    ]
    if error.retry_delay_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_delay_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=int(error.code), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _api_key(details: grpc.HandlerCallDetails) -> str:
    """The key of `authorization: Bearer <key>`; empty if there is none."""
    for name, value in details.invocation_metadata:
        if name == "authorization":
            scheme, _, key = (value if isinstance(value, str) else value.decode("latin-1")).partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""

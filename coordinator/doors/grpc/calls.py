"""From a gRPC call to a use case and back: authentication, parsing, and refusals on the wire.

The method of `service` with an RPC's name in snake_case serves that RPC. The list of RPCs comes from the contract's
descriptors, so this file names none. Main invariants: no use case runs and no request is read before the API key is
checked; text of an exception that is not a `ServiceError` never reaches a client.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.door import Keys, to_refusal
from coordinator.doors.grpc.intake import Intake, Received
from coordinator.doors.grpc.statuses import Context, abort
from coordinator.payloads.elements import TooManyElements, parse, parse_head
from coordinator.payloads.passes import INLINE_BYTES_MAX
from coordinator.service.training import SEQUENCED_REQUESTS
from coordinator.tenants.keys import Principal
from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    limits_pb2,
    operations_pb2,
    pool_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)

T = TypeVar("T")

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
        admin_pb2,
        limits_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
)
"""The services of the contract."""


@dataclass(frozen=True, slots=True)
class _Rpc:
    """One method of the contract and the use case behind it."""

    name: str
    """`<service>.<method>`, for the log."""
    request_type: type[Message]
    use_case: Callable[[Principal, Any], Any]
    refuse: Callable[[Principal, Any, ServiceError], Awaitable[NoReturn]]
    """Records a refusal at a sequence number, and raises it."""
    is_streaming: bool
    is_large: bool
    """Whether the request may have data for training or sampling."""

    def parse(self, body: bytes) -> Message:
        """Return the request message. Raises ServiceError INVALID_ARGUMENT."""
        try:
            return parse(self.request_type, body)
        except DecodeError:
            name = self.request_type.DESCRIPTOR.full_name
            raise invalid(
                f"the request is not a valid {name} message: use the same version of client and pool"
            ) from None

    async def read(self, body: bytes) -> Message:
        """Return the request message; parse a large one on a thread. Raises ServiceError INVALID_ARGUMENT."""
        return self.parse(body) if len(body) <= INLINE_BYTES_MAX else await asyncio.to_thread(self.parse, body)

    async def recorded(self, principal: Principal, body: bytes, error: TooManyElements) -> ServiceError:
        """Return the refusal of a message, after it was recorded at the sequence number that the message names."""
        head = await asyncio.to_thread(parse_head, self.request_type, body)
        if not isinstance(head, SEQUENCED_REQUESTS):
            return error
        try:
            await self.refuse(principal, head, error)
        except ServiceError as refusal:
            return refusal if refusal.retry_delay_s is not None else error


class Calls(grpc.GenericRpcHandler):
    """Authenticates each call and runs its use case."""

    def __init__(self, service: Any, keys: Keys, intake: Intake) -> None:
        """Look up the use cases. Raises AttributeError if `service` lacks a method for an RPC of the contract."""
        self._keys = keys
        self._intake = intake
        self._rpcs: Mapping[str, _Rpc] = {
            f"/{method.containing_service.full_name}/{method.name}": _rpc(method, service)
            for descriptor in SERVICES
            for method in descriptor.methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a call. grpc calls this with the call's metadata, before its body is read."""
        rpc = self._rpcs.get(handler_call_details.method)
        if rpc is None:
            return None
        try:
            principal = self._keys.authenticate(_api_key(handler_call_details))
        except Exception as error:  # noqa: BLE001  # from here its text would reach the client
            return _refusing(to_refusal(error, rpc.name))
        if rpc.is_streaming:
            return _streaming(rpc, principal, self._keys, self._intake)
        return _unary(rpc, principal, self._intake)


def use_case_name(method: MethodDescriptor) -> str:
    """Return the name of an RPC's use case: `create_adapter` for `CreateAdapter`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()


def _rpc(method: MethodDescriptor, service: Any) -> _Rpc:
    return _Rpc(
        name=f"{method.containing_service.name}.{method.name}",
        request_type=GetMessageClass(method.input_type),
        use_case=getattr(service, use_case_name(method)),
        refuse=service.refuse,
        is_streaming=method.server_streaming,
        is_large=_has_tensors(method.input_type),
    )


def _has_tensors(message: Descriptor) -> bool:
    parts = [field.message_type for field in message.fields if field.message_type is not None]
    return types_pb2.Tensor.DESCRIPTOR in parts or any(_has_tensors(part) for part in parts)


async def _read(context: Context) -> bytes:
    body: Any = await context.read()
    if body is grpc.aio.EOF:
        raise invalid("the call has no request")
    return bytes(body)


def _unary(rpc: _Rpc, principal: Principal, intake: Intake) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(received: Received) -> bytes:
        body = received.take()
        try:
            request = await rpc.read(body)
        except TooManyElements as error:
            raise await rpc.recorded(principal, body, error) from None
        del body
        return _serialize(await rpc.use_case(principal, request))

    async def receive_and_run(context: Context) -> bytes:
        read = functools.partial(_read, context)
        async with intake.received(principal.tenant_id, read, is_large=rpc.is_large) as received:
            return await run(received)

    async def handle(_bodies: object, context: Context) -> bytes:
        return await _respond(rpc, context, receive_and_run(context))

    return grpc.stream_unary_rpc_method_handler(handle)  # a stream of one request, which is read once there is room


def _streaming(rpc: _Rpc, principal: Principal, keys: Keys, intake: Intake) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(received: Received) -> AsyncIterator[bytes]:
        responses: AsyncIterator[Message] = rpc.use_case(principal, await rpc.read(received.take()))
        async for response in responses:
            yield _serialize(response)

    async def handle(_bodies: object, context: Context) -> None:
        is_writing = False
        receiving = intake.received(principal.tenant_id, functools.partial(_read, context), is_large=rpc.is_large)
        try:
            with keys.while_valid(principal):
                async with AsyncExitStack() as held:
                    received = await _respond(rpc, context, held.enter_async_context(receiving))
                    responses = await held.enter_async_context(aclosing(run(received)))  # type: ignore[type-var]
                    while (response := await _respond(rpc, context, anext(responses, None))) is not None:
                        is_writing = True
                        await context.write(response)
                        is_writing = False
        except ServiceError as error:  # the key was revoked meanwhile
            if is_writing:  # the client does not read, and no status can overtake the response: end without one
                raise asyncio.CancelledError from None
            await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)


def _refusing(error: ServiceError) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Return a handler that refuses without reading the request: it is declared as a stream and never read."""

    async def handle(_bodies: AsyncIterator[bytes], context: Context) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(handle)


def _serialize(response: Message) -> bytes:
    """Return deterministic bytes: the default order of a map's entries changes with every process."""
    return response.SerializeToString(deterministic=True)


async def _respond(rpc: _Rpc, context: Context, response: Awaitable[T]) -> T:
    """Return a use case's response, or end the call with its refusal. CancelledError passes, for a cancelled call."""
    try:
        return await response
    except Exception as error:  # noqa: BLE001  # from here its text would reach the client
        await abort(context, to_refusal(error, rpc.name))


def _api_key(details: grpc.HandlerCallDetails) -> str:
    """Return the key of `authorization: Bearer <key>`; empty if the call has none."""
    for name, value in details.invocation_metadata:
        if name == "authorization":
            scheme, _, key = (value if isinstance(value, str) else value.decode("latin-1")).partition(" ")
            return key.strip() if scheme.lower() == "bearer" else ""
    return ""

"""From a gRPC call to a use case and back: authentication, parsing, and refusals on the wire.

The method of `service` with an RPC's name in snake_case serves that RPC. The list of RPCs comes from the contract's
descriptors, so this file names none. Main invariants: no use case runs and no request is read before the API key is
checked; text of an exception that is not a `ServiceError` never reaches a client.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.door import Backend, to_refusal
from coordinator.doors.grpc.callers import caller_of
from coordinator.doors.grpc.intake import Intake, Received
from coordinator.doors.grpc.statuses import Context, abort
from coordinator.doors.rpcs import has_bytes, methods, path_of, use_case_name
from coordinator.limits.results import Room
from coordinator.payloads.elements import INLINE_BYTES_MAX, TooManyElements, parse, parse_head
from coordinator.service.roles import LEAST_ROLES
from coordinator.service.training import SEQUENCED_REQUESTS
from coordinator.tenants.principals import Principal, Role

T = TypeVar("T")


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
    """Whether the request may have data for training or sampling, or a part of an upload."""
    least: Role
    """The least role of its callers."""
    ends_with_key: bool
    """Whether a running call ends with its key. A call of AdminService may end its own key: its response, which may
    have the successor, is sent nevertheless."""

    def parse(self, body: bytes) -> Message:
        """Return the request message. Raises ServiceError INVALID_ARGUMENT."""
        try:
            return parse(self.request_type, body)
        except DecodeError:
            name = self.request_type.DESCRIPTOR.full_name
            raise invalid(
                f"the request is not a valid {name} message: use the same version of client and pool"
            ) from None

    async def recorded(self, principal: Principal, body: bytes, error: TooManyElements) -> ServiceError:
        """Return the refusal of a message, after it was recorded at the sequence number that the message names."""
        head = await asyncio.to_thread(parse_head, self.request_type, body)
        if not isinstance(head, SEQUENCED_REQUESTS):
            return error
        try:
            await self.refuse(principal, head, error)
        except ServiceError as refusal:
            return refusal if refusal.retry_delay_s is not None else error


class _Entrance:
    """What a call passes before its use case: the check of its key, then the reading of its request."""

    def __init__(self, backend: Backend, intake: Intake, host: str) -> None:
        self.backend = backend
        self._intake = intake
        self._host = host

    async def admitted(self, rpc: _Rpc, context: Context) -> Principal:
        """Return the caller of an RPC; or end the call with a refusal, unread."""
        if (traces := self.backend.traces) is not None:
            traces.receive(_metadata(context, "traceparent"))
        try:
            return self.backend.authenticator.admit(_api_key(context), caller_of(context, self._host), rpc.least)
        except Exception as error:  # noqa: BLE001  # from here its text would reach the client
            await abort(context, to_refusal(error, rpc.name))

    def while_valid(self, rpc: _Rpc, principal: Principal) -> AbstractContextManager[None]:
        """Return a block that raises ServiceError when the caller's key ends meanwhile, if that is to end the call."""
        return self.backend.authenticator.while_valid(principal) if rpc.ends_with_key else nullcontext()

    def received(self, rpc: _Rpc, principal: Principal, context: Context) -> AbstractAsyncContextManager[Received]:
        """Return a block that has the call's request, and holds its bytes."""
        return self._intake.received(principal.tenant_id, functools.partial(_read, context), is_large=rpc.is_large)

    async def parsed(self, rpc: _Rpc, principal: Principal, body: bytes) -> Message:
        """Return the request message; parse a large one on a thread, in a turn of its tenant. Raises ServiceError."""
        if len(body) <= INLINE_BYTES_MAX:
            return rpc.parse(body)
        async with self.backend.decode_turns.turn(principal.tenant_id) as turn:
            turn.use(len(body))
            return await asyncio.to_thread(rpc.parse, body)


class Calls(grpc.GenericRpcHandler):
    """Admits each call and runs its use case."""

    def __init__(self, backend: Backend, intake: Intake, host: str) -> None:
        """Look up the use cases. `host`: where the door listens.

        Raises AttributeError if the service lacks a method for an RPC of the contract, KeyError if the RPC has no role.
        """
        entrance = _Entrance(backend, intake, host)
        self._handlers: Mapping[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            path_of(method): _handler(_rpc(method, backend.service), entrance) for method in methods()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """Return the handler of a call, which admits it before it reads the call's request."""
        return self._handlers.get(handler_call_details.method)


def _rpc(method: MethodDescriptor, service: Any) -> _Rpc:
    return _Rpc(
        name=f"{method.containing_service.name}.{method.name}",
        request_type=GetMessageClass(method.input_type),
        use_case=getattr(service, use_case_name(method)),
        refuse=service.refuse,
        is_streaming=method.server_streaming,
        is_large=has_bytes(method.input_type),
        least=LEAST_ROLES[use_case_name(method)],
        ends_with_key=method.containing_service.name != "AdminService",
    )


def _handler(rpc: _Rpc, entrance: _Entrance) -> grpc.RpcMethodHandler[bytes, bytes]:
    return _streaming(rpc, entrance) if rpc.is_streaming else _unary(rpc, entrance)


async def _read(context: Context) -> bytes:
    body: Any = await context.read()
    if body is grpc.aio.EOF:
        raise invalid("the call has no request")
    return bytes(body)


def _unary(rpc: _Rpc, entrance: _Entrance) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(principal: Principal, received: Received, room: Room) -> bytes:
        body = received.take()
        try:
            request = await entrance.parsed(rpc, principal, body)
        except TooManyElements as error:
            raise await rpc.recorded(principal, body, error) from None
        del body
        await entrance.backend.service.make_room(principal, request, room)
        response = _serialize(await rpc.use_case(principal, request))
        room.fit(len(response))
        return response

    async def receive_and_run(principal: Principal, context: Context) -> bytes:
        room = entrance.backend.responses.room(principal.tenant_id)
        # Called once the response was read, or the connection was closed. The stubs have a wrong type for it.
        context.add_done_callback(lambda _: room.close())  # type: ignore[arg-type]
        async with entrance.received(rpc, principal, context) as received:
            return await run(principal, received, room)

    async def handle(_bodies: object, context: Context) -> bytes:
        principal = await entrance.admitted(rpc, context)
        try:
            with entrance.while_valid(rpc, principal):
                return await _respond(rpc, context, receive_and_run(principal, context))
        except ServiceError as error:  # the key has ended meanwhile
            await abort(context, error)

    return grpc.stream_unary_rpc_method_handler(handle)  # a stream of one request, which is read once there is room


def _streaming(rpc: _Rpc, entrance: _Entrance) -> grpc.RpcMethodHandler[bytes, bytes]:
    async def run(principal: Principal, received: Received) -> AsyncIterator[bytes]:
        request = await entrance.parsed(rpc, principal, received.take())
        async with aclosing(rpc.use_case(principal, request)) as responses:
            while (response := await anext(responses, None)) is not None:
                body = _serialize(response)
                del response  # while the client reads, its bytes alone are in memory
                yield body

    async def handle(_bodies: object, context: Context) -> None:
        is_writing = False
        principal = await entrance.admitted(rpc, context)
        receiving = entrance.received(rpc, principal, context)
        try:
            with entrance.while_valid(rpc, principal):
                async with AsyncExitStack() as held:
                    received = await _respond(rpc, context, held.enter_async_context(receiving))
                    responses = await held.enter_async_context(aclosing(run(principal, received)))  # type: ignore[type-var]
                    while (response := await _respond(rpc, context, anext(responses, None))) is not None:
                        is_writing = True
                        await context.write(response)
                        is_writing = False
        except ServiceError as error:  # the key has ended meanwhile
            if is_writing:  # the client does not read, and no status can overtake the response: end without one
                raise asyncio.CancelledError from None
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


def _api_key(context: Context) -> str:
    """Return the key of `authorization: Bearer <key>`; empty if the call has none."""
    scheme, _, key = _metadata(context, "authorization").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _metadata(context: Context, wanted: str) -> str:
    """Return the first value of this name in a call's metadata; empty if there is none."""
    for name, value in context.invocation_metadata() or ():
        if name == wanted:
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""

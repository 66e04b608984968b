"""The calls that need no key: health (grpc.health.v1) and reflection.

Does not depend on the RPCs of the contract, only on their services' names. Anybody can make these calls, so each is
bounded by number. grpc reads a message up to the largest size that the server takes; so one request is read at a time,
for a limited time, and a health check that would have to wait is answered unread. Main invariant: no client can delay
the answer to another one, or the stop: a status is set without waiting, and watchers write outside any lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from coordinator.base.errors import Code, Quota, ServiceError, invalid, not_found, unavailable
from coordinator.doors.door import to_refusal
from coordinator.doors.grpc.callers import address_of
from coordinator.doors.grpc.places import Places
from coordinator.doors.grpc.statuses import Context, abort
from coordinator.doors.peers import network_of

WATCHERS_MAX = 256
"""Most `Watch` calls at a time: one for each of the connections that the door takes where 1,024 files may be open. An
unread one holds a task and up to 64 KiB."""
REFLECTIONS_MAX = 16
"""Most reflection calls at a time: people debug with them, programs do not need them."""
REQUEST_BYTES_MAX = 4096
"""Largest request: the longest name of a service or file has under a hundred bytes."""
READ_S = 1.0
"""Seconds that a request may take to arrive. A short one comes in the same packet as its headers."""
TURN_S = 0.1
"""Seconds that a health check waits for its turn to be read."""
REFLECTION_TURN_S = 5.0
"""The same for a request of reflection, which cannot be answered unread."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class PublicCalls(grpc.GenericRpcHandler):
    """Serves health and reflection. All services of the pool have one status."""

    def __init__(self, services: Sequence[str]) -> None:
        """`services`: the full names of the contract's services."""
        self._names = frozenset(["", *services])
        self._reflection = reflection.aio.ReflectionServicer([*services, health.SERVICE_NAME, reflection.SERVICE_NAME])
        self._status: int = _NOT_SERVING
        self._is_closed = False
        self._changed = asyncio.Event()
        self._reading = asyncio.Semaphore(1)
        self._watchers = Places("Health.Watch", WATCHERS_MAX)
        self._reflections = Places("reflection", REFLECTIONS_MAX)
        self._handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]] = {
            f"/{health.SERVICE_NAME}/Check": grpc.stream_unary_rpc_method_handler(_refusing(self._check)),
            f"/{health.SERVICE_NAME}/Watch": grpc.stream_stream_rpc_method_handler(_refusing(self._watch)),
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
                _refusing(self._reflect)
            ),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call; None for a call that needs a key."""
        return self._handlers.get(handler_call_details.method)

    def set_health(self, *, is_serving: bool) -> None:
        """Set the status of all services, and wake the watchers."""
        status = _SERVING if is_serving and not self._is_closed else _NOT_SERVING
        if status != self._status:
            self._status = status
            self._wake()

    def close(self) -> None:
        """Set the status to NOT_SERVING for good; watchers write it and end."""
        self._is_closed = True
        self._status = _NOT_SERVING
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, context: Context) -> bytes:
        await self._check_name(context)
        return health_pb2.HealthCheckResponse(status=self._status).SerializeToString()

    async def _watch(self, context: Context) -> None:
        with self._watchers.place(network_of(address_of(context))):
            is_known = await self._is_known(context)
            written = None
            while True:
                changed = self._changed
                status = self._status if is_known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != written:
                    await context.write(health_pb2.HealthCheckResponse(status=status).SerializeToString())
                    written = status
                elif self._is_closed:
                    raise unavailable("SHUTTING_DOWN", "the pool is shutting down")
                else:
                    await changed.wait()

    async def _reflect(self, context: Context) -> None:
        with self._reflections.place(network_of(address_of(context))):

            async def requests() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                while (body := await self._read(context, REFLECTION_TURN_S)) is not None:
                    yield _parsed(reflection_pb2.ServerReflectionRequest, body)

            responses: Any = self._reflection.ServerReflectionInfo(requests(), None)
            async for response in responses:
                await context.write(response.SerializeToString())

    async def _check_name(self, context: Context) -> None:
        """Refuse an unknown service."""
        if not await self._is_known(context):
            raise not_found("service", "of this name")

    async def _is_known(self, context: Context) -> bool:
        """Return whether the pool has the service that the request names; True for a request that is not read."""
        try:
            body = await self._read(context, TURN_S)
        except _NotReadError:
            return True
        return _parsed(health_pb2.HealthCheckRequest, body or b"").service in self._names

    async def _read(self, context: Context, turn_s: float) -> bytes | None:
        """Return the next request, None at the end of the stream. Raises ServiceError, _NotReadError without a turn."""
        try:
            async with asyncio.timeout(turn_s):
                await self._reading.acquire()
        except TimeoutError:
            raise _NotReadError from None
        try:
            async with asyncio.timeout(READ_S):
                body: Any = await context.read()
        except TimeoutError:
            raise unavailable("BODY_TOO_SLOW", "the request did not arrive: try again") from None
        finally:
            self._reading.release()
        if body is grpc.aio.EOF:
            return None
        if len(body) > REQUEST_BYTES_MAX:
            raise invalid(f"the request has {len(body)} bytes: send at most {REQUEST_BYTES_MAX}")
        return bytes(body)


class _NotReadError(ServiceError):
    """The request was not read, because others are being read."""

    def __init__(self) -> None:
        quota = Quota("requests of callers without a key that are being read", 1, 1)
        message = f"{quota}; try again after 1 s"
        super().__init__(Code.RESOURCE_EXHAUSTED, "CALLS_BUSY", message, retry_delay_s=1.0, quota=quota)


def _parsed(message_type: Any, body: bytes) -> Any:
    try:
        return message_type.FromString(body)
    except DecodeError:
        raise invalid(f"the request is not a valid {message_type.DESCRIPTOR.full_name} message") from None


def _refusing(call: Callable[[Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    """Return a handler that reads no request by itself, and turns exceptions into refusals."""

    async def handle(_requests: object, context: Context) -> Any:
        try:
            return await call(context)
        except ServiceError as error:
            await abort(context, to_refusal(error, "a call without a key"))

    return handle

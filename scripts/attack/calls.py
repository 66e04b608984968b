"""Calls of an attacker: gRPC with generated stubs, HTTP/1.1 by hand; answers are counted, never retried."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

import grpc

from scripts.attack.attack import Target
from tinkerpool.v1 import (
    adapters_pb2,
    adapters_pb2_grpc,
    checkpoints_pb2,
    checkpoints_pb2_grpc,
    operations_pb2,
    operations_pb2_grpc,
    sampling_pb2,
    sampling_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    training_pb2,
    training_pb2_grpc,
    types_pb2,
)

T = TypeVar("T")
RANK = 32
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
NUM_AT_ONCE = 64
"""Calls of a batch that are under way at a time."""


class Tenant:
    """The attacker's tenant over gRPC: its own channel, and a session."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.channel = grpc.aio.insecure_channel(target.grpc, options=list(OPTIONS))
        self.metadata = (("authorization", f"Bearer {target.key}"),)
        self.training = training_pb2_grpc.TrainingServiceStub(self.channel)
        self.checkpoints = checkpoints_pb2_grpc.CheckpointServiceStub(self.channel)
        self.sampling = sampling_pb2_grpc.SamplingServiceStub(self.channel)
        self.operations = operations_pb2_grpc.OperationServiceStub(self.channel)
        self._adapters = adapters_pb2_grpc.AdapterServiceStub(self.channel)
        self.sessions = sessions_pb2_grpc.SessionServiceStub(self.channel)
        self._session_id = ""

    async def create_session(self, request_id: str = "", metadata: Mapping[str, str] | None = None) -> str:
        """Create a session; return its id."""
        request = sessions_pb2.CreateSessionRequest(request_id=request_id, user_metadata=metadata)
        return (await self.sessions.CreateSession(request, metadata=self.metadata)).session.session_id

    async def session(self) -> str:
        """Return the id of the tenant's session, created at the first call."""
        self._session_id = self._session_id or await self.create_session()
        return self._session_id

    async def adapter(self, index: int = 0, rank: int = RANK) -> str:
        """Create an adapter; return its id."""
        request = adapters_pb2.CreateAdapterRequest(
            session_id=await self.session(), base_model=self.target.model, rank=rank, index=index
        )
        return (await self._adapters.CreateAdapter(request, metadata=self.metadata)).adapter.adapter_id

    async def sampler(self) -> str:
        """Create a sampler of the base model; return its id."""
        request = sampling_pb2.CreateSamplerRequest(
            session_id=await self.session(), base_model=self.target.model, index=0
        )
        return (await self.sampling.CreateSampler(request, metadata=self.metadata)).sampler.sampler_id

    async def save(
        self, adapter_id: str, seq: int, name: str, metadata: Mapping[str, str] | None = None
    ) -> operations_pb2.Operation:
        """Queue a save."""
        request = checkpoints_pb2.SaveStateRequest(adapter_id=adapter_id, seq=seq, name=name, user_metadata=metadata)
        return (await self.checkpoints.SaveState(request, metadata=self.metadata)).operation

    async def optim_step(self, adapter_id: str, seq: int) -> operations_pb2.Operation:
        """Queue an optimizer step."""
        request = training_pb2.OptimStepRequest(adapter_id=adapter_id, seq=seq, adam=types_pb2.AdamParams())
        return (await self.training.OptimStep(request, metadata=self.metadata)).operation

    async def wait(self, names: Iterable[str]) -> list[operations_pb2.Operation]:
        """Wait for operations; return them in order of finishing."""
        request = operations_pb2.WaitOperationsRequest(names=names)
        return [each.operation async for each in self.operations.WaitOperations(request, metadata=self.metadata)]

    async def send_raw(self, path: str, body: bytes) -> bytes:
        """Send the bytes of a request without making its objects; return the bytes of the response."""
        method: Any = self.channel.unary_unary(path)
        response: bytes = await method(body, metadata=self.metadata)
        return response


async def counted(target: Target, call: Awaitable[object]) -> None:
    """Await one call and count its answer: `done`, or the status of the refusal."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        target.tally[error.code().name] += 1
    except (OSError, EOFError) as error:
        target.tally[type(error).__name__] += 1
    else:
        target.tally["done"] += 1


async def counted_all(target: Target, calls: Iterable[Awaitable[object]]) -> None:
    """Do the same with many calls, `NUM_AT_ONCE` at a time."""
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(call: Awaitable[object]) -> None:
        async with room:
            await counted(target, call)

    await asyncio.gather(*(one(call) for call in calls))


async def post(
    target: Target, path: str, body: bytes, *, media_type: str = "application/json", encoding: str = ""
) -> int:
    """Send one POST over HTTP, count its status, return it once the response is read.

    Raises OSError, or EOFError if the pool hangs up.
    """
    reader, writer = await connect(target.http)
    try:
        writer.write(http_head(target, path, len(body), media_type=media_type, encoding=encoding) + body)
        status = await status_of(reader)
        target.tally[f"HTTP {status}"] += 1
        while await reader.read(1 << 20):
            pass
        return status
    finally:
        writer.close()


async def post_json(target: Target, path: str, body: object) -> int:
    """Do the same with a body in JSON."""
    return await post(target, path, json.dumps(body).encode())


async def unread(target: Target, request: bytes, number: int) -> list[socket.socket]:
    """Send a request over HTTP on some connections, whose responses are not read; return the connections."""
    host, _, port = target.http.rpartition(":")
    connections = []
    for _ in range(number):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)  # noqa: FBT003
        try:
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
            await asyncio.get_running_loop().sock_sendall(connection, request)
        except OSError as error:
            target.tally[type(error).__name__] += 1
            connection.close()
            continue
        connections.append(connection)
        target.tally["calls"] += 1
    return connections


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a TCP connection to a door."""
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def http_head(
    target: Target, path: str, num_bytes: int, *, media_type: str = "application/json", encoding: str = ""
) -> bytes:
    """Return the head of a POST with the attacker's key, at whose response the connection ends."""
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        f"X-API-Key: {target.key}",
        f"Content-Type: {media_type}",
    ]
    lines += [f"Content-Encoding: {encoding}"] if encoding else []
    return "\r\n".join([*lines, f"Content-Length: {num_bytes}", "\r\n"]).encode()


async def status_of(reader: asyncio.StreamReader) -> int:
    """Read the first line of a response; return its status. Raises EOFError if the pool hangs up."""
    line = await reader.readline()
    if not line:
        raise EOFError("the pool closed the connection")
    return int(line.split()[1])

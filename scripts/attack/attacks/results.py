"""Attacks by one tenant that requests large results and reads none of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.attacks.bodies import PROTOBUF
from scripts.attack.calls import Tenant, http_head, unread
from scripts.attack.frames import Connection
from tinkerpool.v1 import operations_pb2, training_pb2, types_pb2

GET_OPERATION = "/tinkerpool.v1.OperationService/GetOperation"
RETRIEVE_FUTURE = "/api/v1/retrieve_future"
NUM_DATUMS, DATUM_TOKENS = 1000, 64
CALLS_OF_CONNECTION = 200
"""Below the number of calls that the pool takes on one connection."""


async def grpc_results_unread(target: Target) -> AsyncGenerator[None, None]:
    """Fetch a result of 260 kB 4,000 times over gRPC on twenty connections that take no byte of it."""
    request = operations_pb2.GetOperationRequest(name=await _result(Tenant(target))).SerializeToString()
    yield
    connections = [await Connection.open(target.grpc, window=0) for _ in range(20)]
    for connection in connections:
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(target.many(CALLS_OF_CONNECTION)):
                await connection.call(GET_OPERATION, request, target.key)
                target.tally["calls"] += 1
    await asyncio.sleep(target.duration_s)
    target.tally["calls ended by the pool"] = sum(each.num_ended for each in connections)
    yield
    for connection in connections:
        await connection.close()


async def http_results_unread(target: Target) -> AsyncGenerator[None, None]:
    """Fetch a result of 260 kB over HTTP on 1,000 connections that are not read."""
    body = f'{{"request_id":"{await _result(Tenant(target))}"}}'.encode()
    head = http_head(target, RETRIEVE_FUTURE, len(body)).replace(
        b"\r\n\r\n", f"\r\nAccept: {PROTOBUF}\r\n\r\n".encode(), 1
    )
    yield
    connections = await unread(target, head + body, target.many(1000))
    await asyncio.sleep(target.duration_s)
    yield
    for connection in connections:
        connection.close()


async def _result(tenant: Tenant) -> str:
    """Run a forward with a large result; return its operation's name."""
    request = training_pb2.ForwardRequest(
        adapter_id=await tenant.adapter(rank=1), seq=1, loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
    )
    ones = types_pb2.Tensor(data=b"\1\0\0\0" * DATUM_TOKENS, dtype=types_pb2.DATA_TYPE_INT32, shape=[DATUM_TOKENS])
    for _ in range(NUM_DATUMS):
        request.data.add(tokens=ones, loss_inputs={"target_tokens": ones})
    name: str = (await tenant.training.Forward(request, metadata=tenant.metadata)).operation.name
    await tenant.wait([name])
    return name


ATTACKS = (
    Attack(
        name="grpc-results-unread",
        by=TENANT,
        text="4,000 calls over gRPC for a result of 260 kB, whose readers never open their flow-control windows",
        program=grpc_results_unread,
        is_held=True,
    ),
    Attack(
        name="http-results-unread",
        by=TENANT,
        text="a result of 260 kB over HTTP on 1,000 connections that are not read",
        program=http_results_unread,
        is_held=True,
    ),
)

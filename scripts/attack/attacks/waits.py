"""Attacks by one tenant that waits: long polls over HTTP, waits for many names over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.calls import Tenant, counted_all, post_json
from scripts.attack.frames import CANCEL, RST_STREAM, Connection, frame
from tinkerpool.v1 import operations_pb2

WAIT = "/tinkerpool.v1.OperationService/WaitOperations"
QUEUED_MAX = 4000
"""Operations that one adapter queues, below the limit of an adapter."""


async def long_polls(target: Target) -> AsyncGenerator[None, None]:
    """Hold 3,000 calls for the result of an operation that cannot run yet."""
    tenant = Tenant(target)
    [name] = await _blocked(tenant, 1)
    yield
    polls = [asyncio.ensure_future(_poll(target, name)) for _ in range(target.many(3000))]
    await asyncio.sleep(target.duration_s)
    yield
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


async def wait_names(target: Target) -> AsyncGenerator[None, None]:
    """Hold 100 waits for 10,000 operations each that cannot run yet."""
    tenant = Tenant(target)
    request = operations_pb2.WaitOperationsRequest(names=await _blocked(tenant, target.many(10_000)))
    yield
    message = request.SerializeToString()
    connections = [await Connection.open(target.grpc) for _ in range(4)]
    for number in range(target.many(100)):
        await connections[number % 4].call(WAIT, message, target.key)
        target.tally["waits"] += 1
    await asyncio.sleep(target.duration_s)
    target.tally["streams ended by the pool"] = sum(each.num_ended for each in connections)
    yield
    for connection in connections:
        await connection.close()


async def waits_again(target: Target) -> AsyncGenerator[None, None]:
    """Begin a wait for 10,000 operations and reset it, again and again."""
    tenant = Tenant(target)
    request = operations_pb2.WaitOperationsRequest(names=await _blocked(tenant, target.many(10_000)))
    yield
    message = request.SerializeToString()
    connection = await Connection.open(target.grpc)
    while target.is_on():
        stream = await connection.call(WAIT, message, target.key)
        target.tally["waits"] += 1
        await asyncio.sleep(0.05)
        await connection.write(frame(RST_STREAM, 0, stream, CANCEL.to_bytes(4, "big")))
    await connection.close()


async def _poll(target: Target, name: str) -> None:
    while True:
        try:
            await post_json(target, "/api/v1/retrieve_future", {"request_id": name})
        except (OSError, EOFError) as error:
            target.tally[type(error).__name__] += 1
            await asyncio.sleep(0.5)


async def _blocked(tenant: Tenant, num: int) -> list[str]:
    """Queue operations behind a sequence number that is never sent; return their names."""
    names: list[str] = []
    index = 0
    while len(names) < num:
        adapter_id = await tenant.adapter(index, rank=1)
        seqs = range(2, 2 + min(QUEUED_MAX, num - len(names)))
        await counted_all(tenant.target, (tenant.optim_step(adapter_id, seq) for seq in seqs))
        names += [f"{adapter_id}:{seq}" for seq in seqs]
        index += 1
    return names


ATTACKS = (
    Attack(
        name="long-polls",
        by=TENANT,
        text="3,000 long polls over HTTP for an operation that cannot run yet",
        program=long_polls,
        is_held=True,
    ),
    Attack(
        name="wait-names",
        by=TENANT,
        text="100 waits over gRPC for 10,000 operations each that cannot run yet",
        program=wait_names,
        is_held=True,
    ),
    Attack(
        name="waits-again",
        by=TENANT,
        text="waits for 10,000 operations, each cancelled after 50 ms",
        program=waits_again,
    ),
)

"""Attacks by many training operations, checkpoints and sessions of one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.calls import Tenant, counted, counted_all, post_json
from scripts.attack.frames import Connection
from tinkerpool.v1 import checkpoints_pb2, training_pb2

SAVED = "saved"
EXPORT = "/tinkerpool.v1.CheckpointService/ExportCheckpoint"


async def saves(target: Target) -> AsyncGenerator[None, None]:
    """Queue 500 saves of one adapter of rank 32, and wait for them."""
    tenant = Tenant(target)
    adapter_id = await tenant.adapter()
    yield
    num = target.many(500)
    await counted_all(target, (tenant.save(adapter_id, seq, f"s{seq}") for seq in range(1, num + 1)))
    await counted(target, tenant.wait([f"{adapter_id}:{seq}" for seq in range(1, num + 1)]))


async def loads(target: Target) -> AsyncGenerator[None, None]:
    """Queue one load of 7 MB for each of 200 adapters, and wait for them."""
    tenant = Tenant(target)
    source = await tenant.adapter()
    await tenant.optim_step(source, 1)
    saved = await tenant.save(source, 2, SAVED)
    [done] = await tenant.wait([saved.name])
    adapters = [await tenant.adapter(index) for index in range(1, target.many(200) + 1)]
    yield

    async def load(adapter_id: str) -> None:
        request = training_pb2.LoadStateRequest(
            adapter_id=adapter_id, seq=1, path=done.save_state.path, with_optimizer=True
        )
        await tenant.training.LoadState(request, metadata=tenant.metadata)

    await counted_all(target, (load(adapter_id) for adapter_id in adapters))
    await counted(target, tenant.wait([f"{adapter_id}:1" for adapter_id in adapters]))


async def exports(target: Target) -> AsyncGenerator[None, None]:
    """Export one checkpoint of rank 32 in 200 streams at once, again and again."""
    tenant = Tenant(target)
    saved = await tenant.save(await tenant.adapter(), 1, SAVED)
    [done] = await tenant.wait([saved.name])
    request = checkpoints_pb2.ExportCheckpointRequest(path=done.save_state.path)
    yield

    async def export() -> None:
        async for part in tenant.checkpoints.ExportCheckpoint(request, metadata=tenant.metadata):
            target.tally["bytes"] += len(part.data)

    while target.is_on():
        await counted_all(target, (export() for _ in range(target.many(200))))


async def exports_unread(target: Target) -> AsyncGenerator[None, None]:
    """Begin 1,000 exports of one checkpoint on four connections, and never open the window for their bytes."""
    tenant = Tenant(target)
    saved = await tenant.save(await tenant.adapter(), 1, SAVED)
    [done] = await tenant.wait([saved.name])
    request = checkpoints_pb2.ExportCheckpointRequest(path=done.save_state.path).SerializeToString()
    yield
    connections = [await Connection.open(target.grpc, window=0) for _ in range(4)]
    for number in range(target.many(1000)):
        await connections[number % 4].call(EXPORT, request, target.key)
        target.tally["exports"] += 1
    await asyncio.sleep(target.duration_s)
    target.tally["streams ended by the pool"] = sum(each.num_ended for each in connections)
    yield
    for connection in connections:
        await connection.close()


async def sessions(target: Target) -> AsyncGenerator[None, None]:
    """Create 20,000 sessions, then use the OpenAI door, which looks for its own session among them."""
    tenant = Tenant(target)
    await counted_all(target, (tenant.create_session(str(number)) for number in range(target.many(20_000))))
    yield
    body = {"model": target.model, "prompt": "In the beginning", "max_tokens": 1}
    while target.is_on():
        await counted(target, post_json(target, "/v1/completions", body))


ATTACKS = (
    Attack(
        name="saves",
        by=TENANT,
        text="500 `save_state` of rank 32 on one adapter",
        program=saves,
    ),
    Attack(
        name="loads",
        by=TENANT,
        text="200 adapters with one `load_state` of 7 MB each",
        program=loads,
    ),
    Attack(
        name="exports",
        by=TENANT,
        text="exports of a checkpoint of rank 32 over gRPC, 200 at a time",
        program=exports,
    ),
    Attack(
        name="exports-unread",
        by=TENANT,
        text="1,000 exports over gRPC whose readers never open their flow-control windows",
        program=exports_unread,
        is_held=True,
    ),
    Attack(
        name="sessions",
        by=TENANT,
        text="20,000 sessions, and then calls of the OpenAI door",
        program=sessions,
    ),
)

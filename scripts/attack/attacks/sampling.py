"""Attacks by samples of one tenant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import numpy as np

from scripts.attack.attack import TENANT, Attack, Target
from scripts.attack.calls import Tenant, counted
from scripts.attack.frames import Connection
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import sampling_pb2

STREAM_SAMPLE = "/tinkerpool.v1.SamplingService/StreamSample"
PROMPT = np.arange(10, 26, dtype=np.int32)
NUM_DRAWN = 32


async def stop_strings(target: Target) -> AsyncGenerator[None, None]:
    """Draw 16 sequences of 100 tokens with 200,000 stop strings."""
    tenant = Tenant(target)
    sampler_id = await tenant.sampler()
    request = _request(sampler_id, num_samples=16)
    request.params.max_tokens = 100
    request.params.stop.strings.extend(f"stop {number}" for number in range(target.many(200_000)))
    yield

    async def sample() -> None:
        operation = (await tenant.sampling.Sample(request, metadata=tenant.metadata)).operation
        await tenant.wait([operation.name])

    await counted(target, sample())


async def streams_unread(target: Target) -> AsyncGenerator[None, None]:
    """Begin 1,000 streams of samples on four connections, and never open the window for their tokens."""
    tenant = Tenant(target)
    sampler_id = await tenant.sampler()
    yield
    connections = [await Connection.open(target.grpc, window=0) for _ in range(4)]
    for number in range(target.many(1000)):
        request = _request(sampler_id, seq=number + 1, num_samples=4)
        message = sampling_pb2.StreamSampleRequest(request=request).SerializeToString()
        await connections[number % 4].call(STREAM_SAMPLE, message, target.key)
        target.tally["streams"] += 1
    await asyncio.sleep(target.duration_s)
    target.tally["streams ended by the pool"] = sum(each.num_ended for each in connections)
    yield
    for connection in connections:
        await connection.close()


def _request(sampler_id: str, seq: int = 1, num_samples: int = 1) -> sampling_pb2.SampleRequest:
    params = sampling_pb2.SamplingParams(max_tokens=NUM_DRAWN, seed=1)
    return sampling_pb2.SampleRequest(
        sampler_id=sampler_id, seq=seq, prompt=to_tensor(PROMPT), num_samples=num_samples, params=params
    )


ATTACKS = (
    Attack(
        name="stop-strings",
        by=TENANT,
        text="16 sequences of 100 tokens with 200,000 stop strings",
        program=stop_strings,
    ),
    Attack(
        name="streams-unread",
        by=TENANT,
        text="1,000 `StreamSample` whose readers never open their flow-control windows",
        program=streams_unread,
        is_held=True,
    ),
)

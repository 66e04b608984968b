"""The samples of one call, from submission to outcome. If the client disconnects, its samples are cancelled.

Sequence numbers are drawn at random, so a sample has a name before it is submitted, without any state that a restart
of the coordinator would lose. With an `Idempotency-Key`, the sequence number follows from the key: the same request
finds the same sample again, finished or not, also after a restart; so such a sample runs on when its client leaves.
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
from coordinator.doors.openai.errors import failure, refused
from coordinator.doors.openai.weights import Sampler, kept_alive
from coordinator.operations.admission import SAMPLER_SEQ_MAX
from tinkerpool.names import operation_name
from tinkerpool.v1 import operations_pb2 as ops_pb
from tinkerpool.v1 import sampling_pb2 as pb

KEY_HEADER = "idempotency-key"

Event = tuple[int, pb.StreamSampleResponse]
"""Index of the request, and a message of its stream; an empty one once a request without tokens is accepted."""


def draw_seqs(call: Call, count: int, *, is_repeatable: bool) -> tuple[list[int], bool]:
    """Return the sequence numbers of a call's samples, and whether a repeated call gets the same ones.

    `is_repeatable` is False for a stream: its tokens are sent once, so a repeated call cannot resume it.
    """
    key = call.request.headers.get(KEY_HEADER, "") if is_repeatable else ""
    if not key:
        return [secrets.randbelow(SAMPLER_SEQ_MAX) + 1 for _ in range(count)], False
    digests = [hashlib.sha256(f"{index}\0{key}".encode()).digest() for index in range(count)]
    return [int.from_bytes(digest[:8], "little") % SAMPLER_SEQ_MAX + 1 for digest in digests], True


async def outcomes(
    call: Call, sampler: Sampler, requests: Sequence[pb.SampleRequest], *, is_kept: bool
) -> list[ops_pb.Operation]:
    """Submit the samples; return their outcomes, in the order of the requests.

    If the call is cancelled, because its client has left, cancels them unless `is_kept`. Raises ServiceError if a
    sample is refused or fails.
    """
    submitting = asyncio.ensure_future(_submit(call, requests, is_kept=is_kept))
    try:
        await asyncio.shield(submitting)
    except asyncio.CancelledError:
        await asyncio.wait((submitting,))  # what is being accepted could not be cancelled
        if not is_kept:
            await _cancel(call, requests)
        raise
    must_cancel = not is_kept
    try:
        async with kept_alive(call, sampler.session_id):
            names = [_name(each) for each in requests]
            operations = await call.service.finished_operations(call.principal, names, call.room, is_poll=False)
        must_cancel = False
    finally:
        if must_cancel:
            await _cancel(call, requests)
    for operation in operations:
        check(operation)
    return operations


async def events(
    call: Call, sampler: Sampler, requests: Sequence[pb.SampleRequest], *, takes_tokens: bool
) -> AsyncGenerator[Event]:
    """Submit the samples; yield tokens as they are drawn, if they are taken, and then each request's outcome.

    Closing the generator cancels unfinished samples. Raises ServiceError if a sample is refused.
    """
    stream_of = call.service.stream_sample if takes_tokens else call.service.stream_outcome
    queue: asyncio.Queue[tuple[int, pb.StreamSampleResponse | Exception]] = asyncio.Queue(len(requests))

    async def follow(index: int, request: pb.SampleRequest) -> None:
        try:
            stream = stream_of(call.principal, pb.StreamSampleRequest(request=request))
            async with aclosing(stream) as responses:
                async for response in responses:
                    await queue.put((index, response))
        except Exception as error:  # noqa: BLE001  # raised again by the reader of the queue
            await queue.put((index, error))

    unfinished = dict(enumerate(requests))
    following = [asyncio.create_task(follow(index, request)) for index, request in unfinished.items()]
    try:
        async with kept_alive(call, sampler.session_id):
            while unfinished:
                index, event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if event.HasField("operation"):
                    del unfinished[index]
                yield index, event
    finally:
        await _cancel(call, list(unfinished.values()))
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)


def check(operation: ops_pb.Operation) -> None:
    """Raise ServiceError if the sample failed."""
    if operation.state == ops_pb.OPERATION_STATE_FAILED:
        raise failure(operation.error)


async def _submit(call: Call, requests: Sequence[pb.SampleRequest], *, is_kept: bool) -> None:
    """Submit all samples or none. They are submitted together, so that they share a commit."""
    submitting = (call.service.sample(call.principal, request) for request in requests)
    results = await asyncio.gather(*submitting, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return
    if not is_kept:
        await _cancel(call, requests)
    if isinstance(errors[0], ServiceError) and errors[0].reason == "SEQ_TAKEN":
        message = "this Idempotency-Key was used before, for another request: use a new key"
        raise refused("Idempotency-Key", message, "IDEMPOTENCY_KEY_REUSED")
    raise errors[0]


async def _cancel(call: Call, requests: Sequence[pb.SampleRequest]) -> None:
    """Cancel samples, at their next token; but not while the pool stops, for the samples resume after its restart."""
    with contextlib.suppress(ServiceError):
        call.door.gate.check_open()
        for request in requests:
            with contextlib.suppress(ServiceError):
                operation = ops_pb.CancelOperationRequest(name=_name(request))
                await call.service.cancel_operation(call.principal, operation)


def _name(request: pb.SampleRequest) -> str:
    return operation_name(request.sampler_id, request.seq)

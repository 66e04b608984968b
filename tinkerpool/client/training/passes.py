"""Passes over a batch: cut into requests of bounded size, sent together, and their outputs merged as the SDK does.

Requests are built on the caller's thread, so that the caller may change its data once the call has returned. They are
sent on the background loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.transport import SEND_BYTES_MAX
from tinkerpool.client.training.sequence import AdapterSequence
from tinkerpool.errors import FailedPrecondition, InvalidArgument, OperationFailed
from tinkerpool.metrics import merge_metrics
from tinkerpool.types import Datum, ForwardBackwardOutput, OptimStepResponse, TrainStepResponse
from tinkerpool.v1 import operations_pb2, training_pb2

CHUNK_DATUMS_MAX = 1024
"""Most datums in one request."""
CHUNK_BYTES_MAX = 5_000_000
"""Most bytes in one request, unless a single datum has more."""
NOTE = (
    "this batch added nothing to the gradient, and an optim_step behind it fails: call discard_gradient, then submit "
    "the step again"
)
"""What the errors of a batch that adds gradient say besides their cause."""


def split(data: Sequence[Datum] | Any) -> list[list[Datum]]:
    """Cut a batch into chunks, in order. Raises ValueError for an empty batch and for anything but a list of Datum."""
    if isinstance(data, Datum):
        raise ValueError("data must be a list of Datum, got one Datum: write [datum]")
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise ValueError(f"data must be a list of Datum, got {encoding.kind_of(data)}")
    if not data:
        raise ValueError("no data: a forward pass needs at least one datum")
    chunks: list[list[Datum]] = []
    num_bytes = 0
    for datum in data:
        if not isinstance(datum, Datum):
            raise ValueError(f"data must be a list of Datum, got a list with {encoding.kind_of(datum)}")
        added = encoding.datum_bytes(datum)
        if not chunks or len(chunks[-1]) == CHUNK_DATUMS_MAX or num_bytes + added > CHUNK_BYTES_MAX:
            chunks.append([])
            num_bytes = 0
        chunks[-1].append(datum)
        num_bytes += added
    return chunks


def merge(outputs: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Return one output for the chunks of a batch, in order. Means of metrics are weighted by datums."""
    assert outputs
    num_datums = [len(output.loss_fn_outputs) for output in outputs]
    return ForwardBackwardOutput(
        loss_fn_output_type=outputs[0].loss_fn_output_type,
        loss_fn_outputs=[datum for output in outputs for datum in output.loss_fn_outputs],
        metrics=merge_metrics([output.metrics for output in outputs], num_datums),
    )


RequestT = TypeVar(
    "RequestT", training_pb2.ForwardRequest, training_pb2.ForwardBackwardRequest, training_pb2.TrainStepRequest
)


def build_request(
    request_type: type[RequestT],
    chunk: Sequence[Datum],
    *,
    adapter_id: str,
    loss_fn: str,
    loss_fn_config: Mapping[str, float] | None = None,
) -> RequestT:
    """Return a request without its seq. Raises ValueError for an unknown loss and for a datum too large to send."""
    request = request_type(
        adapter_id=adapter_id,
        loss_function=encoding.loss_function(loss_fn),
        loss_config=encoding.loss_config(loss_fn_config),
    )
    for datum in chunk:
        encoding.add_datum(request.data, datum, loss_fn)
    if request.ByteSize() > SEND_BYTES_MAX:
        raise ValueError(f"a datum of {request.ByteSize()} bytes is too large to send, at most {SEND_BYTES_MAX}")
    return request


def mark(requests: Sequence[Any], seq: int) -> None:
    """Mark requests that add gradient as one batch with seqs from `seq` on: if one fails, the pool knows what else did.

    Then a corrected batch need not wait for the next optimizer step.
    """
    for request in requests:
        if not isinstance(request, training_pb2.ForwardRequest):
            request.batch.first_seq, request.batch.num_requests = seq, len(requests)


@contextmanager
def _noted(*, adds_gradient: bool = True) -> Iterator[None]:
    """Say in the error of a batch that its failure closed the gradient window, and what opens it."""
    try:
        yield
    except (InvalidArgument, FailedPrecondition, OperationFailed) as error:
        if adds_gradient and error.reason != "GRADIENT_WINDOW_CLOSED":  # that one says so itself
            error.add_note(NOTE)
        raise


async def run(
    sequence: AdapterSequence, method: methods.Unary[Any, Any], requests: Sequence[Any], seq: int
) -> ForwardBackwardOutput:
    """Send the chunks of one batch with seqs from `seq` on, and merge their outputs. Raises the first error."""
    mark(requests, seq)
    running = (sequence.run(method, request, seq + i) for i, request in enumerate(requests))
    with _noted(adds_gradient=method is methods.FORWARD_BACKWARD):
        operations = await asyncio.gather(*running)
    return merge([encoding.forward_backward_output(operation) for operation in operations])


async def run_train_step(
    sequence: AdapterSequence,
    requests: Sequence[training_pb2.ForwardBackwardRequest],
    step: training_pb2.TrainStepRequest,
    seq: int,
) -> TrainStepResponse:
    """Send the chunks of one batch; the last one is the request that also has the optimizer step."""
    mark([*requests, step], seq)

    async def run_last() -> tuple[operations_pb2.Operation, operations_pb2.Operation]:
        response = await sequence.send(methods.TRAIN_STEP, step, seq + len(requests), num_seqs=2)
        return await asyncio.gather(sequence.outcome(response.forward_backward), sequence.outcome(response.optim_step))

    first = (sequence.run(methods.FORWARD_BACKWARD, request, seq + i) for i, request in enumerate(requests))
    with _noted():
        operations, (last, optim_step) = await asyncio.gather(asyncio.gather(*first), run_last())
    return TrainStepResponse(
        forward_backward=merge([encoding.forward_backward_output(op) for op in [*operations, last]]),
        optim_step=OptimStepResponse(metrics=dict(optim_step.optim_step.metrics)),
    )

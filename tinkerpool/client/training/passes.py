"""Forward passes as the pool sees them: requests of bounded size, sent together, their results merged.

Requests are built on the caller's thread, so that data may change once a call has returned; they are sent on the
background loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from tinkerpool.client.calls import encoding, methods
from tinkerpool.client.calls.transport import SEND_BYTES_MAX
from tinkerpool.client.training import batches, custom_loss
from tinkerpool.client.training.ordering import AdapterOrder
from tinkerpool.errors import TinkerpoolError
from tinkerpool.types import Datum, ForwardBackwardOutput, OptimStepResponse, TrainStepResponse
from tinkerpool.v1 import operations_pb2, training_pb2

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
    """A request without its seq. Raises ValueError for an unknown loss and for what is too large to send."""
    request = request_type(
        adapter_id=adapter_id,
        loss_function=encoding.loss_function(loss_fn),
        loss_config=encoding.loss_config(loss_fn_config),
    )
    for datum in chunk:
        encoding.add_datum(request.data, datum)
    if request.ByteSize() > SEND_BYTES_MAX:
        raise ValueError(f"a datum of {request.ByteSize()} bytes is too large to send, at most {SEND_BYTES_MAX}")
    return request


async def run(
    order: AdapterOrder, method: methods.Unary[Any, Any], requests: Sequence[Any], seq: int
) -> ForwardBackwardOutput:
    """Send the chunks of one batch, at places from `seq` on. Raises what the first failed one failed with."""
    operations = await asyncio.gather(*(order.run(method, request, seq + i) for i, request in enumerate(requests)))
    return batches.merge([encoding.forward_backward_output(operation) for operation in operations])


async def run_train_step(
    order: AdapterOrder,
    requests: Sequence[training_pb2.ForwardBackwardRequest],
    step: training_pb2.TrainStepRequest,
    seq: int,
) -> TrainStepResponse:
    """Send all chunks but the last, and then the last one with the step."""

    async def run_last() -> tuple[operations_pb2.Operation, operations_pb2.Operation]:
        response = await order.send(methods.TRAIN_STEP, step, seq + len(requests), num_seqs=2)
        return await asyncio.gather(order.outcome(response.forward_backward), order.outcome(response.optim_step))

    first = (order.run(methods.FORWARD_BACKWARD, request, seq + i) for i, request in enumerate(requests))
    operations, (last, optim_step) = await asyncio.gather(asyncio.gather(*first), run_last())
    return TrainStepResponse(
        forward_backward=batches.merge([encoding.forward_backward_output(op) for op in [*operations, last]]),
        optim_step=OptimStepResponse(metrics=dict(optim_step.optim_step.metrics)),
    )


class CustomPass:
    """A forward, the user's loss on a thread, and a forward_backward with its gradient. Takes both places at once."""

    def __init__(self, adapter_id: str, data: Sequence[Datum], evaluate: Callable[..., custom_loss.CustomLoss]) -> None:
        """Raises ValueError for an empty batch and for data without `target_tokens`."""
        self._build = partial(build_request, adapter_id=adapter_id, loss_fn="cross_entropy")
        self._adapter_id = adapter_id
        self._data = list(data)
        self._evaluate = evaluate
        chunks = batches.split(custom_loss.surrogate(self._data))
        self._lengths = [len(chunk) for chunk in chunks]
        self._forwards = [self._build(training_pb2.ForwardRequest, chunk) for chunk in chunks]

    @property
    def num_seqs(self) -> int:
        """How many places it takes."""
        return 2 * len(self._forwards)

    async def run(self, order: AdapterOrder, seq: int) -> ForwardBackwardOutput:
        """Both passes. Raises what the user's loss raises."""
        backward_seq = seq + len(self._forwards)
        try:
            output = await run(order, methods.FORWARD, self._forwards, seq)
            logprobs = [datum["logprobs"].to_numpy() for datum in output.loss_fn_outputs]
            loss = await custom_loss.on_a_thread(lambda: self._evaluate(self._data, logprobs))
            requests = self._backwards(loss)
        except BaseException:
            await self._give_up(order, backward_seq)
            raise
        backward = await run(order, methods.FORWARD_BACKWARD, requests, backward_seq)
        return custom_loss.with_loss(backward, loss)

    def _backwards(self, loss: custom_loss.CustomLoss) -> list[training_pb2.ForwardBackwardRequest]:
        data = custom_loss.surrogate(self._data, loss.gradients)
        requests, start = [], 0
        for length in self._lengths:
            requests.append(self._build(training_pb2.ForwardBackwardRequest, data[start : start + length]))
            start += length
        return requests

    async def _give_up(self, order: AdapterOrder, seq: int) -> None:
        """Use the places up. A forward_backward without data is refused and counts as failed: so what comes later need
        not wait, and the optim_step behind it fails instead of stepping on a part of the gradient.
        """
        for i in range(len(self._forwards)):
            empty = training_pb2.ForwardBackwardRequest(adapter_id=self._adapter_id)
            with suppress(TinkerpoolError):
                await order.run(methods.FORWARD_BACKWARD, empty, seq + i)

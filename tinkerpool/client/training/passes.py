"""Passes over a batch: requests of bounded size are sent together, and their outputs merged.

Requests are built on the caller's thread, so that the caller may change its data once the call has returned. They are
sent on the background loop.
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
from tinkerpool.client.training.sequence import AdapterSequence
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
    """Return a request without its seq. Raises ValueError for an unknown loss and for a datum too large to send."""
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
    sequence: AdapterSequence, method: methods.Unary[Any, Any], requests: Sequence[Any], seq: int
) -> ForwardBackwardOutput:
    """Send the chunks of one batch with seqs from `seq` on, and merge their outputs. Raises the first error."""
    operations = await asyncio.gather(*(sequence.run(method, request, seq + i) for i, request in enumerate(requests)))
    return batches.merge([encoding.forward_backward_output(operation) for operation in operations])


async def run_train_step(
    sequence: AdapterSequence,
    requests: Sequence[training_pb2.ForwardBackwardRequest],
    step: training_pb2.TrainStepRequest,
    seq: int,
) -> TrainStepResponse:
    """Send the chunks of one batch; the last one is the request that also has the optimizer step."""

    async def run_last() -> tuple[operations_pb2.Operation, operations_pb2.Operation]:
        response = await sequence.send(methods.TRAIN_STEP, step, seq + len(requests), num_seqs=2)
        return await asyncio.gather(sequence.outcome(response.forward_backward), sequence.outcome(response.optim_step))

    first = (sequence.run(methods.FORWARD_BACKWARD, request, seq + i) for i, request in enumerate(requests))
    operations, (last, optim_step) = await asyncio.gather(asyncio.gather(*first), run_last())
    return TrainStepResponse(
        forward_backward=batches.merge([encoding.forward_backward_output(op) for op in [*operations, last]]),
        optim_step=OptimStepResponse(metrics=dict(optim_step.optim_step.metrics)),
    )


class CustomPass:
    """A forward, the user's loss on a thread, and a forward_backward with its gradient; their seqs are consecutive."""

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
        """The number of seqs to reserve."""
        return 2 * len(self._forwards)

    async def run(self, sequence: AdapterSequence, seq: int) -> ForwardBackwardOutput:
        """Run both passes. Raises any error of the user's loss."""
        backward_seq = seq + len(self._forwards)
        try:
            output = await run(sequence, methods.FORWARD, self._forwards, seq)
            logprobs = [datum["logprobs"].to_numpy() for datum in output.loss_fn_outputs]
            loss = await custom_loss.on_a_thread(lambda: self._evaluate(self._data, logprobs))
            requests = self._backwards(loss)
        except BaseException:
            await self._fail_backwards(sequence, backward_seq)
            raise
        backward = await run(sequence, methods.FORWARD_BACKWARD, requests, backward_seq)
        return custom_loss.with_loss(backward, loss)

    def _backwards(self, loss: custom_loss.CustomLoss) -> list[training_pb2.ForwardBackwardRequest]:
        data = custom_loss.surrogate(self._data, loss.gradients)
        requests, start = [], 0
        for length in self._lengths:
            requests.append(self._build(training_pb2.ForwardBackwardRequest, data[start : start + length]))
            start += length
        return requests

    async def _fail_backwards(self, sequence: AdapterSequence, seq: int) -> None:
        """Use up the seqs of the second pass, so that there is no gap.

        A forward_backward without data is refused and recorded as failed, which closes the gradient window: the next
        optim_step fails instead of stepping on a part of the gradient.
        """
        for i in range(len(self._forwards)):
            empty = training_pb2.ForwardBackwardRequest(adapter_id=self._adapter_id)
            with suppress(TinkerpoolError):
                await sequence.run(methods.FORWARD_BACKWARD, empty, seq + i)

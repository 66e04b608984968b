"""Losses of the user's own, computed in the user's process between two passes in the pool.

The pool computes log-probabilities p; the user's function computes a loss C(p) and its gradient; the pool then adds the
gradient of the cross entropy `L = sum(-p w)` with `w = -dC/dp`, which is the gradient of C. The user's function runs on
a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinkerpool.client.calls import methods
from tinkerpool.client.training import passes
from tinkerpool.client.training.sequence import AdapterSequence
from tinkerpool.errors import TinkerpoolError
from tinkerpool.types import Datum, ForwardBackwardOutput, TensorData, as_array
from tinkerpool.v1 import training_pb2

T = TypeVar("T")
Gradient = NDArray[np.float32]

TorchLoss = Callable[[list[Datum], list[Any]], tuple[Any, Mapping[str, float]]]
"""Maps the data, and a torch tensor of log-probabilities per datum, to the loss, a scalar tensor, and metrics."""

NumpyLoss = Callable[
    [list[Datum], list[NDArray[np.float32]]], tuple[float, Sequence[NDArray[Any]], Mapping[str, float]]
]
"""Maps the data, and log-probabilities per datum, to the loss, its gradient per datum, and metrics."""


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The value of the user's function, with its gradients."""

    value: float
    gradients: list[Gradient]
    """Per datum: d(loss) / d(log-probability), in the shape of `target_tokens`."""
    metrics: dict[str, float]


def surrogate(data: Sequence[Datum], gradients: Sequence[Gradient] | None = None) -> list[Datum]:
    """Return cross-entropy data: `target_tokens`, and as `weights` the negated gradients, or zeros without gradients.

    Raises ValueError for a datum without `target_tokens`.
    """
    result = []
    for i, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise ValueError(f"data[{i}] has no loss_fn_inputs['target_tokens'], whose log-probabilities the loss gets")
        targets = datum.loss_fn_inputs["target_tokens"]
        weights = np.zeros(targets.shape, np.float32) if gradients is None else -gradients[i]
        inputs = {"target_tokens": targets, "weights": TensorData(weights, "float32")}
        result.append(Datum(datum.model_input, inputs))
    return result


def evaluate_torch(loss_fn: TorchLoss, data: list[Datum], logprobs: list[NDArray[np.float32]]) -> CustomLoss:
    """Run a function that torch can differentiate. Raises its errors, and ValueError if it returned no scalar."""
    torch = importlib.import_module("torch")
    leaves = [torch.tensor(array, requires_grad=True) for array in logprobs]
    loss, metrics = loss_fn(data, leaves)
    if not hasattr(loss, "backward") or loss.numel() != 1:
        raise ValueError("the custom loss must be a torch tensor with one element: return (loss, metrics)")
    if not loss.requires_grad:
        raise ValueError("the custom loss does not depend on the log-probabilities: is there a .detach() or .item()?")
    loss.backward()
    gradients = [np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]
    return CustomLoss(float(loss.detach()), gradients, _metrics(metrics))


def evaluate_numpy(loss_fn: NumpyLoss, data: list[Datum], logprobs: list[NDArray[np.float32]]) -> CustomLoss:
    """Run a function that returns its gradient. Raises its errors, and ValueError for gradients of wrong shapes."""
    loss, gradients, metrics = loss_fn(data, [array.copy() for array in logprobs])
    arrays = [as_array(gradient).astype(np.float32) for gradient in gradients]
    if [a.shape for a in arrays] != [a.shape for a in logprobs]:
        raise ValueError("the custom loss must return one gradient per datum, in the shape of its log-probabilities")
    return CustomLoss(float(loss), arrays, _metrics(metrics))


def with_loss(output: ForwardBackwardOutput, loss: CustomLoss) -> ForwardBackwardOutput:
    """Return the second pass's output with the custom loss as `loss:sum`, the cross entropy as `surrogate_loss:sum`."""
    metrics = dict(output.metrics)
    if "loss:sum" in metrics:
        metrics["surrogate_loss:sum"] = metrics.pop("loss:sum")
    metrics |= loss.metrics
    metrics["loss:sum"] = loss.value
    return ForwardBackwardOutput(
        loss_fn_output_type=output.loss_fn_output_type, loss_fn_outputs=output.loss_fn_outputs, metrics=metrics
    )


async def on_a_thread(work: Callable[[], T]) -> T:
    """Run the user's code on a thread of its own, so that it cannot block the background loop."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # every error is the result of the work
            future.set_exception(error)

    threading.Thread(target=run, name="tinkerpool-custom-loss", daemon=True).start()
    return await asyncio.wrap_future(future)


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


class CustomPass:
    """A forward, the user's loss on a thread, and a forward_backward with its gradient; their seqs are consecutive."""

    def __init__(self, adapter_id: str, data: Sequence[Datum], evaluate: Callable[..., CustomLoss]) -> None:
        """Raises ValueError for an empty batch and for data without `target_tokens`."""
        self._build = partial(passes.build_request, adapter_id=adapter_id, loss_fn="cross_entropy")
        self._adapter_id = adapter_id
        self._data = list(data)
        self._evaluate = evaluate
        chunks = passes.split(surrogate(self._data))
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
            output = await passes.run(sequence, methods.FORWARD, self._forwards, seq)
            logprobs = [datum["logprobs"].to_numpy() for datum in output.loss_fn_outputs]
            loss = await on_a_thread(lambda: self._evaluate(self._data, logprobs))
            requests = self._backwards(loss)
        except BaseException:
            await self._fail_backwards(sequence, backward_seq)
            raise
        backward = await passes.run(sequence, methods.FORWARD_BACKWARD, requests, backward_seq)
        return with_loss(backward, loss)

    def _backwards(self, loss: CustomLoss) -> list[training_pb2.ForwardBackwardRequest]:
        data = surrogate(self._data, loss.gradients)
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
        requests = [training_pb2.ForwardBackwardRequest(adapter_id=self._adapter_id) for _ in self._forwards]
        passes.mark(requests, seq)
        for i, empty in enumerate(requests):
            with suppress(TinkerpoolError):
                await sequence.run(methods.FORWARD_BACKWARD, empty, seq + i)

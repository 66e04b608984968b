"""Losses of the user's own, computed in the user's process between two passes in the pool.

The pool computes log-probabilities p; the user's function computes a loss C(p) and its gradient; the pool then adds the
gradient of the cross entropy `L = sum(-p w)` with `w = -dC/dp`, which is the gradient of C. The user's function runs on
a thread of its own. If it fails, the seqs of the second pass are given up, with the error as the reason.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinkerpool.client.calls import methods
from tinkerpool.client.calls.encoding import has_ignored_targets, kind_of
from tinkerpool.client.training import passes
from tinkerpool.client.training.sequence import AdapterSequence
from tinkerpool.errors import TinkerpoolError
from tinkerpool.types import IGNORED_TARGET, Datum, ForwardBackwardOutput, TensorData, as_array, is_number
from tinkerpool.v1 import training_pb2

REASON_CHARS_MAX = 500
"""Characters of an error that the pool is told as the reason why a pass is given up."""

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

    Raises ValueError for a datum without `target_tokens`, or with an ignored one.
    """
    result = []
    for i, datum in enumerate(data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise ValueError(f"data[{i}] has no loss_fn_inputs['target_tokens'], whose log-probabilities the loss gets")
        if has_ignored_targets(datum):
            raise ValueError(
                f"data[{i}].loss_fn_inputs['target_tokens'] has {IGNORED_TARGET}, but a custom loss gets the "
                "log-probability of every target: use any token id there, and leave it out in your loss"
            )
        targets = datum.loss_fn_inputs["target_tokens"]
        weights = np.zeros(targets.shape, np.float32) if gradients is None else -gradients[i]
        inputs = {"target_tokens": targets, "weights": TensorData(weights, "float32")}
        result.append(Datum(datum.model_input, inputs))
    return result


def evaluate_torch(loss_fn: TorchLoss, data: list[Datum], logprobs: list[NDArray[np.float32]]) -> CustomLoss:
    """Run a function that torch can differentiate. Raises its errors, and ValueError if it returned no scalar."""
    torch = importlib.import_module("torch")
    leaves = [torch.tensor(array, requires_grad=True) for array in logprobs]
    loss, metrics = _parts(loss_fn(data, leaves), "loss, metrics")
    if not hasattr(loss, "backward") or loss.numel() != 1:
        raise ValueError(
            f"the custom loss must be a torch tensor with one element, got {kind_of(loss)}: return (loss, metrics), "
            "without .item()"
        )
    if not loss.requires_grad:
        raise ValueError("the custom loss does not depend on the log-probabilities: is there a .detach() or .item()?")
    loss.backward()
    gradients = [np.zeros(leaf.shape, np.float32) if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]
    return CustomLoss(float(loss.detach()), gradients, _metrics(metrics))


def evaluate_numpy(loss_fn: NumpyLoss, data: list[Datum], logprobs: list[NDArray[np.float32]]) -> CustomLoss:
    """Run a function that returns its gradient. Raises its errors, and ValueError for gradients of wrong shapes."""
    result = loss_fn(data, [array.copy() for array in logprobs])
    loss, gradients, metrics = _parts(result, "loss, gradients, metrics")
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


def check_torch() -> None:
    """Raise ImportError, which says what else works, if torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            "forward_backward_custom differentiates the loss with torch, which is not installed: pip install torch, or "
            "return the gradients yourself, with forward_backward_custom(data, loss_fn, with_gradients=True)"
        )


def _parts(result: Any, names: str) -> tuple[Any, ...]:
    """Return what the user's function returned. Raises ValueError unless it is a tuple of these names."""
    if isinstance(result, tuple) and len(result) == len(names.split(", ")):
        return result
    got = f"{len(result)} values" if isinstance(result, tuple) else kind_of(result)
    raise ValueError(
        f"the custom loss must return ({names}), got {got}: for no metrics of your own, return {{}} as metrics"
    )


def _metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics of a custom loss must be a dict of names and numbers, got {kind_of(metrics)}")
    for name, value in metrics.items():
        if not isinstance(value, bool | np.bool_) and not is_number(value):
            raise ValueError(f"metrics[{name!r}] of a custom loss must be a number, got {value!r:.80}")
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
        except BaseException as error:
            await self._abandon_backwards(sequence, backward_seq, error)
            if isinstance(error, Exception):
                error.add_note(passes.NOTE)
            raise
        backward = await passes.run(sequence, methods.FORWARD_BACKWARD, requests, backward_seq)
        return with_loss(backward, loss)

    def _backwards(self, loss: CustomLoss) -> list[training_pb2.ForwardBackwardRequest]:
        for i, gradient in enumerate(loss.gradients):
            if not np.isfinite(gradient).all():
                raise ValueError(
                    f"the custom loss is {loss.value:g}, and its gradient for data[{i}] is not finite: look for a "
                    "division by 0, or the log of 0, in your loss"
                )
        data = surrogate(self._data, loss.gradients)
        requests, start = [], 0
        for length in self._lengths:
            requests.append(self._build(training_pb2.ForwardBackwardRequest, data[start : start + length]))
            start += length
        return requests

    async def _abandon_backwards(self, sequence: AdapterSequence, seq: int, error: BaseException) -> None:
        """Give up the seqs of the second pass, so that there is no gap.

        They are recorded as failed, which closes the gradient window: the next optim_step fails, and names the error,
        instead of stepping on a part of the gradient.
        """
        reason = f"forward_backward_custom raised {type(error).__name__}: {error}"[:REASON_CHARS_MAX]
        new = partial(training_pb2.ForwardBackwardRequest, adapter_id=self._adapter_id, abandoned=reason)
        requests = [new() for _ in self._forwards]
        passes.mark(requests, seq)
        for i, abandoned in enumerate(requests):
            with suppress(TinkerpoolError):
                await sequence.run(methods.FORWARD_BACKWARD, abandoned, seq + i)

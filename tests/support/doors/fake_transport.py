"""A pool in memory behind the client's transport: order and idempotency as in the service, failures on demand.

The log-probability of target token k is -(k + 1) / 10 with any weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message

from tinkerpool.client.calls.methods import RequestT, ResponseT, ServerStream, Unary
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.errors import Code, api_error
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    operations_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)

UNREACHABLE = api_error(Code.UNAVAILABLE, "connection refused")
SESSION_ID = "5e55"
QUEUED = operations_pb2.OPERATION_STATE_QUEUED


@dataclass
class FakePool:
    """Implements `Transport`."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Every attempt that reached the pool: method and a copy of the request."""
    faults: dict[str, list[Exception]] = field(default_factory=dict)
    """By method: raised instead of handling the next attempts."""
    lost_replies: dict[str, int] = field(default_factory=dict)
    """By method: how many of the next attempts are handled, but their replies lost."""
    wait_faults: list[Exception] = field(default_factory=list)
    """Raised by the next streams, after one operation was delivered."""
    handlers: dict[str, Callable[[Any], Any]] = field(default_factory=dict)
    """By method: the handler that replaces the fake's own."""
    delay_of: Callable[[str, Any], float] = lambda name, request: 0.0
    """Seconds that a request takes."""
    model_names: tuple[str, ...] = ("toy",)
    is_held: bool = False
    """Accept operations, but finish none."""
    applied: list[int] = field(default_factory=list)
    """Sequence numbers in the order of execution."""
    operations: dict[str, operations_pb2.Operation] = field(default_factory=dict)
    num_closed: int = 0

    def __post_init__(self) -> None:
        self._bodies: dict[int, bytes] = {}
        self._requests: dict[int, tuple[str, Any]] = {}
        self._changed = asyncio.Event()
        self._num_adapters = 0

    def requests(self, name: str) -> list[Any]:
        """Return the requests of one method, in order of arrival."""
        return [request for called, request in self.calls if called == name]

    async def call(self, method: Unary[RequestT, ResponseT], request: RequestT, *, timeout_s: float) -> ResponseT:
        copy: Any = type(request)()
        copy.CopyFrom(request)
        await asyncio.sleep(self.delay_of(method.name, copy))
        self.calls.append((method.name, copy))
        if self.faults.get(method.name):
            raise self.faults[method.name].pop(0)
        response = self.handlers.get(method.name, getattr(self, f"_{method.name}", None))
        assert response is not None, f"the fake pool has no {method.name}"
        reply: ResponseT = response(copy)
        if self.lost_replies.get(method.name, 0):
            self.lost_replies[method.name] -= 1
            raise UNREACHABLE
        return reply

    async def stream(self, method: ServerStream[RequestT, ResponseT], request: Any) -> AsyncGenerator[Any, None]:
        self.calls.append((method.name, request))
        if method.name in self.handlers:
            for item in self.handlers[method.name](request):
                if isinstance(item, Exception):
                    raise item
                yield item
            return
        assert method.name == "WaitOperations"
        missing = set(request.names)
        if unknown := missing - self.operations.keys():
            raise api_error(Code.NOT_FOUND, f"no operation {min(unknown)}", reason="NOT_FOUND")
        fault = self.wait_faults.pop(0) if self.wait_faults else None
        while missing:
            done = sorted(name for name in missing if self.operations[name].state >= 3)
            for name in done:
                missing.discard(name)
                yield operations_pb2.WaitOperationsResponse(operation=self.operations[name])
                if fault is not None:
                    raise fault
            if not done:
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        self.num_closed += 1

    def release(self) -> None:
        """Finish the held operations. Call it on the client's loop."""
        self.is_held = False
        self._run_ready()

    def _CreateSession(self, request: Any) -> Message:  # noqa: N802
        return sessions_pb2.CreateSessionResponse(session=sessions_pb2.Session(session_id=SESSION_ID))

    def _FinishSession(self, request: Any) -> Message:  # noqa: N802
        return sessions_pb2.FinishSessionResponse()

    def _GetCapabilities(self, request: Any) -> Message:  # noqa: N802
        models = [sessions_pb2.BaseModel(name=name, max_rank=32) for name in self.model_names]
        return sessions_pb2.GetCapabilitiesResponse(base_models=models, version="1")

    def _CreateAdapter(self, request: Any) -> Message:  # noqa: N802
        index, self._num_adapters = self._num_adapters, self._num_adapters + 1
        return adapters_pb2.CreateAdapterResponse(adapter=_adapter(index, request))

    def _CreateSampler(self, request: Any) -> Message:  # noqa: N802
        sampler = sampling_pb2.Sampler(sampler_id=f"{SESSION_ID}:sample:7", base_model="toy")
        return sampling_pb2.CreateSamplerResponse(sampler=sampler)

    def _CancelOperation(self, request: Any) -> Message:  # noqa: N802
        return operations_pb2.CancelOperationResponse(operation=self.operations[request.name])

    def _Sample(self, request: Any) -> Message:  # noqa: N802
        name = f"{request.sampler_id}:{request.seq}"
        operation = self.operations.setdefault(name, operations_pb2.Operation(name=name, state=QUEUED))
        if not self.is_held:
            operation.CopyFrom(sample_operation(name, request.num_samples, request.params.max_tokens))
        return sampling_pb2.SampleResponse(operation=operations_pb2.Operation(name=name, state=QUEUED))

    def _Forward(self, request: Any) -> Message:  # noqa: N802
        return training_pb2.ForwardResponse(operation=self._accept("forward", request))

    def _ForwardBackward(self, request: Any) -> Message:  # noqa: N802
        if not request.data:
            self._accept("refused", request)
            raise api_error(Code.INVALID_ARGUMENT, "data is empty", reason="INVALID_ARGUMENT")
        return training_pb2.ForwardBackwardResponse(operation=self._accept("forward_backward", request))

    def _OptimStep(self, request: Any) -> Message:  # noqa: N802
        return training_pb2.OptimStepResponse(operation=self._accept("optim_step", request))

    def _TrainStep(self, request: Any) -> Message:  # noqa: N802
        step = training_pb2.OptimStepRequest(adapter_id=request.adapter_id, seq=request.seq + 1, adam=request.adam)
        return training_pb2.TrainStepResponse(
            forward_backward=self._accept("forward_backward", request), optim_step=self._accept("optim_step", step)
        )

    def _LoadState(self, request: Any) -> Message:  # noqa: N802
        return training_pb2.LoadStateResponse(operation=self._accept("load_state", request))

    def _DiscardGradient(self, request: Any) -> Message:  # noqa: N802
        return training_pb2.DiscardGradientResponse(operation=self._accept("discard_gradient", request))

    def _SaveState(self, request: Any) -> Message:  # noqa: N802
        return checkpoints_pb2.SaveStateResponse(operation=self._accept("save_state", request))

    def _SaveWeightsForSampler(self, request: Any) -> Message:  # noqa: N802
        return checkpoints_pb2.SaveWeightsForSamplerResponse(
            operation=self._accept("save_weights_for_sampler", request)
        )

    def _accept(self, kind: str, request: Any) -> operations_pb2.Operation:
        seq, body = request.seq, request.SerializeToString(deterministic=True)
        if self._bodies.setdefault(seq, body) != body:
            raise api_error(Code.ALREADY_EXISTS, f"seq {seq} is taken", reason="SEQ_TAKEN")
        name = f"{request.adapter_id}:{seq}"
        if name not in self.operations:
            self.operations[name] = operations_pb2.Operation(name=name, state=QUEUED, seq=seq)
            self._requests[seq] = (kind, request)
            self._run_ready()
        return operations_pb2.Operation(name=name, state=QUEUED, seq=seq)

    def _run_ready(self) -> None:
        while not self.is_held and (seq := len(self.applied) + 1) in self._requests:
            kind, request = self._requests[seq]
            self.applied.append(seq)
            operation = self.operations[f"{request.adapter_id}:{seq}"]
            operation.state = operations_pb2.OPERATION_STATE_SUCCEEDED
            _finish(operation, kind, request)
        self._changed.set()


def sample_operation(name: str, num_samples: int, num_tokens: int) -> operations_pb2.Operation:
    """Return a finished sample: tokens 0, 1, 2, ... in every sequence."""
    sequence = operations_pb2.SampledSequence(
        tokens=to_tensor(np.arange(num_tokens, dtype=np.int32)),
        logprobs=to_tensor(np.full(num_tokens, -1, np.float32)),
        stop_reason=operations_pb2.STOP_REASON_LENGTH,
    )
    result = operations_pb2.SampleResult(sequences=[sequence] * num_samples)
    return operations_pb2.Operation(name=name, state=operations_pb2.OPERATION_STATE_SUCCEEDED, sample=result)


def _adapter(index: int, request: adapters_pb2.CreateAdapterRequest) -> adapters_pb2.Adapter:
    return adapters_pb2.Adapter(
        adapter_id=f"{request.session_id}:train:{index}",
        base_model=request.base_model,
        rank=request.rank or 32,
        alpha=32,
        next_seq=1,
        session_id=request.session_id,
        name=request.name,
    )


def _finish(operation: operations_pb2.Operation, kind: str, request: Any) -> None:
    seq = request.seq
    match kind:
        case "refused":
            operation.state = operations_pb2.OPERATION_STATE_FAILED
            operation.error.code = 3
        case "forward" | "forward_backward":
            result, loss = operation.forward_backward, 0.0
            for datum in request.data:
                logprobs = _logprobs(datum)
                result.logprobs.append(to_tensor(logprobs))
                loss -= float((logprobs * from_tensor(datum.loss_inputs["weights"])).sum())
            result.metrics.update({"loss:sum": loss, "clock_cycle:unique": 100 + seq})
        case "optim_step":
            operation.optim_step.metrics["grad_norm:last"] = 1.0
        case "load_state":
            operation.load_state.path = request.path
        case "discard_gradient":
            operation.discard_gradient.SetInParent()
        case "save_state":
            operation.save_state.path = f"tinker://{request.adapter_id}/weights/{request.name}"
        case "save_weights_for_sampler" if request.name:
            path = f"tinker://{request.adapter_id}/sampler_weights/{request.name}"
            operation.save_weights_for_sampler.path = path
        case "save_weights_for_sampler":
            operation.save_weights_for_sampler.sampler_id = f"{SESSION_ID}:sample:0"


def _logprobs(datum: types_pb2.Datum) -> Any:
    return (-(from_tensor(datum.loss_inputs["target_tokens"]) + 1) / 10).astype(np.float32)

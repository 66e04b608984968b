"""From the outcome of an operation to the body that the SDK waits for. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from coordinator.errors import Code, ServiceError
from coordinator.http_gateway.errors import failure
from coordinator.http_gateway.rendering import PiecewiseJson
from coordinator.http_gateway.tensors import array_records
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb

PROTOBUF = "application/x-protobuf"
OUTPUT_TYPE = "TorchLossReturn"
"""What the protocol calls the outputs of every built-in loss."""
JSON_RESULT_BYTES_MAX = 8 << 20
"""Largest result in JSON, as the log has it; as text it is some ten times as large. Who sends a pass as JSON never gets
more."""
_STOP_REASONS = {ops_pb.STOP_REASON_STOP: "stop", ops_pb.STOP_REASON_LENGTH: "length"}


def result_response(operation: ops_pb.Operation, *, is_binary: bool) -> Response:
    """The answer to who asks for a finished operation; `is_binary`: passes and samples as protobuf.

    Raises ServiceError RESULT_TOO_LARGE for JSON of more than `JSON_RESULT_BYTES_MAX`.
    """
    if operation.state == ops_pb.OPERATION_STATE_FAILED:
        return JSONResponse(failure(operation.error))
    if is_binary and operation.WhichOneof("result") == "forward_backward":
        return _binary(_output(operation.forward_backward))
    if is_binary and operation.WhichOneof("result") == "sample":
        return _binary(_sample(operation.sample))
    if operation.ByteSize() > JSON_RESULT_BYTES_MAX:
        raise ServiceError(
            Code.RESOURCE_EXHAUSTED,
            "RESULT_TOO_LARGE",
            f"the result is above {JSON_RESULT_BYTES_MAX} bytes: ask for it as protobuf, with 'accept: {PROTOBUF}'",
        )
    return PiecewiseJson(_json(operation))


def _binary(message: wire.ForwardBackwardOutput | wire.SampleResponse) -> Response:
    return Response(message.SerializeToString(deterministic=True), media_type=PROTOBUF)


def _output(result: ops_pb.ForwardBackwardResult) -> wire.ForwardBackwardOutput:
    return wire.ForwardBackwardOutput(
        loss_fn_output_type=OUTPUT_TYPE,
        loss_fn_outputs=array_records("logprobs", result.logprobs),
        metrics=dict(result.metrics),
    )


def _sample(result: ops_pb.SampleResult) -> wire.SampleResponse:
    response = wire.SampleResponse()
    for sequence in result.sequences:
        is_stop = sequence.stop_reason == ops_pb.STOP_REASON_STOP
        response.sequences.add(
            stop_reason=wire.STOP_REASON_STOP if is_stop else wire.STOP_REASON_LENGTH,
            tokens=from_tensor(sequence.tokens).astype("<i4").tobytes(),
            logprobs=sequence.logprobs.data,
        )
    if result.HasField("prompt_logprobs"):
        response.prompt_logprobs = result.prompt_logprobs.data
    return response


def _json(operation: ops_pb.Operation) -> dict[str, Any]:
    match operation.WhichOneof("result"):
        case "forward_backward":
            result = operation.forward_backward
            return {
                "loss_fn_output_type": OUTPUT_TYPE,
                "loss_fn_outputs": [{"logprobs": _json_floats(from_tensor(t))} for t in result.logprobs],
                "metrics": dict(result.metrics),
            }
        case "optim_step":
            return {"metrics": dict(operation.optim_step.metrics)}
        case "load_state":
            return {"type": "load_weights", "path": operation.load_state.path, "model_id": operation.target_id}
        case "save_state":
            return {"type": "save_weights", "path": operation.save_state.path}
        case "save_weights_for_sampler":
            saved = operation.save_weights_for_sampler
            where = {"path": saved.path} if saved.path else {"sampling_session_id": saved.sampler_id}
            kind = "save_weights_external" if "/external_weights/" in saved.path else "save_weights_for_sampler"
            return {"type": kind, **where}
        case "sample":
            return _json_sample(operation.sample)
        case other:
            raise AssertionError(f"{operation.name} succeeded with {other}")


def _json_floats(array: np.ndarray[Any, np.dtype[Any]]) -> dict[str, Any]:
    return {"data": array.ravel().tolist(), "dtype": "float32", "shape": list(array.shape)}


def _json_sample(result: ops_pb.SampleResult) -> dict[str, Any]:
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": _STOP_REASONS[sequence.stop_reason],
                "tokens": from_tensor(sequence.tokens).tolist(),
                "logprobs": from_tensor(sequence.logprobs).tolist(),
            }
            for sequence in result.sequences
        ],
    }
    if result.HasField("prompt_logprobs"):
        logprobs = from_tensor(result.prompt_logprobs).tolist()
        body["prompt_logprobs"] = [None if math.isnan(value) else value for value in logprobs]
    return body

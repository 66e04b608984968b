"""From an operation's outcome to the body that the SDK fetches. Pure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from coordinator.base.errors import Code, ServiceError
from coordinator.doors.http.responses import PiecewiseJson
from coordinator.doors.tinker.errors import failure
from coordinator.doors.tinker.tensors import array_records, dense_floats, sparse_rows
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import from_tensor
from tinkerpool.v1 import operations_pb2 as ops_pb

PROTOBUF = "application/x-protobuf"
OUTPUT_TYPE = "TorchLossReturn"
"""The protocol's name for the outputs of every built-in loss."""
JSON_RESULT_BYTES_MAX = 4 << 20
"""Largest outcome that is sent in JSON; the text is about ten times as large. Results of passes in JSON are smaller."""
_STOP_REASONS = {ops_pb.STOP_REASON_STOP: "stop", ops_pb.STOP_REASON_LENGTH: "length"}
NOTHING_LOGPROB = -99999.0
"""Log-probability of token 0 at positions without most likely tokens."""
SPARSE = "sparse"
"""Note on a sample whose targets were sparse rows: their log-probabilities are returned as sparse rows."""


def result_response(operation: ops_pb.Operation, *, is_binary: bool) -> Response:
    """Return the response with a finished operation; with `is_binary`, passes and samples as protobuf.

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
            f"the result has over {JSON_RESULT_BYTES_MAX} bytes: request it as protobuf, with 'accept: {PROTOBUF}'",
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
    return wire.SampleResponse(
        sequences=[_sequence(sequence) for sequence in result.sequences],
        prompt_cache_hit_tokens=result.num_cached_prompt_tokens,
        prompt_logprobs=result.prompt_logprobs.data if result.HasField("prompt_logprobs") else None,
        topk_prompt_logprobs=_topk(result.topk_prompt) if result.HasField("topk_prompt") else None,
        target_prompt_logprobs=_targets(result) if result.HasField("prompt_target_logprobs") else None,
        prompt_alt_tokens=_alternatives(result.prompt_alt_tokens) if result.HasField("prompt_alt_tokens") else None,
    )


def _sequence(sequence: ops_pb.SampledSequence) -> wire.SampledSequence:
    is_stop = sequence.stop_reason == ops_pb.STOP_REASON_STOP
    return wire.SampledSequence(
        stop_reason=wire.STOP_REASON_STOP if is_stop else wire.STOP_REASON_LENGTH,
        tokens=from_tensor(sequence.tokens).astype("<i4").tobytes(),
        logprobs=sequence.logprobs.data,
        topk_sampled_logprobs=_topk(sequence.topk) if sequence.HasField("topk") else None,
    )


def _targets(result: ops_pb.SampleResult) -> wire.Tensor:
    logprobs = from_tensor(result.prompt_target_logprobs)  # (p - 1, k)
    return sparse_rows(logprobs) if result.note == SPARSE else dense_floats(_filled(logprobs, 0.0))


def _alternatives(found: ops_pb.TokenLogprobs) -> wire.PromptAltTokens:
    tokens = from_tensor(found.token_ids)  # (p - 1, k)
    return wire.PromptAltTokens(
        tokens=wire.Tensor(dense=tokens.astype("<i4").tobytes(), dtype=wire.DATA_TYPE_INT32, shape=tokens.shape),
        logprobs=dense_floats(from_tensor(found.logprobs)),
    )


def _topk(found: ops_pb.TokenLogprobs) -> wire.TopkLogprobs:
    tokens, logprobs = from_tensor(found.token_ids), from_tensor(found.logprobs)  # (n, k) both
    length, k = tokens.shape
    return wire.TopkLogprobs(
        token_ids=tokens.astype("<i4").tobytes(),
        logprobs=_filled(logprobs, NOTHING_LOGPROB).astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _filled(array: NDArray[np.float32], value: float) -> NDArray[np.float32]:
    """Return the array with `value` in place of NaN."""
    return np.where(np.isnan(array), np.float32(value), array)


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
        case "discard_gradient":
            return {"type": "discard_gradient"}
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
    """Return a sample as clients before protobuf read it. They request nothing that is missing here."""
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
    if result.HasField("topk_prompt"):
        topk = result.topk_prompt
        rows = zip(from_tensor(topk.token_ids).tolist(), from_tensor(topk.logprobs).tolist(), strict=True)
        body["topk_prompt_logprobs"] = [
            None if math.isnan(logprobs[0]) else list(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows
        ]
    return body

"""Operations on a model: passes, steps, saves, loads. From the SDK's bodies to the contract's requests.

A body that names its sequence number but cannot be converted is refused at that sequence number, so that later
operations do not wait for it. Passes of clients before 0.25, in JSON, are converted to the protobuf form of later
clients first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from google.protobuf.message import DecodeError
from starlette.responses import Response

from coordinator.base.config import DATUMS_MAX
from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.http.bodies import HEAD_BYTES, UnreadableBody, unreadable
from coordinator.doors.http.calls import JSON_BYTES_MAX, Call
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.errors import unsupported
from coordinator.doors.tinker.futures import submit
from coordinator.doors.tinker.results import PROTOBUF
from coordinator.doors.tinker.sdk_versions import mark_batch
from coordinator.doors.tinker.tensors import (
    ELEMENTS_MAX,
    binary_tensor,
    dense,
    elements,
    shape_of,
    text_of,
    tokens,
)
from coordinator.doors.tinker.unreadable import consumes_seq
from coordinator.payloads.elements import TooManyElements, parse
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.v1 import checkpoints_pb2, training_pb2, types_pb2
from workers.contract.loss_inputs import LOSS_RULES

PassRequest = training_pb2.ForwardRequest | training_pb2.ForwardBackwardRequest
_ELSEWHERE = {
    "custom": "use forward_backward_custom, which computes the loss in the client",
}
"""Losses that the SDK names and this pool does not have, each with its replacement."""
_KINDS = {
    "prompt_tokens": types_pb2.PROVENANCE_KIND_PROMPT,
    "sampled_tokens": types_pb2.PROVENANCE_KIND_SAMPLED,
}


@consumes_seq(training_pb2.ForwardBackwardRequest)
async def forward_backward(call: Call) -> Response:
    """POST /forward_backward, with or without gradient; POST /forward of clients before 0.25."""
    if call.content_type == PROTOBUF:
        body = await call.body(bytes_max=call.door.config.message_bytes_max)
        asked = await call.in_turn(len(body), lambda: _parsed(body))
    elif call.content_type == "application/json":
        return await _json_pass(call, await call.json(schemas.JsonPass, bytes_max=JSON_BYTES_MAX))
    else:
        raise invalid(
            f"content-type {call.content_type[:80]!r} is not supported: send {PROTOBUF}, or JSON as clients before 0.25"
        )
    return await _pass(call, asked)


def _parsed(body: bytes) -> wire.ForwardBackwardRequest:
    try:
        return parse(wire.ForwardBackwardRequest, body)
    except TooManyElements as error:
        raise UnreadableBody(error.reason, error.message, body[:HEAD_BYTES]) from None
    except DecodeError:
        raise unreadable("the body is not a forward_backward request of the Tinker protocol", body) from None


async def _json_pass(call: Call, given: schemas.JsonPass) -> Response:
    try:
        asked = _binary_pass(given)
    except ServiceError as error:
        make = _request_type(is_forward=_is_forward(given))
        return await submit(call, call.service.refuse, make(adapter_id=given.model_id, seq=given.seq_id), error)
    return await _pass(call, asked)


async def _pass(call: Call, asked: wire.ForwardBackwardRequest) -> Response:
    make = _request_type(is_forward=asked.forward_only)
    request = make(adapter_id=asked.model_id, seq=asked.seq_id)
    mark_batch(call, request)
    try:
        _fill(request, asked)
    except ServiceError as error:
        return await submit(call, call.service.refuse, request, error)
    use_case = call.service.forward if asked.forward_only else call.service.forward_backward
    return await submit(call, use_case, request)


def _request_type(*, is_forward: bool) -> type[PassRequest]:
    return training_pb2.ForwardRequest if is_forward else training_pb2.ForwardBackwardRequest


@consumes_seq(training_pb2.OptimStepRequest)
async def optim_step(call: Call) -> Response:
    """POST /optim_step."""
    asked = await call.json(schemas.OptimStep)
    request = training_pb2.OptimStepRequest(adapter_id=asked.model_id, seq=asked.seq_id)
    if asked.optimizer_params is not None:
        name = str(asked.optimizer_params.get("type", ""))[:40]
        error = unsupported(f"optimizer {name!r}", "send adam_params")
        return await submit(call, call.service.refuse, request, error)
    given = asked.adam_params.model_dump(exclude_none=True) if asked.adam_params else {}
    request.adam.CopyFrom(types_pb2.AdamParams(**given))
    return await submit(call, call.service.optim_step, request)


@consumes_seq(checkpoints_pb2.SaveStateRequest)
async def save_weights(call: Call) -> Response:
    """POST /save_weights."""
    asked = await call.json(schemas.SaveWeights)
    request = checkpoints_pb2.SaveStateRequest(
        adapter_id=asked.model_id,
        seq=asked.seq_id,
        name=asked.path,
        user_metadata=asked.user_metadata or {},
        overwrite=asked.overwrite,
        ttl_seconds=asked.ttl_seconds or 0,
    )
    return await submit(call, call.service.save_state, request)


@consumes_seq(checkpoints_pb2.SaveWeightsForSamplerRequest)
async def save_weights_for_sampler(call: Call) -> Response:
    """POST /save_weights_for_sampler."""
    asked = await call.json(schemas.SaveWeightsForSampler)
    request = checkpoints_pb2.SaveWeightsForSamplerRequest(
        adapter_id=asked.model_id,
        seq=asked.seq_id,
        name=asked.path or "",
        user_metadata=asked.user_metadata or {},
        ttl_seconds=asked.ttl_seconds or 0,
        sampler_index=None if asked.path else asked.sampling_session_seq_id,
        is_inflight=asked.kind == "inflight",
    )
    return await submit(call, call.service.save_weights_for_sampler, request)


@consumes_seq(checkpoints_pb2.SaveWeightsForSamplerRequest)
async def save_weights_external(call: Call) -> Response:
    """POST /save_weights_external."""
    asked = await call.json(schemas.SaveWeightsExternal)
    request = checkpoints_pb2.SaveWeightsForSamplerRequest(
        adapter_id=asked.model_id,
        seq=asked.seq_id,
        name=asked.path,
        ttl_seconds=asked.ttl_seconds or 0,
        for_export=True,
        age_recipients=asked.age_encryption_recipients or [],
    )
    return await submit(call, call.service.save_weights_for_sampler, request)


async def load_into(call: Call, model_id: str, asked: schemas.LoadWeights) -> Response:
    """POST /load_weights into an existing model."""
    if asked.seq_id is None:
        raise invalid("seq_id is missing: send the sequence number of the load")
    request = training_pb2.LoadStateRequest(
        adapter_id=model_id, seq=asked.seq_id, path=asked.path, with_optimizer=asked.optimizer
    )
    if asked.weights_access_token:
        return await submit(call, call.service.refuse, request, no_access_tokens())
    return await submit(call, call.service.load_state, request)


def no_access_tokens() -> ServiceError:
    """Return the refusal of a token for another tenant's checkpoint."""
    return unsupported(
        "weights_access_token", "ask the owner to publish the checkpoint, or use a key of the same tenant"
    )


def _fill(request: PassRequest, asked: wire.ForwardBackwardRequest) -> None:
    """Fill in loss and data. The refusal of a request has the fields that were converted before the error.

    Raises ServiceError INVALID_ARGUMENT.
    """
    _check_num_data(len(asked.data))
    request.loss_function = loss_function(asked.loss_fn)
    for key, value in _options(asked).items():
        request.loss_config[key] = value
    claimed = 0
    for index, datum in enumerate(asked.data):
        inputs = {}
        for key, tensor in datum.loss_fn_inputs.items():
            label = f"data[{index}].loss_fn_inputs[{key[:80]!r}]"
            if tensor.HasField("sparse_csr"):
                claimed += math.prod(shape_of(label, tensor))
                if claimed > ELEMENTS_MAX:
                    raise invalid(
                        f"{label}: the sparse inputs of a request have at most {ELEMENTS_MAX} elements in all: send "
                        "less at once"
                    )
            inputs[key] = dense(label, tensor)
        request.data.add(
            tokens=tokens(datum.model_input, f"data[{index}].model_input"),
            loss_inputs=inputs,
            token_spans=map(_span, datum.model_input_spans),
            target_spans=map(_span, datum.loss_fn_input_spans),
        )


def _span(given: wire.ProvenanceSpan) -> types_pb2.ProvenanceSpan:
    kind = given.WhichOneof("span")
    run = given.sampled_tokens if kind == "sampled_tokens" else given.prompt_tokens
    return types_pb2.ProvenanceSpan(
        kind=_KINDS.get(kind or "", types_pb2.PROVENANCE_KIND_UNSPECIFIED),
        sequence_id=run.sequence_id,
        offset=run.offset,
        length=run.length,
    )


def _check_num_data(num_data: int) -> None:
    if num_data > DATUMS_MAX:
        raise invalid(f"{num_data} sequences in one request, at most {DATUMS_MAX}: send several requests")


def loss_function(name: str) -> types_pb2.LossFunction.ValueType:
    """Return the contract's loss of a name. Raises ServiceError INVALID_ARGUMENT."""
    if name in _ELSEWHERE:
        raise unsupported(f"loss {name!r}", _ELSEWHERE[name])
    if name not in LOSS_RULES:
        raise invalid(f"loss_fn {name[:80]!r} is not known: use one of {', '.join(LOSS_RULES)}", "UNKNOWN_LOSS")
    return types_pb2.LossFunction.Value(f"LOSS_FUNCTION_{name.upper()}")


def _options(asked: wire.ForwardBackwardRequest) -> Mapping[str, float]:
    if not asked.loss_fn_config_v2:
        return asked.loss_fn_config
    for key, option in asked.loss_fn_config_v2.items():
        if option.WhichOneof("value") != "number":
            raise invalid(f"loss_fn_config {key[:80]!r} must be a number: the losses of this pool have no text options")
    return {key: option.number for key, option in asked.loss_fn_config_v2.items()}


def _binary_pass(asked: schemas.JsonPass) -> wire.ForwardBackwardRequest:
    """Return a pass as later clients send it. Raises ServiceError INVALID_ARGUMENT."""
    given = asked.forward_backward_input or asked.forward_input
    if given is None:
        raise invalid("forward_backward_input and forward_input are missing: send one of them, with the data")
    _check_num_data(len(given.data))
    return wire.ForwardBackwardRequest(
        model_id=asked.model_id,
        seq_id=asked.seq_id,
        forward_only=_is_forward(asked),
        loss_fn=given.loss_fn,
        loss_fn_config=given.loss_fn_config or {},
        data=[_datum(f"data[{index}]", datum) for index, datum in enumerate(given.data)],
    )


def _is_forward(asked: schemas.JsonPass) -> bool:
    """Return whether the pass adds no gradient. A pass without any input counts as one that adds some."""
    return asked.forward_backward_input is None and asked.forward_input is not None


def _datum(label: str, datum: schemas.JsonDatum) -> wire.Datum:
    return wire.Datum(
        model_input=[_chunk(chunk, f"{label}.model_input") for chunk in datum.model_input.chunks],
        loss_fn_inputs={
            name: binary_tensor(f"{label}.loss_fn_inputs[{name[:80]!r}]", tensor)
            for name, tensor in datum.loss_fn_inputs.items()
        },
    )


def _chunk(chunk: schemas.Chunk, label: str) -> wire.Chunk:
    return wire.Chunk(encoded_text=wire.TextChunk(tokens=elements(label, text_of(chunk, label), np.dtype("<i4"))))

"""The user's types to and from the contract's messages. Pure; ValueError for values that no message can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tinkerpool import types
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.errors import Code, OperationFailed
from tinkerpool.names import CheckpointPath, sequence_id
from tinkerpool.v1 import operations_pb2, sampling_pb2, types_pb2

_LOSS_PREFIX = "LOSS_FUNCTION_"
SPAN_BYTES = 80
"""Of a span in a request, about: most of it is the id of its sequence."""
LOSS_FN_OUTPUT_TYPE = "TorchLossReturn"


def loss_function(name: str) -> types_pb2.LossFunction.ValueType:
    """Return the contract's number of a loss. Raises ValueError, which names the losses."""
    known = {
        key.removeprefix(_LOSS_PREFIX).lower(): value
        for key, value in types_pb2.LossFunction.items()
        if value != types_pb2.LOSS_FUNCTION_UNSPECIFIED
    }
    if name not in known:
        hint = "; for a loss of your own use forward_backward_custom" if name == "custom" or callable(name) else ""
        raise ValueError(f"unknown loss_fn {name!r}: use one of {', '.join(known)}{hint}")
    return known[name]


def add_datum(data: Any, datum: types.Datum, loss_fn: str) -> None:
    """Append a datum to a request's repeated field. Raises ValueError for a target that is no token id."""
    message: types_pb2.Datum = data.add()
    message.tokens.CopyFrom(to_tensor(datum.model_input.to_numpy()))
    for name, tensor in _loss_inputs(datum, loss_fn).items():
        array = tensor.data.reshape(tensor.shape)
        if name == "target_tokens":
            array = types.as_tokens(array, "target_tokens")  # half the bytes
        message.loss_inputs[name].CopyFrom(to_tensor(array))
    if loss_fn == "stable_reinforce":  # the others ignore where tokens come from
        message.token_spans.extend(map(_span, datum.model_input_spans or ()))
        message.target_spans.extend(map(_span, datum.loss_fn_input_spans or ()))


def _span(span: types.PromptProvenanceSpan | types.SampledProvenanceSpan) -> types_pb2.ProvenanceSpan:
    is_prompt = isinstance(span, types.PromptProvenanceSpan)
    return types_pb2.ProvenanceSpan(
        kind=types_pb2.PROVENANCE_KIND_PROMPT if is_prompt else types_pb2.PROVENANCE_KIND_SAMPLED,
        sequence_id=span.sequence_id,
        offset=span.offset,
        length=span.length,
    )


def has_ignored_targets(datum: types.Datum) -> bool:
    """Return whether the datum has a target of -100."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    return targets is not None and bool((targets.data == types.IGNORED_TARGET).any())


def _loss_inputs(datum: types.Datum, loss_fn: str) -> Mapping[str, types.TensorData]:
    """Return a datum's loss inputs, its targets of -100 as token 0 with weight 0. Raises ValueError."""
    if not has_ignored_targets(datum):
        return datum.loss_fn_inputs
    if loss_fn != "cross_entropy":
        raise ValueError(
            f"loss_fn_inputs['target_tokens'] has {types.IGNORED_TARGET}, which only cross_entropy leaves out: for "
            f"{loss_fn} use any token id there, and an advantage of 0"
        )
    inputs = dict(datum.loss_fn_inputs)
    targets = inputs["target_tokens"]
    weights = inputs.get("weights", types.TensorData(np.ones(targets.shape, np.float32)))
    if weights.shape != targets.shape:
        raise ValueError(
            f"loss_fn_inputs['weights'] has shape {weights.shape} but target_tokens has {targets.shape}: give one "
            "weight per target"
        )
    is_ignored = targets.data == types.IGNORED_TARGET
    inputs["target_tokens"] = types.TensorData(np.where(is_ignored, 0, targets.data), "int64", targets.shape)
    inputs["weights"] = types.TensorData(np.where(is_ignored, np.float32(0), weights.data), "float32", targets.shape)
    return inputs


def datum_bytes(datum: types.Datum) -> int:
    """Return approximately how many bytes a datum takes in a request."""
    num_spans = len(datum.model_input_spans or ()) + len(datum.loss_fn_input_spans or ())
    num_input_bytes = sum(tensor.data.nbytes for tensor in datum.loss_fn_inputs.values())
    return 4 * datum.model_input.length + num_input_bytes + SPAN_BYTES * num_spans


def adam_params(params: types.AdamParams | None) -> types_pb2.AdamParams:
    """Return the message with every field set, so that it means the same to every version of the service.

    None: the defaults. Raises ValueError for anything else, and for a field that is no number.
    """
    if params is None:
        params = types.AdamParams()
    if not isinstance(params, types.AdamParams):
        rate = params if isinstance(params, int | float | np.number) else 1e-4
        raise ValueError(f"AdamParams expected, got {kind_of(params)}: write AdamParams(learning_rate={float(rate):g})")
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if not types.is_number(value):
            raise ValueError(
                f"AdamParams.{field.name} is {value!r:.80}: give a number, or leave it out for {field.default:g}"
            )
    return types_pb2.AdamParams(
        learning_rate=params.learning_rate,
        beta1=params.beta1,
        beta2=params.beta2,
        eps=params.eps,
        weight_decay=params.weight_decay,
        grad_clip_norm=params.grad_clip_norm,
    )


def sampling_params(params: types.SamplingParams) -> sampling_pb2.SamplingParams:
    """Return the message; the service draws a missing seed. Raises ValueError for anything but SamplingParams."""
    if not isinstance(params, types.SamplingParams):
        raise ValueError(f"SamplingParams expected, got {kind_of(params)}: write SamplingParams(max_tokens=64)")
    message = sampling_pb2.SamplingParams(
        max_tokens=params.max_tokens or 0,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
    )
    if params.stop is not None:
        message.stop.SetInParent()  # set and empty means: nothing but the length
        stops: list[Any] = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        message.stop.strings.extend(stop for stop in stops if isinstance(stop, str))
        message.stop.tokens.extend(int(stop) for stop in stops if not isinstance(stop, str))
    return message


def positive(name: str, value: int | None, none: str) -> int:
    """Return the contract's value, where 0 stands for None. Raises ValueError for anything but a number from 1 on.

    `none`: what None is for.
    """
    types.check_number(name, value, is_whole=True, or_none=True)
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1, or None {none}; got {value}")
    return value or 0


def text(name: str, value: str | None) -> str:
    """Return the contract's value, where "" stands for None. Raises ValueError for anything but a string."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r:.80}")
    return value or ""


def ttl(ttl_seconds: int | None) -> int:
    """Return the contract's value of a time to live. Raises ValueError below 1, so that 0 never keeps for good."""
    return positive("ttl_seconds", ttl_seconds, "to keep the checkpoint")


def check_succeeded(operation: operations_pb2.Operation) -> operations_pb2.Operation:
    """Return the operation if it succeeded. Raises OperationFailed with its error."""
    if operation.state == operations_pb2.OPERATION_STATE_FAILED:
        error = operation.error
        raise OperationFailed(error.message, code=Code.of(error.code), reason=error.reason, operation=operation.name)
    return operation


def is_finished(operation: operations_pb2.Operation) -> bool:
    """Return whether the message has an outcome."""
    return operation.WhichOneof("result") is not None or operation.HasField("error")


def forward_backward_output(operation: operations_pb2.Operation) -> types.ForwardBackwardOutput:
    """Return the result of a succeeded forward or forward_backward."""
    result = operation.forward_backward
    return types.ForwardBackwardOutput(
        loss_fn_output_type=LOSS_FN_OUTPUT_TYPE,
        loss_fn_outputs=[{"logprobs": types.TensorData(from_tensor(tensor))} for tensor in result.logprobs],
        metrics=dict(result.metrics),
    )


def sample_response(operation: operations_pb2.Operation) -> types.SampleResponse:
    """Return the result of a succeeded sample."""
    result = operation.sample
    prompt_logprobs = target_logprobs = alt_tokens = None
    if result.HasField("prompt_logprobs"):
        values = from_tensor(result.prompt_logprobs).tolist()
        prompt_logprobs = [None if math.isnan(value) else value for value in values]
    if result.HasField("prompt_target_logprobs"):
        targets = from_tensor(result.prompt_target_logprobs)  # (p - 1, k)
        target_logprobs = types.TensorData(np.where(np.isnan(targets), np.float32(0), targets))
    if result.HasField("prompt_alt_tokens"):
        drawn = result.prompt_alt_tokens
        alt_tokens = types.PromptAltTokens(
            tokens=types.TensorData(from_tensor(drawn.token_ids), "int64"),
            logprobs=types.TensorData(from_tensor(drawn.logprobs)),
        )
    return types.SampleResponse(
        sequences=[
            _sequence(sequence, sequence_id(operation.name, index)) for index, sequence in enumerate(result.sequences)
        ],
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs_np=_topk(result.topk_prompt) if result.HasField("topk_prompt") else None,
        target_prompt_logprobs=target_logprobs,
        prompt_cache_hit_tokens=result.num_cached_prompt_tokens,
        prompt_alt_tokens=alt_tokens,
    )


def prompt_targets(values: Any) -> types_pb2.Tensor:
    """Return token ids, or -1, of shape (p - 1, k). Raises ValueError for anything but an integer matrix."""
    array = values.to_numpy() if isinstance(values, types.TensorData) else types.as_array(values)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            "target_prompt_logprobs are token ids of shape (prompt length - 1, k), with -1 for no target; "
            f"got {array.dtype} of shape {array.shape}"
        )
    if isinstance(values, types.TensorData) and values.is_given is not None:
        array = np.where(values.is_given.reshape(array.shape), array, -1)
    return to_tensor(array.astype(np.int64))


def sampled_token(token: sampling_pb2.SampledToken) -> types.SampledToken:
    """Return a token of a stream."""
    return types.SampledToken(sequence_index=token.sequence_index, token=token.token, logprob=token.logprob)


def _sequence(sequence: operations_pb2.SampledSequence, name: str) -> types.SampledSequence:
    is_stop = sequence.stop_reason == operations_pb2.STOP_REASON_STOP
    return types.SampledSequence(
        stop_reason="stop" if is_stop else "length",
        tokens=from_tensor(sequence.tokens).tolist(),
        logprobs=from_tensor(sequence.logprobs).tolist(),
        topk_logprobs_np=_topk(sequence.topk) if sequence.HasField("topk") else None,
        sequence_id=name,
    )


def _topk(found: operations_pb2.TokenLogprobs) -> types.TopkLogprobs:
    return types.TopkLogprobs(token_ids=from_tensor(found.token_ids), logprobs=from_tensor(found.logprobs))


def loss_config(config: Mapping[str, float] | None) -> dict[str, float]:
    """Return the options of a loss. Raises ValueError for an option that is not a number."""
    values = dict(config or {})
    for name, value in values.items():
        if not types.is_number(value):
            raise ValueError(f"loss_fn_config[{name!r}] must be a number, got {value!r}")
    return {name: float(value) for name, value in values.items()}


def kind_of(value: Any) -> str:
    """Return what a value is, for a message."""
    return "None" if value is None else f"a {type(value).__name__}"


def checkpoint_path(path: str) -> str:
    """Return the path. Raises ValueError, which says what is expected, if it is not one of a checkpoint."""
    if not isinstance(path, str):
        raise ValueError(f"a path is expected, as save_state returns it in `path`, got {kind_of(path)}")
    return str(CheckpointPath.parse(path))


def string_map(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return user metadata. Raises ValueError for anything but strings."""
    values = dict(metadata or {})
    if not all(isinstance(part, str) for part in _parts(values)):
        raise ValueError("user_metadata and labels map strings to strings")
    return values


def adapter_labels(user_metadata: Mapping[str, str] | None, labels: Mapping[str, str] | None) -> dict[str, str]:
    """Return an adapter's labels, given under one of their names. Raises ValueError for both, and as `string_map`."""
    if user_metadata is not None and labels is not None:
        raise ValueError("user_metadata and labels are two names of one argument: pass one of them")
    return string_map(user_metadata if labels is None else labels)


def _parts(values: Mapping[Any, Any]) -> Iterable[Any]:
    yield from values.keys()
    yield from values.values()

"""Canonical bodies: what an operation asks for, as bytes that are equal exactly when the request is the same.

A body is the contract's own request message without `seq` and `request_id`, every tensor in its one canonical dtype,
serialized with sorted maps. It is what the log holds, what the idempotency hash covers, and what recovery decodes.
Checks everything that can be checked without the model's weights; raises ServiceError INVALID_ARGUMENT, saying what to
change. Samples have a module of their own, `sample_messages`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.base.config import Limits
from coordinator.base.errors import invalid
from coordinator.operations.canonical import serialize
from coordinator.operations.chunks import Chunk
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.messages import AdamParams, Datum, ModelInfo

PassRequest = training_pb2.ForwardRequest | training_pb2.ForwardBackwardRequest | training_pb2.TrainStepRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRule:
    """What a loss takes."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    options: frozenset[str] = frozenset()


_RL = frozenset({"target_tokens", "logprobs", "advantages"})
_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
LOSS_RULES: Mapping[str, LossRule] = {
    "cross_entropy": LossRule(required=frozenset({"target_tokens", "weights"})),
    "importance_sampling": LossRule(required=_RL),
    "ppo": LossRule(required=_RL, optional=_CLIP, options=_CLIP),
    "cispo": LossRule(required=_RL, optional=_CLIP, options=_CLIP),
    "dro": LossRule(required=_RL, options=frozenset({"beta"})),
    "gspo": LossRule(required=_RL, optional=_CLIP | {"sequence_ratio_mask"}, options=_CLIP),
}
IGNORED_INPUT = "mask"
"""Recipes carry it along for themselves."""


def loss_name(value: int) -> str:
    """The loss of an enum value. Raises ServiceError for an unset or unknown one."""
    try:
        name = types_pb2.LossFunction.Name(value).removeprefix("LOSS_FUNCTION_").lower()  # type: ignore[arg-type]
    except ValueError:
        name = str(value)
    if name not in LOSS_RULES:
        raise invalid(f"loss_function {name!r} is not known: use one of {', '.join(LOSS_RULES)}", "UNKNOWN_LOSS")
    return name


def canonical_pass(request: PassRequest, model: ModelInfo, limits: Limits) -> tuple[bytes, tuple[Datum, ...]]:
    """Check a forward or forward_backward; returns its body and its decoded data."""
    name = loss_name(request.loss_function)
    rule = LOSS_RULES[name]
    if not request.data:
        raise invalid("data is empty: send at least one sequence")
    if len(request.data) > limits.datums_max:
        raise invalid(
            f"{len(request.data)} sequences in one request, at most {limits.datums_max}: send several requests"
        )
    for key, value in request.loss_config.items():
        if key not in rule.options:
            known = ", ".join(sorted(rule.options)) or "none"
            raise invalid(f"loss_config {key[:80]!r} is not an option of {name} (its options: {known})")
        if not math.isfinite(value):
            raise invalid(f"loss_config {key[:80]!r} must be finite, not {value}")
    data = tuple(_datum(f"data[{i}]", datum, name, rule, model) for i, datum in enumerate(request.data))
    body = training_pb2.ForwardBackwardRequest(
        adapter_id=request.adapter_id, loss_function=request.loss_function, loss_config=dict(request.loss_config)
    )
    for datum in data:
        body.data.add(
            tokens=to_tensor(datum.tokens), loss_inputs={key: to_tensor(v) for key, v in datum.loss_inputs.items()}
        )
    return serialize(body), data


def check_fits(chunks: Sequence[Chunk], model: ModelInfo) -> None:
    """Refuse a request with a chunk that no worker of its base model has the memory to train."""
    most = model.fitting_tokens
    for chunk in chunks:
        if most is None or chunk.num_tokens <= most:
            continue
        if chunk.stop == chunk.start + 1:
            what = f"data[{chunk.start}] has {chunk.num_tokens} tokens"
            mend = f"cut the sequence to at most {most}"
        else:
            what = f"data[{chunk.start}] to data[{chunk.stop - 1}] run together and have {chunk.num_tokens} tokens"
            mend = f"send them in requests of at most {most} tokens"
        raise invalid(f"{what}, but the pool has memory for {most} tokens of {model.name} at once: {mend}", "NO_MEMORY")


def decode_pass(body: bytes) -> tuple[str, dict[str, float], tuple[Datum, ...]]:
    """Loss, its options and the data of a canonical body."""
    request = training_pb2.ForwardBackwardRequest.FromString(body)
    data = tuple(
        Datum(
            tokens=from_tensor(datum.tokens),
            loss_inputs={key: from_tensor(datum.loss_inputs[key]) for key in sorted(datum.loss_inputs)},
        )
        for datum in request.data
    )
    return loss_name(request.loss_function), dict(request.loss_config), data


def canonical_adam(adapter_id: str, adam: types_pb2.AdamParams) -> bytes:
    """Check an optimizer step's hyperparameters and fill in the defaults; returns the body of the optim_step."""
    values = {key: getattr(adam, key) for key in AdamParams.__dataclass_fields__ if adam.HasField(key)}  # type: ignore[arg-type]
    params = AdamParams(**values)
    for key, limit in (
        ("learning_rate", math.inf),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("weight_decay", math.inf),
        ("grad_clip_norm", math.inf),
    ):
        value = getattr(params, key)
        if not 0 <= value < limit:
            upper = "" if limit == math.inf else f" and below {limit:g}"
            raise invalid(f"adam.{key} must be a finite number, 0 or more{upper}, not {value}")
    if not 0 < params.eps < math.inf:
        raise invalid(f"adam.eps must be above 0, not {params.eps}")
    filled = {key: getattr(params, key) for key in AdamParams.__dataclass_fields__}
    return serialize(training_pb2.OptimStepRequest(adapter_id=adapter_id, adam=types_pb2.AdamParams(**filled)))


def decode_adam(body: bytes) -> AdamParams:
    """The hyperparameters of a canonical optim_step."""
    adam = training_pb2.OptimStepRequest.FromString(body).adam
    return AdamParams(**{key: getattr(adam, key) for key in AdamParams.__dataclass_fields__})


def check_metadata(metadata: Mapping[str, str], limits: Limits) -> None:
    """Refuse user metadata above the limit."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > limits.metadata_bytes_max:
        raise invalid(
            f"user_metadata has {size} bytes, at most {limits.metadata_bytes_max}: keep only what you look up"
        )


def checked_array(label: str, tensor: types_pb2.Tensor) -> NDArray[Any]:
    """The array of a tensor message. Raises ServiceError INVALID_ARGUMENT; `label` says where it stands."""
    try:
        return from_tensor(tensor)
    except ValueError as error:
        raise invalid(f"{label}: {error}") from None


def checked_tokens(
    label: str, array: NDArray[Any], model: ModelInfo, num_dims: Sequence[int] = (1,), lowest: int = 0
) -> NDArray[np.int32]:
    """Token ids of the model; with a `lowest` of -1, which is none, that too. Raises ServiceError INVALID_ARGUMENT."""
    if array.dtype.kind != "i" or array.ndim not in num_dims:
        raise invalid(f"{label} must be a vector of int32 or int64 token ids, got {array.dtype} of shape {array.shape}")
    if array.size == 0:
        raise invalid(f"{label} is empty: give at least one token")
    low, high = int(array.min()), int(array.max())
    if low < lowest or high >= model.vocab_size:
        wrong = low if low < lowest else high
        raise invalid(
            f"{label} has token id {wrong}; {model.name} has ids 0 to {model.vocab_size - 1}: "
            "was another model's tokenizer used?",
            "TOKEN_OUT_OF_RANGE",
        )
    return array.astype(np.int32, copy=False)


def _datum(where: str, datum: types_pb2.Datum, loss: str, rule: LossRule, model: ModelInfo) -> Datum:
    tokens = checked_tokens(f"{where}.tokens", checked_array(f"{where}.tokens", datum.tokens), model)
    if len(tokens) > model.max_seq_len:
        raise invalid(
            f"{where} has {len(tokens)} tokens, but {model.name} takes at most {model.max_seq_len}: cut the sequence",
            "SEQUENCE_TOO_LONG",
        )
    names = set(datum.loss_inputs) - {IGNORED_INPUT}
    _check_names(where, names, loss, rule)
    inputs: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: (name != "target_tokens", name)):  # the others must have its shape
        label = f"{where}.loss_inputs[{name[:80]!r}]"
        array = checked_array(label, datum.loss_inputs[name])
        if name == "target_tokens":
            inputs[name] = checked_tokens(label, array, model, num_dims=(1, 2) if loss == "cross_entropy" else (1,))
        else:
            inputs[name] = _floats(label, array)
        length = len(array) if array.ndim else 0
        if length != len(tokens):
            raise invalid(
                f"{label} has length {length} but tokens has {len(tokens)}: give one entry per token "
                "(position t of target_tokens is what should follow position t of tokens)",
                "LENGTH_MISMATCH",
            )
        if name != "target_tokens" and array.shape != datum_shape(datum):
            raise invalid(
                f"{label} has shape {array.shape} but target_tokens has {datum_shape(datum)}", "LENGTH_MISMATCH"
            )
    return Datum(tokens=tokens, loss_inputs=inputs)


def datum_shape(datum: types_pb2.Datum) -> tuple[int, ...]:
    """The shape of a datum's targets."""
    return tuple(datum.loss_inputs["target_tokens"].shape)


def _check_names(where: str, names: Iterable[str], loss: str, rule: LossRule) -> None:
    names = set(names)
    if missing := sorted(rule.required - names):
        raise invalid(f"{where}.loss_inputs lacks {', '.join(missing)}, which {loss} needs")
    if unknown := sorted(names - rule.required - rule.optional):
        allowed = ", ".join(sorted(rule.required | rule.optional))
        raise invalid(f"{where}.loss_inputs has {', '.join(unknown)}, which {loss} does not take (it takes {allowed})")


def _floats(label: str, array: NDArray[Any]) -> NDArray[np.float32]:
    floats = array.astype(np.float32, copy=False)
    if not np.isfinite(floats).all():
        where = int(np.flatnonzero(~np.isfinite(floats))[0])
        raise invalid(f"{label} is not finite at element {where}: NaN and infinity are refused", "NON_FINITE_INPUT")
    return floats

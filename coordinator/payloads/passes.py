"""Payloads of passes: canonical messages, equal exactly when two requests ask for the same; and canonical chunks.

A payload is the contract's own request message without `seq` and `request_id`, with every default filled in, every
tensor in its one canonical dtype, serialized with sorted maps. The operation log holds it, the idempotency hash covers
it, and replay decodes it. `canonical_pass` returns a payload together with its decoded form, so that an admitted
request is decoded once; `decode_pass` returns the same decoded form of the payload alone.

Checks everything that can be checked without the model's weights, and raises ServiceError INVALID_ARGUMENT that says
what to change, in the words of the Python clients (`loss_fn_inputs`). Samples have a module of their own, `samples`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.base.config import Limits
from coordinator.base.errors import Code, ServiceError, invalid
from coordinator.payloads.canonical import serialize
from coordinator.payloads.provenance import check_spans
from tinkerpool.convert import DIMS_MAX, from_tensor, to_tensor
from tinkerpool.types import IGNORED_TARGET
from tinkerpool.v1 import training_pb2, types_pb2
from workers.contract.loss_inputs import IGNORED_INPUT, LOSS_RULES, LossRule
from workers.contract.messages import UNMARKED, AdamParams, Datum, ModelInfo, RequestBatch

PassRequest = training_pb2.ForwardRequest | training_pb2.ForwardBackwardRequest | training_pb2.TrainStepRequest
Inputs = Mapping[str, NDArray[np.float32] | NDArray[np.int32]]


PASS_BYTES, DATUM_BYTES, ARRAY_BYTES = 340, 260, 148
"""Memory of the Python objects around decoded arrays: of a request, of each datum in it, of each array. Measured with
CPython 3.11 and numpy 2; a test compares them with tracemalloc."""
ABANDONED_CHARS_MAX = 1_000
"""Characters of a client's reason to give up a seq that its outcome keeps."""
INLINE_BYTES_MAX = 1 << 20
"""Requests up to this size are decoded on the event loop, which takes some milliseconds; larger ones on a thread."""


def decoded_bytes(num_datums: int, num_arrays: int, num_array_bytes: int) -> int:
    """Return the memory in bytes that decoded data takes: its arrays, and the Python objects around them."""
    return PASS_BYTES + DATUM_BYTES * num_datums + ARRAY_BYTES * num_arrays + num_array_bytes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A canonical chunk: datums `start` to `stop` of a request. A function of only the request and the base model."""

    start: int
    stop: int
    num_tokens: int


def cut_chunks(lengths: list[int], chunk_tokens: int) -> tuple[Chunk, ...]:
    """Cut a request into canonical chunks: whole sequences in order, up to `chunk_tokens`; a longer one is its own."""
    chunks: list[Chunk] = []
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > chunk_tokens:
            chunks.append(Chunk(start, index, total))
            start, total = index, 0
        total += length
    chunks.append(Chunk(start, len(lengths), total))
    return tuple(chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedPass:
    """A forward or forward_backward as numpy arrays. `decoded_pass` makes it, for admission and for replay alike."""

    loss_fn: str
    loss_config: Mapping[str, float]
    """Sorted by name."""
    data: tuple[Datum, ...]
    """Loss inputs are sorted by name; arrays are read-only, contiguous, int32 or float32."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(datum.tokens) for datum in self.data]

    @property
    def num_bytes(self) -> int:
        """Memory that the data takes."""
        num_arrays = sum(1 + len(datum.loss_inputs) for datum in self.data)
        num_array_bytes = sum(
            datum.tokens.nbytes + sum(array.nbytes for array in datum.loss_inputs.values()) for datum in self.data
        )
        return decoded_bytes(len(self.data), num_arrays, num_array_bytes)


def decoded_pass(
    loss_fn: str, loss_config: Mapping[str, float], data: Iterable[tuple[NDArray[Any], Mapping[str, NDArray[Any]]]]
) -> DecodedPass:
    """Make the decoded form of a pass from checked values; `data` has tokens and loss inputs of each sequence."""
    return DecodedPass(
        loss_fn=loss_fn,
        loss_config={key: loss_config[key] for key in sorted(loss_config)},
        data=tuple(
            Datum(
                tokens=frozen_array(tokens, np.int32),
                loss_inputs={
                    sys.intern(name): frozen_array(inputs[name], np.int32 if name == "target_tokens" else np.float32)
                    for name in sorted(inputs)
                },
            )
            for tokens, inputs in data
        ),
    )


def frozen_array(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Return the array read-only, contiguous and of a dtype; not a copy if it has that dtype and layout already."""
    frozen = array.astype(dtype, order="C", copy=False)
    frozen.flags.writeable = False
    return frozen


def loss_name(value: int) -> str:
    """Return the loss of an enum value. Raises ServiceError for an unset or unknown one."""
    try:
        name = types_pb2.LossFunction.Name(value).removeprefix("LOSS_FUNCTION_").lower()  # type: ignore[arg-type]
    except ValueError:
        name = str(value)
    if name not in LOSS_RULES:
        raise invalid(f"loss_fn {name!r} is not known: use one of {', '.join(LOSS_RULES)}", "UNKNOWN_LOSS")
    return name


def batch_of(request: PassRequest) -> RequestBatch:
    """Return the batch that a request is part of. Raises ServiceError if the mark does not fit the request."""
    if isinstance(request, training_pb2.ForwardRequest) or not request.HasField("batch"):
        return UNMARKED
    first, num = request.batch.first_seq, request.batch.num_requests
    batch = RequestBatch(first, first + num - 1)
    if first < 1 or not first <= request.seq <= batch.last_seq:
        raise invalid(
            f"batch has {num} requests from seq {first} on, but this request has seq {request.seq}: it must be one of "
            "them, so give seq explicitly"
        )
    if isinstance(request, training_pb2.TrainStepRequest) and request.seq != batch.last_seq:
        raise invalid(
            f"batch ends at seq {batch.last_seq}, but the optim_step is at {request.seq + 1}: mark it as last"
        )
    return batch


def is_large(request: PassRequest) -> bool:
    """Return whether a pass has more than `INLINE_BYTES_MAX` bytes of tensors. `ByteSize` would serialize it.

    Adds up the shapes first: reading a tensor's bytes copies them.
    """
    tensors = [tensor for datum in request.data for tensor in (datum.tokens, *datum.loss_inputs.values())]
    announced = (4 * math.prod(tensor.shape[:DIMS_MAX]) for tensor in tensors)
    return _exceeds(announced) or _exceeds(len(tensor.data) for tensor in tensors)


def _exceeds(sizes: Iterable[int]) -> bool:
    num_bytes = 0
    for size in sizes:
        num_bytes += max(size, 0)
        if num_bytes > INLINE_BYTES_MAX:
            return True
    return False


def canonical_pass(request: PassRequest, model: ModelInfo, limits: Limits) -> tuple[bytes, DecodedPass]:
    """Check a forward or forward_backward; return its payload and its decoded form.

    For a loss with recorded inputs both are without them: `provenance.resolved` makes the payload of this one.
    """
    if isinstance(request, training_pb2.ForwardBackwardRequest) and request.abandoned:
        raise ServiceError(Code.CANCELLED, "ABANDONED", request.abandoned[:ABANDONED_CHARS_MAX])
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
            raise invalid(f"loss_fn_config {key[:80]!r} is not an option of {name} (its options: {known})")
        if not math.isfinite(value):
            raise invalid(f"loss_fn_config {key[:80]!r} must be finite, not {value}")
    checked = (_checked_datum(f"data[{i}]", datum, name, rule, model) for i, datum in enumerate(request.data))
    decoded = decoded_pass(name, request.loss_config, checked)
    payload = training_pb2.ForwardBackwardRequest(
        adapter_id=request.adapter_id, loss_function=request.loss_function, loss_config=decoded.loss_config
    )
    if not isinstance(request, training_pb2.ForwardRequest) and request.HasField("batch"):
        payload.batch.CopyFrom(request.batch)
    for datum, given in zip(decoded.data, request.data, strict=True):
        added = payload.data.add(
            tokens=to_tensor(datum.tokens), loss_inputs={key: to_tensor(v) for key, v in datum.loss_inputs.items()}
        )
        if rule.recorded:
            _add_spans(added, given)
    return serialize(payload), decoded


def _add_spans(datum: types_pb2.Datum, given: types_pb2.Datum) -> None:
    """Add a datum's spans without what only the server sets."""
    for name in ("token_spans", "target_spans"):
        for span in getattr(given, name):
            getattr(datum, name).add(
                kind=span.kind, sequence_id=span.sequence_id, offset=span.offset, length=span.length
            )


def decode_pass(payload: bytes) -> DecodedPass:
    """Return the decoded form of a pass's payload, equal to the one that `canonical_pass` returned with it."""
    request = training_pb2.ForwardBackwardRequest.FromString(payload)
    data = (
        (from_tensor(datum.tokens), {key: from_tensor(tensor) for key, tensor in datum.loss_inputs.items()})
        for datum in request.data
    )
    return decoded_pass(loss_name(request.loss_function), request.loss_config, data)


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


def canonical_adam(adapter_id: str, adam: types_pb2.AdamParams) -> bytes:
    """Check an optimizer step's hyperparameters and fill in the defaults; return the payload of the optim_step."""
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
            raise invalid(f"adam_params.{key} must be a finite number, 0 or more{upper}, not {value}")
    if not 0 < params.eps < math.inf:
        raise invalid(f"adam_params.eps must be above 0, not {params.eps}")
    filled = {key: getattr(params, key) for key in AdamParams.__dataclass_fields__}
    return serialize(training_pb2.OptimStepRequest(adapter_id=adapter_id, adam=types_pb2.AdamParams(**filled)))


def decode_adam(payload: bytes) -> AdamParams:
    """Return the hyperparameters of an optim_step's payload."""
    adam = training_pb2.OptimStepRequest.FromString(payload).adam
    return AdamParams(**{key: getattr(adam, key) for key in AdamParams.__dataclass_fields__})


def check_metadata(metadata: Mapping[str, str], limits: Limits) -> None:
    """Refuse user metadata above the limit."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in metadata.items())
    if size > limits.metadata_bytes_max:
        raise invalid(
            f"user_metadata has {size} bytes, at most {limits.metadata_bytes_max}: keep only what you look up"
        )


def checked_array(label: str, tensor: types_pb2.Tensor) -> NDArray[Any]:
    """Return the array of a tensor message. Raises ServiceError INVALID_ARGUMENT; `label` names the field."""
    try:
        return from_tensor(tensor)
    except ValueError as error:
        raise invalid(f"{label}: {error}") from None


def checked_tokens(
    label: str, array: NDArray[Any], model: ModelInfo, num_dims: Sequence[int] = (1,), lowest: int = 0
) -> NDArray[np.int32]:
    """Check that an array holds token ids of the model, and return it in int32. A `lowest` of -1 allows -1 for "none".

    Raises ServiceError INVALID_ARGUMENT.
    """
    if array.dtype.kind != "i" or array.ndim not in num_dims:
        raise invalid(f"{label} must be a vector of int32 or int64 token ids, got {array.dtype} of shape {array.shape}")
    if array.size == 0:
        raise invalid(f"{label} is empty: give at least one token")
    low, high = int(array.min()), int(array.max())
    if low < lowest or high >= model.vocab_size:
        wrong = low if low < lowest else high
        is_mask = wrong == IGNORED_TARGET
        mend = "give targets that do not count the weight 0" if is_mask else "was another model's tokenizer used?"
        raise invalid(
            f"{label} has token id {wrong}; {model.name} has ids 0 to {model.vocab_size - 1}: {mend}",
            "TOKEN_OUT_OF_RANGE",
        )
    return array.astype(np.int32, copy=False)


def _checked_datum(
    where: str, datum: types_pb2.Datum, loss: str, rule: LossRule, model: ModelInfo
) -> tuple[NDArray[np.int32], Inputs]:
    """Check a datum; return its tokens and its loss inputs, with those that it left out filled in."""
    tokens = checked_tokens(f"{where}.model_input", checked_array(f"{where}.model_input", datum.tokens), model)
    if len(tokens) > model.max_seq_len:
        raise invalid(
            f"{where} has {len(tokens)} tokens, but {model.name} takes at most {model.max_seq_len}: cut the sequence",
            "SEQUENCE_TOO_LONG",
        )
    names = set(datum.loss_inputs) - {IGNORED_INPUT} - rule.recorded
    _check_names(where, names, loss, rule)
    inputs: dict[str, Any] = {}
    for name in sorted(names, key=lambda name: (name != "target_tokens", name)):  # the others must have its shape
        label = f"{where}.loss_fn_inputs[{name[:80]!r}]"
        array = checked_array(label, datum.loss_inputs[name])
        if name == "target_tokens":
            inputs[name] = checked_tokens(label, array, model, num_dims=(1, 2) if rule.allows_many_targets else (1,))
        else:
            inputs[name] = _floats(label, array)
        if array.ndim == 0 or len(array) != len(tokens):
            found = f"has length {len(array)}" if array.ndim else "is a scalar"
            raise invalid(
                f"{label} {found} but model_input has {len(tokens)} tokens: give one entry per token "
                "(position t of target_tokens is what should follow position t of model_input)",
                "LENGTH_MISMATCH",
            )
        if name != "target_tokens" and array.shape != inputs["target_tokens"].shape:
            raise invalid(
                f"{label} has shape {array.shape} but target_tokens has {inputs['target_tokens'].shape}",
                "LENGTH_MISMATCH",
            )
    for name in rule.filled.keys() - names:
        inputs[name] = np.full(inputs["target_tokens"].shape, rule.filled[name], np.float32)
    if rule.recorded:
        check_spans(where, datum, len(tokens), inputs["advantages"])
    return tokens, inputs


def _check_names(where: str, names: Iterable[str], loss: str, rule: LossRule) -> None:
    names = set(names)
    if missing := sorted(rule.required - names):
        raise invalid(f"{where}.loss_fn_inputs lacks {', '.join(missing)}, which {loss} needs")
    if unknown := sorted(names - rule.inputs):
        allowed = ", ".join(sorted(rule.inputs))
        raise invalid(
            f"{where}.loss_fn_inputs has {', '.join(unknown)}, which {loss} does not take (it takes {allowed})"
        )


def _floats(label: str, array: NDArray[Any]) -> NDArray[np.float32]:
    floats = array.astype(np.float32, copy=False)
    if not np.isfinite(floats).all():
        where = int(np.flatnonzero(~np.isfinite(floats))[0])
        raise invalid(f"{label} is not finite at element {where}: NaN and infinity are refused", "NON_FINITE_INPUT")
    return floats

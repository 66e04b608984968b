"""Write tests/data/wire/vectors.tsv: messages of the contract as bytes and as values, for clients in any language.

Has every message that carries a tensor, and every request that the pool keeps in canonical form, with that form and its
hash. The values are examples: they fit no base model. tests/data/wire/README.md describes the columns.

With --check it writes nothing; the exit status is 1 if the encoding has changed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from coordinator.payloads.canonical import digest, serialize
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import (
    adapters_pb2,
    checkpoints_pb2,
    imports_pb2,
    operations_pb2,
    sampling_pb2,
    training_pb2,
    types_pb2,
)

FILE = Path(__file__).resolve().parent.parent / "tests" / "data" / "wire" / "vectors.tsv"
COLUMNS = ("name", "message", "bytes", "values", "encoding", "elements", "payloads", "kind", "hash")
NONE = "-"
MODULES = (adapters_pb2, checkpoints_pb2, imports_pb2, operations_pb2, sampling_pb2, training_pb2, types_pb2)
SESSION = "3f2a9c1e"
ADAPTER, SAMPLER = f"{SESSION}:train:0", f"{SESSION}:sample:0"
OPTIM_STEP_DEFAULTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector:
    """One row of the file."""

    name: str
    message: Message
    payloads: tuple[str, ...] = ()
    """Of a request as a client sends it: the vectors with what the pool keeps of it."""
    kind: str = ""
    """Of a payload that the pool knows again by its hash: the kind of operation, which the hash covers too."""

    def row(self) -> list[str]:
        """Return the cells of the row, in the order of `COLUMNS`."""
        encoded = serialize(self.message)
        values = MessageToDict(self.message)
        return [
            self.name,
            self.message.DESCRIPTOR.full_name,
            encoded.hex(),
            json.dumps(values, sort_keys=True, separators=(",", ":")),
            "sorted" if has_sorted_map(self.message) else "any",
            elements(self.message) if isinstance(self.message, types_pb2.Tensor) else NONE,
            ",".join(self.payloads) or NONE,
            self.kind or NONE,
            digest(encoded, self.kind).hex() if self.kind else NONE,
        ]


def elements(tensor: types_pb2.Tensor) -> str:
    """Return a tensor's elements: integers in decimal, float32 as the eight hexadecimal digits of their bits."""
    array = from_tensor(tensor).ravel()
    if array.dtype.kind == "f":
        return ",".join(f"{bits:08x}" for bits in array.view("<u4"))
    return ",".join(map(str, array))


def ints(*values: int) -> types_pb2.Tensor:
    """Return an int32 tensor."""
    return to_tensor(np.array(values, np.int32))


def floats(*values: float) -> types_pb2.Tensor:
    """Return a float32 tensor."""
    return to_tensor(np.array(values, np.float32))


def tensors() -> list[Vector]:
    """Return tensors of each type, with the values that are easily read or written wrongly."""
    special = np.array([0x80000000, 0x00000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000], "<u4").view("<f4")
    found = {
        "tensor_float32": floats(0.1, -2.5, 3e38, 1.17e-38),
        "tensor_float32_special": to_tensor(special),
        "tensor_int32": ints(0, 1, -1, 2**31 - 1, -(2**31)),
        "tensor_int64": to_tensor(np.array([2**53 + 1, -(2**63), 2**63 - 1], np.int64)),
        "tensor_matrix": to_tensor(np.arange(6, dtype=np.int32).reshape(2, 3)),
        "tensor_scalar": to_tensor(np.array(1.5, np.float32)),
        "tensor_empty": ints(),
    }
    return [Vector(name=name, message=tensor) for name, tensor in found.items()]


def passes() -> list[Vector]:
    """Return forward, forward_backward and train_step as sent, and their payloads."""
    request = training_pb2.ForwardBackwardRequest
    wide = to_tensor(np.array([17, 4, 9], np.int64))
    sent = types_pb2.Datum(tokens=wide, loss_inputs={"target_tokens": to_tensor(np.array([4, 9, 2], np.int64))})
    kept = types_pb2.Datum(
        tokens=ints(17, 4, 9), loss_inputs={"target_tokens": ints(4, 9, 2), "weights": floats(1.0, 1.0, 1.0)}
    )
    cross_entropy: dict[str, Any] = {"loss_function": types_pb2.LOSS_FUNCTION_CROSS_ENTROPY}
    payload = request(adapter_id=ADAPTER, data=[kept], **cross_entropy)
    drawn: dict[str, Any] = {
        "adapter_id": ADAPTER,
        "data": [
            types_pb2.Datum(
                tokens=ints(*range(first, first + 2)),
                loss_inputs={
                    "target_tokens": ints(*range(first + 1, first + 3)),
                    "logprobs": floats(-0.7, -1.3),
                    "advantages": floats(1.0, -0.25),
                },
            )
            for first in (5, 40)
        ],
        "loss_function": types_pb2.LOSS_FUNCTION_PPO,
        "loss_config": {"clip_low_threshold": 0.9, "clip_high_threshold": 0.1 + 0.2},
        "batch": training_pb2.Batch(first_seq=2, num_requests=2),
    }
    adam = types_pb2.AdamParams(learning_rate=3e-4, grad_clip_norm=1.0)
    filled = types_pb2.AdamParams(**OPTIM_STEP_DEFAULTS | {"learning_rate": 3e-4, "grad_clip_norm": 1.0})
    defaults = types_pb2.AdamParams(learning_rate=1e-4, **OPTIM_STEP_DEFAULTS)
    step = training_pb2.OptimStepRequest
    train_step = training_pb2.TrainStepRequest(adapter_id=ADAPTER, seq=4, data=[sent], adam=adam, **cross_entropy)
    return [
        Vector(name="datum", message=sent),
        Vector(
            name="forward",
            message=training_pb2.ForwardRequest(adapter_id=ADAPTER, seq=1, data=[sent], **cross_entropy),
            payloads=("forward_payload",),
        ),
        Vector(name="forward_payload", message=payload, kind="forward"),
        Vector(
            name="forward_backward",
            message=request(seq=3, request_id="once", **drawn),
            payloads=("forward_backward_payload",),
        ),
        Vector(name="forward_backward_payload", message=request(**drawn), kind="forward_backward"),
        Vector(name="forward_backward_abandoned", message=request(adapter_id=ADAPTER, seq=2, abandoned="too long")),
        Vector(name="train_step", message=train_step, payloads=("train_step_pass_payload", "train_step_step_payload")),
        Vector(name="train_step_pass_payload", message=payload, kind="forward_backward"),
        Vector(name="train_step_step_payload", message=step(adapter_id=ADAPTER, adam=filled), kind="optim_step"),
        Vector(
            name="optim_step",
            message=step(adapter_id=ADAPTER, seq=6, adam=types_pb2.AdamParams()),
            payloads=("optim_step_payload",),
        ),
        Vector(name="optim_step_payload", message=step(adapter_id=ADAPTER, adam=defaults), kind="optim_step"),
        *_recorded_pass(),
    ]


def _recorded_pass() -> list[Vector]:
    """Return a pass whose inputs are in the records of samples: its hash covers the spans, not the records."""
    sequence = f"{SAMPLER}:1:0"
    span = types_pb2.ProvenanceSpan
    datum = types_pb2.Datum(
        tokens=ints(17, 4, 9),
        loss_inputs={"target_tokens": ints(4, 9, 2), "advantages": floats(0.0, 1.5, 1.5)},
        token_spans=[
            span(kind=types_pb2.PROVENANCE_KIND_PROMPT, sequence_id=sequence, length=2),
            span(kind=types_pb2.PROVENANCE_KIND_SAMPLED, sequence_id=sequence, length=1),
        ],
        target_spans=[
            span(kind=types_pb2.PROVENANCE_KIND_PROMPT, sequence_id=sequence, offset=1, length=1),
            span(kind=types_pb2.PROVENANCE_KIND_SAMPLED, sequence_id=sequence, length=2),
        ],
    )
    values: dict[str, Any] = {"data": [datum], "loss_function": types_pb2.LOSS_FUNCTION_STABLE_REINFORCE}
    request = training_pb2.ForwardBackwardRequest(adapter_id=ADAPTER, seq=11, **values)
    payload = training_pb2.ForwardBackwardRequest(adapter_id=ADAPTER, **values)
    return [
        Vector(name="recorded_pass", message=request, payloads=("recorded_pass_payload",)),
        Vector(name="recorded_pass_payload", message=payload, kind="forward_backward"),
    ]


def states() -> list[Vector]:
    """Return the other operations of an adapter: their payload is the request without seq and request_id."""
    path = f"tinker://{ADAPTER}/weights/best"
    requests: dict[str, Message] = {
        "save_state": checkpoints_pb2.SaveStateRequest(
            adapter_id=ADAPTER, seq=7, name="best", user_metadata={"run": "7", "note": "größer"}, ttl_seconds=86400
        ),
        "save_weights_for_sampler": checkpoints_pb2.SaveWeightsForSamplerRequest(
            adapter_id=ADAPTER, seq=8, sampler_index=0
        ),
        "load_state": training_pb2.LoadStateRequest(adapter_id=ADAPTER, seq=9, path=path, with_optimizer=True),
        "discard_gradient": training_pb2.DiscardGradientRequest(adapter_id=ADAPTER, request_id="then"),
    }
    return [
        vector
        for kind, request in requests.items()
        for vector in _sent_and_kept(kind, request, "seq", "request_id", kind=kind)
    ]


def creations() -> list[Vector]:
    """Return the requests that create: of a repeated one the pool compares the payload itself, not its hash."""
    requests: dict[str, Message] = {
        "create_adapter": adapters_pb2.CreateAdapterRequest(
            session_id=SESSION, base_model="toy", rank=8, alpha=16.0, seed=2**53 + 1, train_mlp=False, request_id="once"
        ),
        "create_sampler": sampling_pb2.CreateSamplerRequest(
            session_id=SESSION, base_model="toy", index=0, request_id="once"
        ),
        "import_checkpoint": imports_pb2.ImportCheckpointRequest(
            session_id=SESSION, request_id="once", upload_id="up", name="best", user_metadata={"from": "elsewhere"}
        ),
    }
    return [vector for name, request in requests.items() for vector in _sent_and_kept(name, request, "request_id")]


def _sent_and_kept(name: str, request: Message, *left_out: str, kind: str = "") -> list[Vector]:
    payload = type(request)()
    payload.CopyFrom(request)
    for field in left_out:
        payload.ClearField(field)
    return [
        Vector(name=name, message=request, payloads=(f"{name}_payload",)),
        Vector(name=f"{name}_payload", message=payload, kind=kind),
    ]


def samples() -> list[Vector]:
    """Return a sample as sent, its payload and its result."""
    common: dict[str, Any] = {
        "sampler_id": SAMPLER,
        "include_prompt_logprobs": True,
        "topk_sample_logprobs": 2,
        "prompt_targets": to_tensor(np.array([[4, -1]], np.int32)),
        "note": "first",
    }
    params: dict[str, Any] = {"max_tokens": 2, "temperature": 0.7, "seed": 2**53 + 1}
    sent = sampling_pb2.SampleRequest(
        seq=1,
        prompt=to_tensor(np.array([17, 4], np.int64)),
        params=sampling_pb2.SamplingParams(stop=sampling_pb2.StopCondition(strings=["\n"]), **params),
        **common,
    )
    payload = sampling_pb2.SampleRequest(
        prompt=ints(17, 4),
        num_samples=1,
        params=sampling_pb2.SamplingParams(
            stop=sampling_pb2.StopCondition(strings=["\n"]), top_k=-1, top_p=1.0, **params
        ),
        logprobs_version=sampling_pb2.LOGPROBS_VERSION_SCALED,
        **common,
    )
    sequence = operations_pb2.SampledSequence(
        tokens=ints(9, 2),
        logprobs=floats(-0.105360515, -2.3025851),
        stop_reason=operations_pb2.STOP_REASON_STOP,
        topk=operations_pb2.TokenLogprobs(
            token_ids=to_tensor(np.array([[9, 4], [2, 9]], np.int32)),
            logprobs=to_tensor(np.array([[-0.1, -2.5], [-2.3, -2.4]], np.float32)),
        ),
    )
    result = operations_pb2.SampleResult(
        sequences=[sequence],
        prompt_logprobs=floats(float("nan"), -1.5),
        prompt_target_logprobs=to_tensor(np.array([[-1.5, float("nan")]], np.float32)),
        note="first",
    )
    token = sampling_pb2.SampledToken(token=9, logprob=-0.105360515)
    return [
        Vector(name="sample", message=sent, payloads=("sample_payload",)),
        Vector(name="sample_payload", message=payload, kind="sample"),
        Vector(name="stream_sample_token", message=sampling_pb2.StreamSampleResponse(token=token)),
        Vector(name="operation_sampled", message=_operation("SAMPLE", seq=1, target_id=SAMPLER, sample=result)),
    ]


def operations() -> list[Vector]:
    """Return operations that wait, failed and succeeded."""
    result = operations_pb2.ForwardBackwardResult(
        logprobs=[floats(-0.25, -1.0, -3.5)], metrics={"loss:sum": 4.75, "clock_cycle:unique": 12.0, "tokens:sum": 3.0}
    )
    step = operations_pb2.OptimStepResult(metrics={"grad_norm:last": 0.1 + 0.2})
    error = operations_pb2.OperationError(code=3, reason="NON_FINITE", message="the loss is not finite")
    found = {
        "operation": _operation("FORWARD_BACKWARD", seq=1, forward_backward=result, num_tokens=3, engine_seconds=0.1),
        "operation_stepped": _operation("OPTIM_STEP", seq=2, optim_step=step),
        "operation_failed": _operation("FORWARD", seq=3, error=error),
        "operation_queued": _operation("FORWARD_BACKWARD", seq=4),
    }
    return [Vector(name=name, message=operation) for name, operation in found.items()]


def _operation(kind: str, *, seq: int, target_id: str = ADAPTER, **values: Any) -> operations_pb2.Operation:
    is_failed = "error" in values
    state = "FAILED" if is_failed else "SUCCEEDED" if values else "QUEUED"
    return operations_pb2.Operation(
        name=f"{target_id}:{seq}",
        kind=operations_pb2.OperationKind.Value(f"OPERATION_KIND_{kind}"),
        state=operations_pb2.OperationState.Value(f"OPERATION_STATE_{state}"),
        target_id=target_id,
        seq=seq,
        **values,
    )


@cache
def carries_tensors(descriptor: Descriptor) -> bool:
    """Return whether a message has a tensor, or may hold one at any depth."""
    return descriptor is types_pb2.Tensor.DESCRIPTOR or any(
        field.message_type is not None and carries_tensors(field.message_type) for field in descriptor.fields
    )


def messages_with_tensors() -> list[Descriptor]:
    """Return the messages of the contract that carry tensors, innermost first."""
    found: list[Descriptor] = []

    def add(descriptor: Descriptor) -> None:
        for field in descriptor.fields:
            if field.message_type is not None and carries_tensors(field.message_type):
                add(field.message_type)
        if descriptor not in found and not descriptor.GetOptions().map_entry:
            found.append(descriptor)

    for module in MODULES:
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            if carries_tensors(descriptor):
                add(descriptor)
    return found


def completed(vectors: Sequence[Vector]) -> list[Vector]:
    """Return the vectors, and one of each message with tensors that has none: the first that is part of another one.

    A message that is part of none of them, as the responses, gets the first of each of its own parts.
    """
    named = {vector.message.DESCRIPTOR.full_name for vector in vectors}
    first: dict[str, Message] = {}
    for vector in vectors:
        for message in _with_parts(vector.message):
            first.setdefault(message.DESCRIPTOR.full_name, message)
    found = list(vectors)
    for descriptor in messages_with_tensors():
        if descriptor.full_name not in first:
            first[descriptor.full_name] = GetMessageClass(descriptor)()
            for field in descriptor.fields:
                if field.message_type is not None and carries_tensors(field.message_type):
                    value = getattr(first[descriptor.full_name], field.name)
                    (value.add() if field.is_repeated else value).CopyFrom(first[field.message_type.full_name])
        if descriptor.full_name not in named:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", descriptor.name).lower()
            found.append(Vector(name=name, message=first[descriptor.full_name]))
    return found


def _with_parts(message: Message) -> Iterator[Message]:
    """Yield the message and the messages inside it, without the entries of maps."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if not field.message_type.GetOptions().map_entry:
            inside = value if field.is_repeated else [value]
        else:
            inside = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        for part in inside:
            yield from _with_parts(part)


def has_sorted_map(message: Message) -> bool:
    """Return whether a map in the message has several entries: their order in its bytes is the encoder's choice."""
    return any(
        field.message_type is not None and field.message_type.GetOptions().map_entry and len(value) > 1
        for part in _with_parts(message)
        for field, value in part.ListFields()
    )


def text() -> str:
    """Return the whole file."""
    vectors = completed([*tensors(), *passes(), *states(), *operations(), *samples(), *creations()])
    rows = [list(COLUMNS), *(vector.row() for vector in vectors)]
    return "".join("\t".join(row) + "\n" for row in rows)


def main() -> int:
    """Write or check the file; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the encoding has changed")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        print(f"{FILE} differs: the encoding of a message has changed, or what the pool keeps of it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Messages of RPCs, made from the contract's descriptors: plainly valid ones, nearly valid ones, and arbitrary ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from scripts.reliability.fuzz.values import Values
from tinkerpool.compat import tinker_pb2 as compat
from tinkerpool.convert import to_tensor
from tinkerpool.v1 import (
    adapters_pb2,
    admin_pb2,
    checkpoints_pb2,
    operations_pb2,
    sampling_pb2,
    sessions_pb2,
    training_pb2,
    types_pb2,
)

DEPTH_MAX = 6
RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
LOSS_INPUTS = ("target_tokens", "weights", "logprobs", "advantages")
LOSS_OPTIONS = ("clip_low_threshold", "clip_high_threshold", "beta")

Plain = Callable[[Values], Message]


class Messages:
    """Makes messages."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def body(self, descriptor: Descriptor) -> bytes:
        """Return the bytes of a message of this type."""
        values = self._values
        if values.chance(0.05):
            return values.data()
        body = self.message(descriptor).SerializeToString()
        return values.damaged(body) if values.chance(0.15) else body

    def json(self, descriptor: Descriptor) -> bytes:
        """Return a message of this type in JSON."""
        values = self._values
        if values.chance(0.05):
            return values.data()
        try:
            body = json_format.MessageToJson(self.message(descriptor), indent=None).encode(errors="replace")
        except json_format.SerializeToJsonError:  # a time that JSON cannot say
            return values.data()
        return values.damaged(body) if values.chance(0.15) else body

    def message(self, descriptor: Descriptor) -> Message:
        """Return a message: half of them valid or with one odd field, where the type has a valid form of its own."""
        message = self._message(descriptor)
        if isinstance(message, admin_pb2.RotateApiKeyRequest) and not message.key_id:
            message.key_id = "another"  # without it, the key that the fuzzer's calls need would end
        return message

    def _message(self, descriptor: Descriptor) -> Message:
        values = self._values
        plain = PLAIN.get(descriptor.full_name)
        if plain is None or values.chance(0.4):
            return self._arbitrary(descriptor, 0)
        message = plain(values)
        if values.chance(0.5) and descriptor.fields:
            odd = values.rng.choice(list(descriptor.fields))
            message.ClearField(odd.name)
            self._fill(message, odd, 0)
        return message

    def _arbitrary(self, descriptor: Descriptor, depth: int) -> Message:
        values = self._values
        if descriptor.full_name == types_pb2.Tensor.DESCRIPTOR.full_name and values.chance(0.8):
            return tensor(values)
        message = GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if values.chance(0.7):
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        values, part = self._values, field.message_type
        target = getattr(message, field.name)
        if part is None and field.is_repeated:
            target.extend(self._scalar(field) for _ in range(values.count()))
        elif part is None:
            setattr(message, field.name, self._scalar(field))
        elif depth >= DEPTH_MAX:
            return
        elif part.GetOptions().map_entry:
            for _ in range(values.count()):
                self._fill_entry(target, part.fields_by_name["value"], depth)
        elif field.is_repeated:
            for _ in range(values.count()):
                target.append(self._arbitrary(part, depth + 1))
        else:
            target.CopyFrom(self._arbitrary(part, depth + 1))

    def _fill_entry(self, target: Any, value: FieldDescriptor, depth: int) -> None:
        values = self._values
        name = values.rng.choice(LOSS_INPUTS + LOSS_OPTIONS) if values.chance(0.6) else values.string("key")
        if value.message_type is not None:
            target[name].CopyFrom(self._arbitrary(value.message_type, depth + 1))
        else:
            target[name] = self._scalar(value)

    def _scalar(self, field: FieldDescriptor) -> Any:
        values = self._values
        if field.type == FieldDescriptor.TYPE_STRING:
            return values.string(field.name)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return values.data()
        if field.type == FieldDescriptor.TYPE_BOOL:
            return values.chance(0.5)
        if field.enum_type is not None:
            numbers = [value.number for value in field.enum_type.values]
            return values.rng.choice([*numbers, 99])
        if field.cpp_type in RANGES:
            if field.name == "seq" and values.chance(0.7):
                return 0
            return values.integer(*RANGES[field.cpp_type])
        return values.number()


def tensor(values: Values) -> types_pb2.Tensor:
    """Return a tensor; some have a wrong shape or data of a wrong length."""
    with np.errstate(over="ignore"):  # a number may be too large for float32: infinite
        floats = np.array([values.number()] * 4, np.float32)
    made = to_tensor(values.tokens(values.count()) if values.chance(0.5) else floats)
    if values.chance(0.2):
        made.shape[:] = [values.integer() for _ in range(values.rng.randrange(4))]
    if values.chance(0.1):
        made.data = values.data()
    if values.chance(0.1):
        made.dtype = values.rng.choice([0, 1, 2, 3, 9])  # type: ignore[assignment]
    return made


def _data(values: Values) -> list[types_pb2.Datum]:
    data = []
    for _ in range(values.rng.randint(1, 4)):
        tokens = values.tokens(values.rng.randint(1, 12))
        inputs = {"target_tokens": to_tensor(tokens), "weights": to_tensor(np.ones(len(tokens), np.float32))}
        data.append(types_pb2.Datum(tokens=to_tensor(tokens), loss_inputs=inputs))
    return data


def _adapter(values: Values) -> str:
    return values.known.newest("adapter")


def _path(values: Values) -> str:
    return values.string("path")


def _pass(kind: type[Message]) -> Plain:
    def make(values: Values) -> Message:
        loss = types_pb2.LOSS_FUNCTION_CROSS_ENTROPY
        return kind(adapter_id=_adapter(values), data=_data(values), loss_function=loss)

    return make


def _sample(values: Values) -> sampling_pb2.SampleRequest:
    return sampling_pb2.SampleRequest(
        sampler_id=values.known.newest("sampler"),
        prompt=to_tensor(values.tokens(values.rng.randint(1, 9))),
        num_samples=values.rng.randint(1, 3),
        params=sampling_pb2.SamplingParams(max_tokens=values.rng.randint(1, 6)),
    )


def _compat_pass(values: Values) -> compat.ForwardBackwardRequest:
    request = compat.ForwardBackwardRequest(
        model_id=_adapter(values), seq_id=values.rng.randint(1, 50), loss_fn="cross_entropy"
    )
    for datum in _data(values):
        made = request.data.add()
        tokens = np.frombuffer(datum.tokens.data, np.int32)
        made.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, given in datum.loss_inputs.items():
            sent = made.loss_fn_inputs[name]
            sent.dense, sent.shape[:] = given.data, given.shape
            sent.dtype = compat.DATA_TYPE_INT32 if name == "target_tokens" else compat.DATA_TYPE_FLOAT32
    return request


PLAIN: dict[str, Plain] = {
    sessions_pb2.CreateSessionRequest.DESCRIPTOR.full_name: lambda _: sessions_pb2.CreateSessionRequest(),
    sessions_pb2.HeartbeatRequest.DESCRIPTOR.full_name: lambda values: sessions_pb2.HeartbeatRequest(
        session_id=values.known.newest("session")
    ),
    adapters_pb2.CreateAdapterRequest.DESCRIPTOR.full_name: lambda values: adapters_pb2.CreateAdapterRequest(
        session_id=values.known.newest("session"),
        base_model=values.known.newest("model"),
        rank=8,
        index=values.rng.randrange(50),
    ),
    adapters_pb2.GetAdapterRequest.DESCRIPTOR.full_name: lambda values: adapters_pb2.GetAdapterRequest(
        adapter_id=_adapter(values)
    ),
    training_pb2.ForwardRequest.DESCRIPTOR.full_name: _pass(training_pb2.ForwardRequest),
    training_pb2.ForwardBackwardRequest.DESCRIPTOR.full_name: _pass(training_pb2.ForwardBackwardRequest),
    training_pb2.TrainStepRequest.DESCRIPTOR.full_name: _pass(training_pb2.TrainStepRequest),
    training_pb2.OptimStepRequest.DESCRIPTOR.full_name: lambda values: training_pb2.OptimStepRequest(
        adapter_id=_adapter(values), adam=types_pb2.AdamParams(learning_rate=1e-3)
    ),
    training_pb2.DiscardGradientRequest.DESCRIPTOR.full_name: lambda values: training_pb2.DiscardGradientRequest(
        adapter_id=_adapter(values)
    ),
    training_pb2.LoadStateRequest.DESCRIPTOR.full_name: lambda values: training_pb2.LoadStateRequest(
        adapter_id=_adapter(values), path=_path(values)
    ),
    checkpoints_pb2.SaveStateRequest.DESCRIPTOR.full_name: lambda values: checkpoints_pb2.SaveStateRequest(
        adapter_id=_adapter(values), name=f"n{values.rng.randrange(20)}", overwrite=values.chance(0.5)
    ),
    checkpoints_pb2.SaveWeightsForSamplerRequest.DESCRIPTOR.full_name: lambda values: (
        checkpoints_pb2.SaveWeightsForSamplerRequest(adapter_id=_adapter(values), name=f"w{values.rng.randrange(20)}")
    ),
    sampling_pb2.CreateSamplerRequest.DESCRIPTOR.full_name: lambda values: sampling_pb2.CreateSamplerRequest(
        session_id=values.known.newest("session"), base_model=values.known.newest("model")
    ),
    sampling_pb2.SampleRequest.DESCRIPTOR.full_name: _sample,
    sampling_pb2.StreamSampleRequest.DESCRIPTOR.full_name: lambda values: sampling_pb2.StreamSampleRequest(
        request=_sample(values)
    ),
    operations_pb2.WaitOperationsRequest.DESCRIPTOR.full_name: lambda values: operations_pb2.WaitOperationsRequest(
        names=[values.string("name") for _ in range(values.rng.randint(1, 4))]
    ),
    admin_pb2.CreateApiKeyRequest.DESCRIPTOR.full_name: lambda _: admin_pb2.CreateApiKeyRequest(tenant="another"),
    compat.ForwardBackwardRequest.DESCRIPTOR.full_name: _compat_pass,
}
"""The plainly valid form of a message, where arbitrary fields would hardly ever be valid."""

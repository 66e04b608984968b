"""Passes as clients before 0.25 send them, in JSON: converted to the protobuf form of later clients."""

from __future__ import annotations

import numpy as np

from coordinator.base.errors import invalid
from coordinator.doors.tinker import schemas
from coordinator.doors.tinker.tensors import binary_tensor, elements
from tinkerpool.compat import tinker_pb2 as wire


def binary_pass(asked: schemas.JsonPass) -> wire.ForwardBackwardRequest:
    """Return a pass as later clients send it. Raises ServiceError INVALID_ARGUMENT."""
    given = asked.forward_backward_input or asked.forward_input
    if given is None:
        raise invalid("forward_backward_input and forward_input are missing: send one of them, with the data")
    return wire.ForwardBackwardRequest(
        model_id=asked.model_id,
        seq_id=asked.seq_id,
        forward_only=is_forward(asked),
        loss_fn=given.loss_fn,
        loss_fn_config=given.loss_fn_config or {},
        data=[_datum(f"data[{index}]", datum) for index, datum in enumerate(given.data)],
    )


def is_forward(asked: schemas.JsonPass) -> bool:
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
    if chunk.type != "encoded_text" or chunk.tokens is None:
        return wire.Chunk(image=wire.OpaqueChunk())  # refused later, like any chunk that is not text
    return wire.Chunk(encoded_text=wire.TextChunk(tokens=elements(label, chunk.tokens, np.dtype("<i4"))))

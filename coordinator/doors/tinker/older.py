"""Passes as clients before 0.25 send them, in JSON, made into what later ones send. Knows no order and no use case."""

from __future__ import annotations

import numpy as np

from coordinator.base.errors import invalid
from coordinator.doors.tinker import shapes
from coordinator.doors.tinker.tensors import binary_tensor, elements
from tinkerpool.compat import tinker_pb2 as wire


def binary_pass(asked: shapes.JsonPass) -> wire.ForwardBackwardRequest:
    """A pass as later clients send it. Raises ServiceError INVALID_ARGUMENT."""
    request = wire.ForwardBackwardRequest(model_id=asked.model_id, seq_id=asked.seq_id)
    given = asked.forward_backward_input or asked.forward_input
    if given is None:
        raise invalid("forward_backward_input (or forward_input) is missing: it has the data")
    request.forward_only = is_forward(asked)
    request.loss_fn = given.loss_fn
    request.loss_fn_config.update(given.loss_fn_config or {})
    for index, datum in enumerate(given.data):
        added = request.data.add()
        for chunk in datum.model_input.chunks:
            _add_chunk(added, chunk, f"data[{index}].model_input")
        for name, tensor in datum.loss_fn_inputs.items():
            label = f"data[{index}].loss_fn_inputs[{name[:80]!r}]"
            added.loss_fn_inputs[name].CopyFrom(binary_tensor(label, tensor))
    return request


def is_forward(asked: shapes.JsonPass) -> bool:
    """Whether it is to add no gradient. One without any input may have been to add some."""
    return asked.forward_backward_input is None and asked.forward_input is not None


def _add_chunk(datum: wire.Datum, chunk: shapes.Chunk, label: str) -> None:
    if chunk.type != "encoded_text" or chunk.tokens is None:
        datum.model_input.add().image.SetInParent()
        return
    datum.model_input.add().encoded_text.tokens = elements(label, chunk.tokens, np.dtype("<i4"))

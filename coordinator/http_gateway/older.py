"""Passes as clients before 0.25 send them, in JSON, made into what later ones send. Knows no order and no use case."""

from __future__ import annotations

from typing import Any

import numpy as np

from coordinator.errors import invalid
from coordinator.http_gateway import shapes
from tinkerpool.compat import tinker_pb2 as wire

_DTYPES: dict[str, tuple[np.dtype[Any], wire.DataType.ValueType]] = {
    "float32": (np.dtype("<f4"), wire.DATA_TYPE_FLOAT32),
    "int64": (np.dtype("<i8"), wire.DATA_TYPE_INT64),
}


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
            _fill_tensor(added.loss_fn_inputs[name], tensor, f"data[{index}].loss_fn_inputs[{name[:80]!r}]")
    return request


def is_forward(asked: shapes.JsonPass) -> bool:
    """Whether it is to add no gradient. One without any input may have been to add some."""
    return asked.forward_backward_input is None and asked.forward_input is not None


def _add_chunk(datum: wire.Datum, chunk: shapes.Chunk, label: str) -> None:
    if chunk.type != "encoded_text" or chunk.tokens is None:
        datum.model_input.add().image.SetInParent()
        return
    datum.model_input.add().encoded_text.tokens = _array(chunk.tokens, np.dtype("<i4"), label)


def _fill_tensor(message: wire.Tensor, tensor: shapes.JsonTensor, label: str) -> None:
    dtype, message.dtype = _DTYPES[tensor.dtype]
    message.shape.extend(tensor.shape or [])
    elements = _array(tensor.data, dtype, label)
    if tensor.sparse_crow_indices is None:
        message.dense = elements
        return
    message.sparse_csr.values = elements
    message.sparse_csr.crow_indices = _array(tensor.sparse_crow_indices, np.dtype("<i8"), label)
    message.sparse_csr.col_indices = _array(tensor.sparse_col_indices or [], np.dtype("<i8"), label)


def _array(values: list[int] | list[float], dtype: np.dtype[Any], label: str) -> bytes:
    try:
        return np.array(values, dtype).tobytes()
    except (OverflowError, ValueError):
        raise invalid(f"{label} has a number that is no {dtype.name}") from None

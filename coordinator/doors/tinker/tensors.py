"""From the Tinker protocol's tensors to the contract's and back. Checks sizes; not what a tensor means.

Legend: n tokens of a sequence, k targets at each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.base.errors import ServiceError, invalid
from coordinator.doors.tinker.shapes import JsonTensor
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import checked_shape, to_tensor
from tinkerpool.v1 import types_pb2

ELEMENTS_MAX = 1 << 24
"""Largest tensor once it is dense, and all sparse ones of a request: a few bytes can claim any shape."""
_JSON_DTYPES: Mapping[str, wire.DataType.ValueType] = {
    "float32": wire.DATA_TYPE_FLOAT32,
    "int64": wire.DATA_TYPE_INT64,
}
_DTYPES: dict[int, np.dtype[Any]] = {
    wire.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    wire.DATA_TYPE_INT64: np.dtype("<i8"),
    wire.DATA_TYPE_INT32: np.dtype("<i4"),
    wire.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
}


def binary_tensor(label: str, tensor: JsonTensor) -> wire.Tensor:
    """A tensor that came in JSON. Raises ServiceError INVALID_ARGUMENT; `label` says where it stands."""
    message = wire.Tensor(dtype=_JSON_DTYPES[tensor.dtype], shape=tensor.shape)
    values = elements(label, tensor.data, _DTYPES[message.dtype])
    if tensor.sparse_crow_indices is None:
        message.dense = values
        return message
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = elements(label, tensor.sparse_crow_indices, np.dtype("<i8"))
    message.sparse_csr.col_indices = elements(label, tensor.sparse_col_indices or [], np.dtype("<i8"))
    return message


def elements(label: str, values: list[int] | list[float], dtype: np.dtype[Any]) -> bytes:
    """Numbers that came in JSON, as bytes. Raises ServiceError INVALID_ARGUMENT."""
    try:
        return np.array(values, dtype).tobytes()
    except (OverflowError, ValueError):
        raise invalid(f"{label} has a number that is no {dtype.name}") from None


def dense(label: str, tensor: wire.Tensor, missing: int = 0) -> types_pb2.Tensor:
    """A tensor as the contract has it; missing entries of a sparse one are `missing`.

    Raises ServiceError INVALID_ARGUMENT; `label` says where it stands.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise invalid(f"{label} has element type {tensor.dtype}, which is not known")
    shape = shape_of(label, tensor)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        array = _from_rows(label, tensor.sparse_csr, dtype, shape, missing)
    else:
        array = _elements(label, tensor.dense, dtype)
        shape = shape or array.shape
        if array.size != math.prod(shape):
            raise invalid(f"{label} has {array.size} elements but shape {shape}")
        array = array.reshape(shape)
    if tensor.dtype == wire.DATA_TYPE_BFLOAT16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return to_tensor(array)


def dense_floats(array: NDArray[np.float32]) -> wire.Tensor:
    """An array with all its elements."""
    return wire.Tensor(dense=array.astype("<f4").tobytes(), dtype=wire.DATA_TYPE_FLOAT32, shape=array.shape)


def sparse_rows(array: NDArray[np.float32]) -> wire.Tensor:
    """A matrix by its entries that are not NaN, row by row."""
    rows, columns = np.nonzero(~np.isnan(array))
    starts = np.searchsorted(rows, np.arange(len(array) + 1))
    message = wire.Tensor(dtype=wire.DATA_TYPE_FLOAT32, shape=array.shape)
    message.sparse_csr.values = array[rows, columns].astype("<f4").tobytes()
    message.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
    message.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    return message


def shape_of(label: str, tensor: wire.Tensor) -> tuple[int, ...]:
    """The shape that a tensor claims, of `ELEMENTS_MAX` elements at most. Raises ServiceError INVALID_ARGUMENT."""
    try:
        return checked_shape(tensor.shape, ELEMENTS_MAX)
    except ValueError as error:
        raise invalid(f"{label} is refused: {error}") from None


def tokens(chunks: Iterable[wire.Chunk], label: str) -> types_pb2.Tensor:
    """Chunks of text as one vector of token ids, int32 (n,).

    Raises ServiceError INVALID_ARGUMENT, also for what is not text.
    """
    pieces = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise not_text(label, {"image": "an image", "dmel": "sound"}.get(kind or "", "an unknown chunk"))
        pieces.append(_elements(label, chunk.encoded_text.tokens, np.dtype("<i4")))
    return to_tensor(np.concatenate(pieces) if pieces else np.zeros(0, np.int32))


def not_text(label: str, what: str) -> ServiceError:
    """The refusal of input that no base model here takes."""
    return invalid(f"{label} has {what}: the base models of this pool take text only, as token ids", "UNSUPPORTED")


def array_records(name: str, tensors: Sequence[types_pb2.Tensor]) -> list[wire.ArrayRecord]:
    """One array for each sequence, as records of consecutive sequences whose trailing shapes are equal."""
    records = []
    for trailing, group in groupby(tensors, key=lambda tensor: tuple(tensor.shape[1:])):
        members = list(group)
        ends = np.cumsum([0, *(len(tensor.data) for tensor in members)], dtype="<i8")
        batched = wire.BatchedTensor(
            data=b"".join(tensor.data for tensor in members),
            offsets=ends.tobytes(),
            dtype=wire.DATA_TYPE_FLOAT32,
            trailing_shape=trailing,
        )
        records.append(wire.ArrayRecord(fields={name: batched}, num_datums=len(members)))
    return records


def _elements(label: str, data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise invalid(f"{label} has {len(data)} bytes, which is no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def _from_rows(
    label: str, rows: wire.SparseRows, dtype: np.dtype[Any], shape: tuple[int, ...], missing: int
) -> NDArray[Any]:
    """The matrix of a compressed one, (n, k)."""
    values = _elements(label, rows.values, dtype)
    starts = _elements(label, rows.crow_indices, np.dtype("<i8"))
    columns = _elements(label, rows.col_indices, np.dtype("<i8"))
    if len(shape) != 2 or len(starts) != shape[0] + 1:
        raise invalid(f"{label} is sparse: it needs a shape of two sizes and one row index more than rows")
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any() or len(columns) != len(values):
        raise invalid(f"{label} is sparse, and its indices do not fit its {len(values)} values")
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
        raise invalid(f"{label} is sparse, and has a column that is not 0 to {shape[1] - 1}")
    array = np.full(shape, missing, dtype)
    array[np.repeat(np.arange(shape[0]), counts), columns] = values
    return array

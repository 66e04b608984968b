"""From the Tinker protocol's tensors to the contract's and back. Checks sizes, not meanings.

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
from coordinator.doors.tinker.schemas import Chunk, JsonTensor
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import checked_shape, to_tensor
from tinkerpool.v1 import types_pb2

ELEMENTS_MAX = 1 << 24
"""Elements of a dense tensor, and of all sparse tensors of a request: a few bytes can claim any shape."""
TEXT = "encoded_text"
"""The type of chunk that the pool takes."""
_KINDS = {"image": "an image", "dmel": "sound"}
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
    """Convert a tensor in JSON. Raises ServiceError INVALID_ARGUMENT; `label` names the field."""
    dtype = _JSON_DTYPES[tensor.dtype]
    values = elements(label, tensor.data, _DTYPES[dtype])
    if tensor.sparse_crow_indices is None:
        return wire.Tensor(dtype=dtype, shape=tensor.shape, dense=values)
    rows = wire.SparseRows(
        values=values,
        crow_indices=elements(label, tensor.sparse_crow_indices, np.dtype("<i8")),
        col_indices=elements(label, tensor.sparse_col_indices or [], np.dtype("<i8")),
    )
    return wire.Tensor(dtype=dtype, shape=tensor.shape, sparse_csr=rows)


def elements(label: str, values: list[int] | list[float], dtype: np.dtype[Any]) -> bytes:
    """Convert numbers in JSON to bytes. Raises ServiceError INVALID_ARGUMENT."""
    try:
        return np.array(values, dtype).tobytes()
    except (OverflowError, ValueError):
        raise invalid(f"{label} has a number that is not a valid {dtype.name}: send numbers in its range") from None


def dense(label: str, tensor: wire.Tensor, missing: int = 0) -> types_pb2.Tensor:
    """Convert a tensor to the contract's form; missing entries of a sparse one become `missing`.

    Raises ServiceError INVALID_ARGUMENT; `label` names the field.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise invalid(f"{label} has the unknown element type {tensor.dtype}: use float32, bfloat16, int32 or int64")
    shape = shape_of(label, tensor)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        array = _from_rows(label, tensor.sparse_csr, dtype, shape, missing)
    else:
        array = _elements(label, tensor.dense, dtype)
        shape = shape or array.shape
        if array.size != math.prod(shape):
            raise invalid(
                f"{label} has {array.size} elements but shape {shape}: send as many elements as the shape has"
            )
        array = array.reshape(shape)
    if tensor.dtype == wire.DATA_TYPE_BFLOAT16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return to_tensor(array)


def dense_floats(array: NDArray[np.float32]) -> wire.Tensor:
    """Convert an array to a dense tensor."""
    return wire.Tensor(dense=array.astype("<f4").tobytes(), dtype=wire.DATA_TYPE_FLOAT32, shape=array.shape)


def sparse_rows(array: NDArray[np.float32]) -> wire.Tensor:
    """Convert a matrix to a sparse tensor of its entries other than NaN."""
    rows, columns = np.nonzero(~np.isnan(array))
    starts = np.searchsorted(rows, np.arange(len(array) + 1))
    sparse = wire.SparseRows(
        values=array[rows, columns].astype("<f4").tobytes(),
        crow_indices=starts.astype("<i8").tobytes(),
        col_indices=columns.astype("<i8").tobytes(),
    )
    return wire.Tensor(dtype=wire.DATA_TYPE_FLOAT32, shape=array.shape, sparse_csr=sparse)


def shape_of(label: str, tensor: wire.Tensor) -> tuple[int, ...]:
    """Return a tensor's shape, of at most `ELEMENTS_MAX` elements. Raises ServiceError INVALID_ARGUMENT."""
    try:
        return checked_shape(tensor.shape, ELEMENTS_MAX)
    except ValueError as error:
        raise invalid(f"{label} is refused: {error}") from None


def tokens(chunks: Iterable[wire.Chunk], label: str) -> types_pb2.Tensor:
    """Join chunks of text into one vector of token ids, int32 (n,).

    Raises ServiceError INVALID_ARGUMENT, also for chunks that are not text.
    """
    pieces = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise not_text(label, _KINDS.get(kind or "", "a chunk of a kind that this pool does not know"))
        pieces.append(_elements(label, chunk.encoded_text.tokens, np.dtype("<i4")))
    return to_tensor(np.concatenate(pieces) if pieces else np.zeros(0, np.int32))


def text_of(chunk: Chunk, label: str) -> list[int]:
    """Return the token ids of a chunk in JSON. Raises ServiceError INVALID_ARGUMENT for one that is not text."""
    if chunk.type != TEXT:
        raise not_text(label, f"a chunk of type {chunk.type[:40]!r}")
    if chunk.tokens is None:
        raise invalid(f"{label} has a chunk of type {TEXT!r} without tokens: send its token ids as tokens")
    return chunk.tokens


def not_text(label: str, what: str) -> ServiceError:
    """Return the refusal of input that the base models do not take."""
    message = f"{label} has {what}: the base models of this pool take text only, in chunks of type {TEXT!r}"
    return invalid(f"{message} with token ids", "UNSUPPORTED")


def array_records(name: str, tensors: Sequence[types_pb2.Tensor]) -> list[wire.ArrayRecord]:
    """Convert one array per sequence to records, one for each run of sequences with equal trailing shapes."""
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
        raise invalid(
            f"{label} has {len(data)} bytes, which is not a multiple of the {dtype.itemsize} bytes of {dtype.name}"
        )
    return np.frombuffer(data, dtype)


def _from_rows(
    label: str, rows: wire.SparseRows, dtype: np.dtype[Any], shape: tuple[int, ...], missing: int
) -> NDArray[Any]:
    """Return the dense matrix of compressed sparse rows, (n, k)."""
    values = _elements(label, rows.values, dtype)
    starts = _elements(label, rows.crow_indices, np.dtype("<i8"))
    columns = _elements(label, rows.col_indices, np.dtype("<i8"))
    if len(shape) != 2 or len(starts) != shape[0] + 1:
        raise invalid(f"{label} is sparse: send a shape of two sizes, and one row index more than there are rows")
    counts = np.diff(starts)
    if starts[0] != 0 or starts[-1] != len(values) or (counts < 0).any() or len(columns) != len(values):
        raise invalid(
            f"{label} is sparse, and its indices do not match its {len(values)} values: send compressed sparse rows"
        )
    if len(columns) and not 0 <= int(columns.min()) <= int(columns.max()) < shape[1]:
        raise invalid(f"{label} is sparse, and has a column outside 0 to {shape[1] - 1}")
    array = np.full(shape, missing, dtype)
    array[np.repeat(np.arange(shape[0]), counts), columns] = values
    return array

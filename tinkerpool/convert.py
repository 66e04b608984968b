"""Tensor messages to and from numpy. No copy where numpy allows it; every malformed tensor is a ValueError.

Checks shapes and dtypes; callers check the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinkerpool.v1 import types_pb2

_NUMPY_DTYPES: dict[int, np.dtype[Any]] = {
    types_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    types_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
}
DIMS_MAX = 8
"""Most dimensions of a tensor."""
_ELEMENTS_MAX = 1 << 31
"""More elements than any message can hold."""
_DATA_TYPES = {dtype: data_type for data_type, dtype in _NUMPY_DTYPES.items()}


def to_tensor(array: NDArray[Any]) -> types_pb2.Tensor:
    """Return the message of a float32, int32 or int64 array of any shape. Raises ValueError for another dtype."""
    array = np.asarray(array)
    data_type = _DATA_TYPES.get(array.dtype.newbyteorder("<"))
    if data_type is None:
        raise ValueError(f"a tensor is float32, int32 or int64, not {array.dtype}: convert it with .astype()")
    little_endian = np.ascontiguousarray(array, dtype=_NUMPY_DTYPES[data_type])
    return types_pb2.Tensor(
        data=little_endian.tobytes(),
        dtype=data_type,  # type: ignore[arg-type]  # the generated enum is not an int for mypy
        shape=array.shape,
    )


def from_tensor(tensor: types_pb2.Tensor) -> NDArray[Any]:
    """Return the array of a message, read-only, sharing its bytes. Raises ValueError if bytes and shape disagree."""
    dtype = _NUMPY_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError("the tensor's dtype is unset or unknown: use FLOAT32, INT32 or INT64")
    shape = checked_shape(tensor.shape, _ELEMENTS_MAX)
    expected = math.prod(shape) * dtype.itemsize
    data = tensor.data  # a copy at every access
    if len(data) != expected:
        raise ValueError(f"the tensor has {len(data)} bytes where shape {shape} of {dtype} needs {expected}")
    return np.ndarray(shape, dtype, buffer=data)  # one object, where a reshaped `frombuffer` is two


def checked_shape(shape: Sequence[int], elements_max: int) -> tuple[int, ...]:
    """Return a received shape if numpy can create it and its product is cheap to compute.

    Raises ValueError for more than `DIMS_MAX` dimensions, a negative size, or more than `elements_max` elements. A size
    of 0 counts as 1 for this limit.
    """
    if len(shape) > DIMS_MAX:
        raise ValueError(f"the tensor's shape has {len(shape)} sizes: send at most {DIMS_MAX}")
    num_elements = 1
    for size in shape:
        if size < 0:
            raise ValueError(f"the tensor's shape {tuple(shape)} has a negative size")
        num_elements *= max(size, 1)
        if num_elements > elements_max:
            raise ValueError(f"the tensor's shape {tuple(shape)} has more than {elements_max} elements: send less")
    return tuple(shape)

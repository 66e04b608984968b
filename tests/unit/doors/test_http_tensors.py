"""Tensors of the Tinker protocol: dense and sparse, in and out, checked by the official SDK's reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from coordinator.base.errors import ServiceError
from coordinator.doors.tinker.schemas import JsonTensor
from coordinator.doors.tinker.tensors import ELEMENTS_MAX, array_records, binary_tensor, dense, sparse_rows, tokens
from tinkerpool.compat import tinker_pb2 as wire
from tinkerpool.convert import from_tensor, to_tensor
from tinkerpool.v1 import types_pb2


def sparse(array: np.ndarray[Any, Any]) -> wire.Tensor:
    """Return a sparse tensor of a matrix's entries other than zero."""
    rows, columns = np.nonzero(array)
    starts = np.searchsorted(rows, np.arange(array.shape[0] + 1))
    dtype = wire.DATA_TYPE_FLOAT32 if array.dtype == np.float32 else wire.DATA_TYPE_INT64
    message = wire.Tensor(dtype=dtype, shape=array.shape)
    message.sparse_csr.values = array[rows, columns].tobytes()
    message.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
    message.sparse_csr.col_indices = columns.astype("<i8").tobytes()
    return message


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dtype=st.sampled_from([np.float32, np.int64]),
    data=st.data(),
)
def test_a_sparse_tensor_is_the_dense_one(shape: tuple[int, int], dtype: Any, data: st.DataObject) -> None:
    size = shape[0] * shape[1]
    values = data.draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size))
    array = np.array(values, dtype).reshape(shape)
    assert np.array_equal(from_tensor(dense("x", sparse(array))), array)


@pytest.mark.parametrize(
    ("values", "starts", "columns", "shape"),
    [
        ([1.0], [0, 1], [3], [1, 3]),
        ([1.0], [0, 1], [-1], [1, 3]),
        ([1.0], [0, 2], [0], [1, 3]),
        ([1.0], [1, 1], [0], [1, 3]),
        ([1.0, 2.0], [0, 2, 1, 2], [0, 0], [3, 3]),
        ([1.0], [0, 1], [0, 1], [1, 3]),
        ([1.0], [0], [0], [1, 3]),
        ([1.0], [0, 1], [0], [1]),
        ([1.0], [0, 1], [0], [1, -1]),
        ([], [0, 0], [], [1, ELEMENTS_MAX + 1]),
        ([], [0], [], [0, 1 << 62]),
    ],
)
def test_sparse_indices_that_contradict_the_values_are_refused(
    values: Any, starts: Any, columns: Any, shape: Any
) -> None:
    message = wire.Tensor(dtype=wire.DATA_TYPE_FLOAT32, shape=shape)
    message.sparse_csr.values = np.array(values, np.float32).tobytes()
    message.sparse_csr.crow_indices = np.array(starts, np.int64).tobytes()
    message.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()
    with pytest.raises(ServiceError, match="x "):
        dense("x", message)


def test_dense_tensors_have_four_types_and_without_a_shape_are_vectors() -> None:
    halves = np.array([1.0, -2.5, 0.0], np.float32)
    upper = (halves.view(np.uint32) >> 16).astype(np.uint16)
    assert np.array_equal(
        from_tensor(dense("x", wire.Tensor(dense=upper.tobytes(), dtype=wire.DATA_TYPE_BFLOAT16))), halves
    )
    for dtype, number in (
        (np.float32, wire.DATA_TYPE_FLOAT32),
        (np.int64, wire.DATA_TYPE_INT64),
        (np.int32, wire.DATA_TYPE_INT32),
    ):
        message = wire.Tensor(dense=np.arange(6, dtype=dtype).tobytes(), dtype=number, shape=[2, 3])
        assert np.array_equal(from_tensor(dense("x", message)), np.arange(6).reshape(2, 3))
    for broken in (
        wire.Tensor(dense=b"123", dtype=wire.DATA_TYPE_FLOAT32),
        wire.Tensor(dense=b"1234", dtype=wire.DATA_TYPE_FLOAT32, shape=[2]),
        wire.Tensor(dense=b"1234"),
    ):
        with pytest.raises(ServiceError, match="x has"):
            dense("x", broken)


@pytest.mark.parametrize("shape", [[1] * 9, [0, 1 << 62], [1 << 62] * 4, [-1, -1], [(1 << 63) - 1] * 200_000])
def test_an_impossible_shape_is_refused_before_its_product_is_computed(shape: list[int]) -> None:
    with pytest.raises(ServiceError, match="x is refused") as raised:
        dense("x", wire.Tensor(dtype=wire.DATA_TYPE_FLOAT32, shape=shape))
    assert len(raised.value.message) < 500
    with pytest.raises(ValueError, match="the tensor's shape") as invalid:
        from_tensor(types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=shape))
    assert len(str(invalid.value)) < 500


def test_chunks_of_text_are_joined_and_other_chunks_are_refused() -> None:
    chunks = [wire.Chunk(encoded_text=wire.TextChunk(tokens=np.array(part, "<i4").tobytes())) for part in ([1, 2], [3])]
    assert from_tensor(tokens(chunks, "x")).tolist() == [1, 2, 3]
    assert from_tensor(tokens([], "x")).tolist() == []
    for other in (wire.Chunk(image=wire.OpaqueChunk()), wire.Chunk(dmel=wire.OpaqueChunk()), wire.Chunk()):
        with pytest.raises(ServiceError, match="text only"):
            tokens([*chunks, other], "x")


def test_missing_entries_of_a_sparse_tensor_take_the_given_value() -> None:
    array = np.array([[0, 7], [0, 0]], np.int64)
    assert from_tensor(dense("x", sparse(array), missing=-1)).tolist() == [[-1, 7], [-1, -1]]


def test_a_tensor_in_json_equals_the_binary_one_and_numbers_out_of_range_are_refused() -> None:
    tensor = JsonTensor(data=[1, 2], dtype="int64", shape=[1, 2])
    assert from_tensor(dense("x", binary_tensor("x", tensor))).tolist() == [[1, 2]]
    rows = JsonTensor(data=[5], dtype="int64", shape=[2, 3], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[2])
    assert from_tensor(dense("x", binary_tensor("x", rows))).tolist() == [[0, 0, 0], [0, 0, 5]]
    with pytest.raises(ServiceError, match="x has a number that is not a valid int64"):
        binary_tensor("x", JsonTensor(data=[1 << 70], dtype="int64"))
    with pytest.raises(ServiceError, match="x is sparse"):
        dense("x", binary_tensor("x", JsonTensor(data=[5], dtype="int64", shape=[1, 1], sparse_crow_indices=[0, 1])))


@given(
    shape=st.tuples(st.integers(0, 6), st.integers(1, 4)),
    data=st.data(),
)
def test_the_sdk_reads_sparse_rows_as_the_matrix_without_nan_entries(
    shape: tuple[int, int], data: st.DataObject
) -> None:
    size = shape[0] * shape[1]
    values = data.draw(st.lists(st.sampled_from([0.0, -0.5, -3.0, float("nan")]), min_size=size, max_size=size))
    array = np.array(values, np.float32).reshape(shape)
    message = wire.SampleResponse(target_prompt_logprobs=sparse_rows(array))
    tensor = deserialize_sample_response(message.SerializeToString()).target_prompt_logprobs
    assert tensor is not None
    assert tensor.sparse_crow_indices is not None
    assert len(tensor.data) == np.count_nonzero(~np.isnan(array))
    assert np.array_equal(tensor.to_numpy(), np.nan_to_num(array))


@given(shapes=st.lists(st.one_of(st.tuples(st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(1, 3)))))
def test_the_sdk_reads_outputs_of_any_shape_unchanged(shapes: list[tuple[int, ...]]) -> None:
    arrays = [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)]
    records = array_records("logprobs", [to_tensor(array) for array in arrays])
    output = wire.ForwardBackwardOutput(loss_fn_output_type="T", loss_fn_outputs=records, metrics={"loss:sum": 1.5})
    read = deserialize_forward_backward_output(output.SerializeToString())
    assert read.metrics == {"loss:sum": 1.5}
    assert [tuple(d["logprobs"].shape or ()) for d in read.loss_fn_outputs] == shapes
    for datum, array in zip(read.loss_fn_outputs, arrays, strict=True):
        assert np.array_equal(datum["logprobs"].to_numpy(), array)

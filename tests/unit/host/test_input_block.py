"""Arrays that are sent to a device by one copy."""

from __future__ import annotations

import numpy as np
import torch

from workers.host.input_block import ALIGNMENT, InputBlock, Shape


def test_arrays_of_different_types_arrive_at_the_addresses_that_they_had() -> None:
    shapes: list[Shape] = [(np.int32, (3,)), (np.int64, (2, 2)), (np.float32, (5, 1))]
    inputs = InputBlock(shapes, torch.device("cpu"))
    assert [tensor.dtype for tensor in inputs.tensors] == [torch.int32, torch.int64, torch.float32]
    assert [tuple(tensor.shape) for tensor in inputs.tensors] == [shape for _, shape in shapes]
    addresses = [tensor.data_ptr() for tensor in inputs.tensors]
    assert {address % ALIGNMENT for address in addresses} == {addresses[0] % ALIGNMENT}
    for start in (1, 7):
        block, arrays = inputs.blank()
        for array in arrays:
            array[:] = np.arange(start, start + array.size).reshape(array.shape)
        inputs.send(block)
        for tensor, array in zip(inputs.tensors, arrays, strict=True):
            assert tensor.tolist() == array.tolist()
    assert [tensor.data_ptr() for tensor in inputs.tensors] == addresses


def test_values_that_are_not_written_are_sent_as_zeros() -> None:
    inputs = InputBlock([(np.int32, (4,))], torch.device("cpu"))
    block, (array,) = inputs.blank()
    array[:] = 9
    inputs.send(block)
    block, (array,) = inputs.blank()
    array[:2] = 5
    inputs.send(block)
    assert inputs.tensors[0].tolist() == [5, 5, 0, 0]
